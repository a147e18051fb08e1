"""Compare many concurrent conversations: one pool against stock llama.cpp's batched decoding.

python benchmarks/parallel.py [-m model.gguf] [--clients 1,2,4,8] [--prompt 1000] [--write 128]
    [--forks 8] [--document 4000]

With --clients "", only forks are measured: questions about one document, asked by forks of the
session that has read it, and by sessions that each read it.

Both sides use the same threads. The pool has the bytes of llama.cpp's cache, times --kv-budget, and
a tenth more, for pages that are not full. Stock llama.cpp reads the prompts one after the other,
then decodes one token of every sequence per step, through llama-cpp-python's low-level calls; it
samples greedily, as the pool does.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

from entropykv import Pool
from entropykv.llamacpp.model import Model
from entropykv.model import shipped
from entropykv.store.step import BatchPart, MicroBatch
from inputs import read_texts

PIECE = 128
ANSWER = 32
QUESTION = 24


@dataclass
class Streams:
    """Record when each client sent its request, and when it received its tokens."""

    starts: list[float] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)

    def first_tokens(self) -> list[float]:
        """Return the seconds from each client's request to its first token."""
        return [times[0] - start for start, times in zip(self.starts, self.times, strict=True)]

    def longest_pause(self) -> float:
        """Return the longest time in seconds between two tokens of the same stream."""
        return max(float(np.diff(times).max()) for times in self.times if len(times) > 1)

    def speed(self) -> float:
        """Return the tokens per second of all streams, from when the last one has begun until the
        first one ends.
        """
        begin = max(times[0] for times in self.times)
        end = min(times[-1] for times in self.times)
        written = sum(sum(begin < at <= end for at in times) for times in self.times)
        return written / (end - begin) if end > begin else 0.0

    def seconds(self) -> float:
        """Return the seconds from the first request to the last token."""
        return max(times[-1] for times in self.times) - min(self.starts)


def in_a_pool(
    path: str, prompts: list[list[int]], write: int, budget: str, threads: int
) -> Streams:
    """Let all clients start at once and write in a pool; return the times of their tokens. Exits if
    the pool exceeds its budget.
    """
    n_ctx = max(map(len, prompts)) + write + 1
    streams = Streams([0.0] * len(prompts), [[] for _ in prompts])
    options: dict[str, Any] = {"n_sequences": len(prompts), "n_ctx": n_ctx, "n_ubatch": PIECE}
    with Pool(path, kv_budget=budget, kv_type="f16", n_threads=threads, **options) as pool:

        def client(i: int) -> None:
            with pool.session() as session:
                streams.starts[i] = time.perf_counter()
                for _ in session.generate(prompts[i], max_tokens=write, temperature=0):
                    streams.times[i].append(time.perf_counter())

        with ThreadPoolExecutor(len(prompts)) as clients:
            list(clients.map(client, range(len(prompts))))
        stats = pool.stats()
        if stats.kv_bytes_peak > stats.kv_bytes_budget:
            raise SystemExit(f"{stats.kv_bytes_peak} bytes are more than the budget")
    return streams


