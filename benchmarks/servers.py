"""Compare `entropykv serve -np N` with llama-server: streams of several clients at the same time.

python benchmarks/servers.py --llama-server PATH [-m model.gguf] [--clients 1,4,8,16]
python benchmarks/servers.py --llama-server PATH --crowd 16 --fits 4 --prompt 4000

PATH is a llama-server of the release that llama-cpp-python contains: its source archive on PyPI has
vendor/llama.cpp, in which CMake builds the target llama-server. Both servers get the same clients,
prompts, threads and bytes of KV cache (f16), in alternation; with --kv-budget, ours gets a part.
Prompts differ from their first token on, so that no prefix can be reused.

With --crowd N, N conversations of two turns start at once, with as many bytes as llama-server needs
for --fits of them; its slots share the bytes (--kv-unified), because each alone would have too few.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import httpx

from entropykv.llamacpp.context import CELL_PADDING
from entropykv.llamacpp.model import Model
from entropykv.model import shipped
from inputs import read_texts
from parallel import Streams, cache_bytes, report

SECONDS = 900
"""The timeout of one request, in seconds."""


@dataclass
class Answers(Streams):
    """Record when clients received tokens, and the errors of streams that failed."""

    failures: list[str] = field(default_factory=list)


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[str]:
    """Do what running_process() does, but yield only the address of the server."""
    with running_process(command) as (url, _):
        yield url


@contextlib.contextmanager
def running_process(command: list[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server on a free port; yield its address and its process once it is ready. Exits if it
    ends before that.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--port", str(port)], **quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                    break
            time.sleep(0.2)
        yield url, process
    finally:
        process.terminate()
        process.wait()


def ask(
    url: str,
    prompt: list[int],
    options: dict[str, Any],
    times: list[float],
    enough: Event | None = None,
    written: list[str] | None = None,
) -> str:
    """Stream one answer, and record when each token arrived; return the error, or "".

    Once `enough` is set, the client disconnects. The text of each token is appended to `written`.
    """
    body = {"prompt": prompt, "stream": True, "temperature": 0, "cache_prompt": False, **options}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as answer:
            if answer.status_code != httpx.codes.OK:
                return f"{answer.status_code}: {answer.read()[:200]!r}"
            for line in answer.iter_lines():
                if enough is not None and enough.is_set():
                    break
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if chunk.get("error"):
                        return str(chunk["error"])
                    times.append(time.perf_counter())
                    if written is not None and chunk["choices"]:
                        written.append(chunk["choices"][0]["text"])
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return "" if times else "no token"


def stream_all(url: str, prompts: list[list[int]], options: dict[str, Any]) -> Answers:
    """Let all clients send their requests at once; return the times at which tokens arrived."""
    answers = Answers([0.0] * len(prompts), [[] for _ in prompts])

    def client(i: int) -> str:
        answers.starts[i] = time.perf_counter()
        return ask(url, prompts[i], options, answers.times[i])

    with ThreadPoolExecutor(len(prompts)) as clients:
        found = list(clients.map(client, range(len(prompts))))
    answers.failures = [why for why in found if why]
    return answers


def newcomer(name: str, url: str, prompts: list[list[int]], options: dict[str, Any]) -> None:
    """Print after how many seconds a client gets its first token, measured up to three times, while
    all other clients write.
    """
    writers, waits, enough = len(prompts) - 1, [], Event()
    answers = Answers([0.0] * writers, [[] for _ in range(writers)])
    with ThreadPoolExecutor(writers) as clients:
        asked = [
            clients.submit(ask, url, prompts[i][:50], options, answers.times[i], enough)
            for i in range(writers)
        ]
        while not all(answers.times):
            time.sleep(0.01)
        while sum(not each.done() for each in asked) == writers and len(waits) < 3:
            times: list[float] = []
            # These tokens begin unlike any text that was read before.
            fresh = prompts[-1][1 + len(waits) :]
            start = time.perf_counter()
            ask(url, fresh, {**options, "max_tokens": 1}, times)
            waits.append(times[0] - start)
        enough.set()
        for each in asked:
            each.result()
    print(
        f"{name:<14} a newcomer beside {writers} writers: first token after "
        f"{statistics.median(waits):.2f} s (worst {max(waits):.2f} of {len(waits)}); longest pause "
        f"of a writer {answers.longest_pause():.3f} s",
        flush=True,
    )


def commands(
    options: argparse.Namespace, n: int, longest: int, n_bytes: int, fits: int | None = None
) -> dict[str, list[str]]:
    """Return the commands of the servers of --only for n conversations of at most `longest` tokens,
    in n_bytes bytes.

    `fits`: the number of conversations for which llama-server has room; None: all of them.
    """
    usual = ["-m", options.model, "-np", str(n), "-t", str(options.threads)]
    stock = [options.llama_server, *usual, "-c", str((fits or n) * longest), "-fa", "on"]
    stock += ["--no-webui", *(["--kv-unified"] if fits else [])]
    ours = [sys.executable, "-m", "entropykv.cli", "serve", *usual, "-c", str(longest)]
    ours += ["--kv-budget", f"{int(options.kv_budget * n_bytes)}B", "--kv-type", "f16"]
    ours += ["--policy", options.policy]
    both = {"llama-server": stock, "entropykv": ours}
    return {name: both[name] for name in options.only.split(",")}


def crowd(options: argparse.Namespace, model: Model, text: list[int]) -> None:
    """Let more conversations of two turns begin than llama-server has room for; print figures."""
    n, half = options.crowd, options.write // 2
    turn = 24
    longest = -(-(options.prompt + turn + 2 * half + 1) // CELL_PADDING) * CELL_PADDING
    n_bytes = cache_bytes(model, options.fits * longest)
    asked = {"max_tokens": half, "cache_prompt": True, "logit_bias": {"0": -100, "2": -100}}
    for name, command in commands(options, n, longest, n_bytes, options.fits).items():
        with running(command) as url:
            start = time.perf_counter()

            def converse(i: int, url: str = url) -> list[str]:
                begin = text[i * 997 :][: options.prompt]
                written: list[str] = []
                first = ask(url, begin, asked, [], written=written)
                answer = model.tokenize("".join(written), add_bos=False, special=False)
                more = text[i * 997 + options.prompt :][:turn]
                return [first, ask(url, [*begin, *answer, *more], asked, [])]

            with ThreadPoolExecutor(n) as clients:
                found = list(clients.map(converse, range(n)))
            seconds = time.perf_counter() - start
        whole = sum(not any(turns) for turns in found)
        print(
            f"{name:<14} {n} conversations of {options.prompt} tokens in the {n_bytes:,} bytes of "
            f"{options.fits}: {whole} had both of their answers, {seconds:.1f} s",
            flush=True,
        )
        for why, count in Counter(why for turns in found for why in turns if why).most_common(3):
            print(f"{name:<14} {count} times: {why[:160]}", flush=True)


def main() -> None:
    """Print a line for each server and number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("-m", "--model", default=str(shipped.smollm2().path))
    parser.add_argument("--clients", default="1,2,4,8,16")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--write", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-budget", type=float, default=1.0, help="of llama-server's bytes")
    parser.add_argument("--policy", default="auto", help="of ours")
    parser.add_argument("--only", default="llama-server,entropykv", help="servers to run")
    parser.add_argument("--crowd", type=int, help="conversations that come at once")
    parser.add_argument("--fits", type=int, default=4, help="of them, those that stock holds")
    options = parser.parse_args()
    options.llama_server = str(options.llama_server)
    model = Model(options.model, n_gpu_layers=0, verbose=False)
    prose = "\n".join(read_texts("heldout_*.txt").values())
    text = model.tokenize(prose, add_bos=False, special=False) * 20
    longest = -(-(options.prompt + options.write + 1) // CELL_PADDING) * CELL_PADDING
    if options.crowd:
        crowd(options, model, text)
        return
    asked: dict[str, Any] = {"max_tokens": options.write, "logit_bias": {"0": -100, "2": -100}}
    for n in map(int, options.clients.split(",")):
        prompts = [text[i * 997 :][: options.prompt] for i in range(n)]
        servers = commands(options, n, longest, cache_bytes(model, n * longest))
        for _ in range(options.rounds):
            for name, command in servers.items():
                with running(command) as url:
                    # The first request is slow, and not counted.
                    ask(url, prompts[0][:20], {**asked, "max_tokens": 2}, [])
                    answers = stream_all(url, prompts, asked)
                    for why in answers.failures:
                        print(f"{name:<14} failed: {why}")
                    if not answers.failures:
                        report(name, n, answers)
                    if n > 1:
                        newcomer(name, url, prompts, {**asked, "max_tokens": 8 * options.write})


if __name__ == "__main__":
    main()