def in_stock(model: Model, prompts: list[list[int]], write: int, threads: int) -> Streams:
    """Read the prompts one after the other with stock llama.cpp, then write a token of every
    sequence per step; return the times.
    """
    n, longest = len(prompts), max(map(len, prompts)) + write + 1
    parameters = model.context_defaults()
    parameters.n_ctx = n * (-(-longest // 256) * 256)
    parameters.n_batch = parameters.n_ubatch = 512
    parameters.n_seq_max, parameters.kv_unified = n, True
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = model.new_context(parameters)
    batch = MicroBatch(512, model.n_vocab)
    start = time.perf_counter()
    streams = Streams([start] * n, [[] for _ in prompts])
    tokens = [0] * n
    for i, prompt in enumerate(prompts):
        for first in range(0, len(prompt), 512):
            part = prompt[first : first + 512]
            last = first + len(part) == len(prompt)
            (rows,) = batch.decode_together(
                context, [BatchPart(part, first, int(last), sequence=i)]
            )
        tokens[i] = int(np.argmax(rows[-1])) if rows is not None else 0
        streams.times[i].append(time.perf_counter())
    for step in range(write - 1):
        parts = [BatchPart([tokens[i]], len(prompts[i]) + step, 1, sequence=i) for i in range(n)]
        for i, rows in enumerate(batch.decode_together(context, parts)):
            tokens[i] = int(np.argmax(rows)) if rows is not None else 0
            streams.times[i].append(time.perf_counter())
    batch.close()
    llama_cpp.llama_free(context)
    return streams


def cache_bytes(model: Model, n_tokens: int) -> int:
    """Return the bytes of K and V of n_tokens tokens in f16."""
    geometry = model.geometry
    width = geometry.head_dim_k + geometry.head_dim_v
    return 2 * n_tokens * width * sum(geometry.kv_heads_per_layer)


def report(name: str, n: int, streams: Streams) -> None:
    """Print one line with the figures of `n` clients."""
    first = streams.first_tokens()
    print(
        f"{name:<14} {n:>3} clients  {streams.seconds():7.2f} s in all  "
        f"{streams.speed():7.1f} tokens/s while all write  first token "
        f"{statistics.median(first):6.2f} s (worst {max(first):6.2f})  longest pause "
        f"{streams.longest_pause():6.3f} s",
        flush=True,
    )


def newcomer(path: str, prompts: list[list[int]], budget: str, threads: int) -> None:
    """Print after how many seconds a new client gets its first token, in median and at worst, while
    all other clients write, and their longest pause.
    """
    n, n_ctx = len(prompts), max(map(len, prompts)) + 1024
    pauses: list[list[float]] = [[] for _ in prompts]
    waits: list[float] = []
    done = threading.Event()
    options: dict[str, Any] = {"n_sequences": n, "n_ctx": n_ctx, "n_ubatch": PIECE}
    with Pool(path, kv_budget=budget, kv_type="f16", n_threads=threads, **options) as pool:

        def write(i: int) -> None:
            with pool.session() as session:
                for _ in session.generate(prompts[i][:50], max_tokens=1000, temperature=0):
                    pauses[i].append(time.perf_counter())
                    if done.is_set():
                        return

        with ThreadPoolExecutor(n) as clients:
            writers = [clients.submit(write, i) for i in range(n - 1)]
            while not all(pauses[: n - 1]):
                time.sleep(0.01)
            for _ in range(3):
                with pool.session() as session:
                    start = time.perf_counter()
                    next(session.generate(prompts[-1], max_tokens=1, temperature=0))
                    waits.append(time.perf_counter() - start)
            done.set()
            for writer in writers:
                writer.result()
    longest = max(float(np.diff(times).max()) for times in pauses[: n - 1])
    print(
        f"a newcomer with {len(prompts[-1])} tokens beside {n - 1} writers: first token after "
        f"{statistics.median(waits):.2f} s (worst {max(waits):.2f}); longest pause of a writer "
        f"{longest:.3f} s",
        flush=True,
    )


def ask(session: Any, question: list[int]) -> list[int]:
    """Return a session's greedy answer, of up to ANSWER tokens."""
    return list(session.generate(question, max_tokens=ANSWER, temperature=0))


def forks(path: str, document: list[int], questions: list[list[int]], threads: int) -> None:
    """Compare questions about one document: asked by forks, and by sessions that each read it.
    Exits if the answers differ.
    """
    n = len(questions)
    n_ctx = len(document) + max(map(len, questions)) + ANSWER + 1
    options: dict[str, Any] = {"n_ctx": n_ctx, "n_ubatch": PIECE, "kv_type": "f16"}
    answers: list[list[list[int]]] = []
    for forked in (True, False):
        with Pool(path, n_sequences=n, kv_budget=n * n_ctx, n_threads=threads, **options) as pool:
            start = time.perf_counter()
            first = pool.session()
            first.decode(document)
            of_one = pool.stats().kv_bytes_now
            sessions = [first.fork() if forked else pool.session() for _ in range(n - 1)]
            before = pool.stats().kv_bytes_now
            for session in sessions if not forked else ():
                session.decode(document)
            pairs = zip([*sessions, first], questions, strict=True)
            answers.append([ask(session, question) for session, question in pairs])
            seconds = time.perf_counter() - start
            now = pool.stats().kv_bytes_now
        what = "by forks" if forked else f"reading it {n} times"
        print(
            f"{n} questions about {len(document)} tokens ({of_one:,} bytes) {what}: {seconds:.2f} s"
            f", {now:,} bytes in the end"
            + (f", {before - of_one:,} more for the forks before they read" if forked else ""),
            flush=True,
        )
    if answers[0] != answers[1]:
        raise SystemExit("the answers of forks are others")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default=str(shipped.smollm2().path))
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--write", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument(
        "--kv-budget", type=float, default=1.0, help="of the bytes of stock's cache"
    )
    parser.add_argument("--document", type=int, default=4000, help="that all forks ask about")
    parser.add_argument("--forks", type=int, default=8, help="questions about it; 0: none")
    options = parser.parse_args()
    model = Model(options.model, n_gpu_layers=0, verbose=False)
    prose = "\n".join(read_texts("heldout_prose_*.txt").values())
    text = model.tokenize(prose, add_bos=False, special=False)[: options.prompt * 2]
    if options.forks > 0:
        book = model.tokenize(prose, add_bos=False, special=False)
        ends = range(options.document, options.document + options.forks * QUESTION, QUESTION)
        questions = [book[end : end + QUESTION] for end in ends]
        forks(options.model, book[: options.document], questions, options.threads)
    counts = [int(n) for n in options.clients.split(",") if n]
    for n in counts:
        prompts = [text[i * 7 : i * 7 + options.prompt] for i in range(n)]
        of_stock = cache_bytes(model, n * (options.prompt + options.write + 1))
        # A tenth more, because a pool holds whole pages, so that it holds as much as stock's cache.
        budget = f"{int(options.kv_budget * of_stock * 1.1)}B"
        arguments = (prompts, options.write)
        # Stock and pool alternate, so that they have the same load of the machine.
        for _ in range(2):
            report("stock", n, in_stock(model, *arguments, options.threads))
            report("pool", n, in_a_pool(options.model, *arguments, budget, options.threads))
    if counts and n > 1:
        newcomer(options.model, prompts, budget, options.threads)


if __name__ == "__main__":
    main()
