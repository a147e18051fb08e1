"""Measure what drafts are worth: tokens per second with and without them, in turns.

    python benchmarks/drafts.py [-m MODEL] [-md MODEL] [--tokens 200] [--length 2048]

The tasks are those of `entropykv bench --spec` (evaluation/bench.py), with a text that was not used
for tuning. --stock adds llama_cpp.Llama with a full cache, and with its own prompt lookup.
--llama-server PATH adds a llama-server with a full cache, and with its own kinds of n-grams.
--sequences N also lets N sessions of a pool write at the same time.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path

import httpx
import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from entropykv import CacheOptions, Pool, Session
from entropykv.evaluation.bench import bench_drafts, draft_tasks
from entropykv.model import shipped
from servers import running

LLAMA_SERVER_KINDS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
TEXT = Path(__file__).parent / "texts" / "heldout_prose_03.txt"


def stock(options: argparse.Namespace, name: str, prompt: str) -> None:
    """Write one task with llama_cpp.Llama and a full cache, without and with prompt lookup, and
    print the speeds.
    """
    medians = []
    for draft_model in (None, LlamaPromptLookupDecoding(num_pred_tokens=10)):
        llm = llama_cpp.Llama(
            str(options.model),
            n_ctx=options.length + options.tokens + 1024,
            draft_model=draft_model,
            logits_all=draft_model is not None,
            flash_attn=True,
            verbose=False,
        )
        tokens = llm.tokenize(prompt.encode())[-options.length :]
        speeds = []
        for _ in range(options.rounds):
            llm.reset()
            start, n = 0.0, 0
            for _ in llm.generate(tokens, temp=0.0):
                start = start or time.perf_counter()
                n += 1
                if n == options.tokens:
                    break
            speeds.append((n - 1) / (time.perf_counter() - start))
        medians.append(statistics.median(speeds))
        llm.close()
    print(
        f"{name:8} {medians[0]:7.1f} {medians[1]:7.1f} tokens/s of llama_cpp.Llama with a full "
        f"cache, without and with its prompt lookup"
    )


def llama_server(options: argparse.Namespace, tasks: dict[str, list[int]]) -> None:
    """Write all tasks with llama-server and a full cache, without drafts and with each kind, and
    print the speeds.
    """
    for kind in ("none", *LLAMA_SERVER_KINDS):
        command = [
            str(options.llama_server),
            *("-m", str(options.model), "-c", str(options.length + options.tokens + 1024)),
            *("-np", "1", "-fa", "on", "-t", "2", "--spec-type", kind),
        ]
        with running(command) as url:
            for name, tokens in tasks.items():
                speeds = []
                for _ in range(options.rounds):
                    body = {
                        "prompt": tokens,
                        "n_predict": options.tokens,
                        "temperature": 0,
                        "cache_prompt": False,
                    }
                    answer = httpx.post(f"{url}/completion", json=body, timeout=600)
                    speeds.append(answer.json()["timings"]["predicted_per_second"])
                print(
                    f"{name:8} {statistics.median(speeds):7.1f} tokens/s of llama-server with a "
                    f"full cache, {kind}",
                    flush=True,
                )


def together(options: argparse.Namespace, name: str, prompt: str) -> None:
    """Let several sessions of a pool write one task at the same time, with and without drafts, and
    print the speeds.
    """
    n_ctx = options.length + options.tokens + 1
    pools = [
        Pool(
            options.model,
            n_ctx=n_ctx,
            kv_budget=options.kv_budget,
            n_sequences=options.sequences + 1,
            spec_type=spec_type,
        )
        for spec_type in ("none", "ngram")
    ]
    speeds: list[list[float]] = [[], []]
    with pools[0], pools[1]:
        origins = [pool.session() for pool in pools]
        for origin in origins:
            origin.decode(origin.tokenize(prompt)[-options.length :])
        for _ in range(options.rounds):
            for origin, found in zip(origins, speeds, strict=True):
                sessions = [origin.fork() for _ in range(options.sequences)]
                found.append(write_at_once(sessions, options.tokens))
    without, with_drafts = (statistics.median(each) for each in speeds)
    print(
        f"{name:8} {without:7.1f} {with_drafts:7.1f} tokens/s of {options.sequences} sessions "
        f"together, {with_drafts / without:.2f} times",
        flush=True,
    )


def write_at_once(sessions: list[Session], n: int) -> float:
    """Write n tokens in every session at the same time, and close the sessions.

    Returns the tokens per second of all of them together.
    """
    threads = [threading.Thread(target=list, args=(each.generate([], n),)) for each in sessions]
    start, before = time.perf_counter(), sum(session.position for session in sessions)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    n_written = sum(session.position for session in sessions) - before
    for session in sessions:
        session.close()
    return n_written / seconds


def main() -> None:
    """Print speeds with drafts and without; --stock, --llama-server, --sequences add lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, default=None)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--kv-budget", default="0.2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spec-type", default="ngram")
    parser.add_argument("-md", "--model-draft", default=None)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--llama-server", type=Path, default=None)
    parser.add_argument("--sequences", type=int, default=0)
    options = parser.parse_args()
    options.model = options.model or shipped.smollm2().path
    cache = CacheOptions(
        kv_budget=options.kv_budget,
        spec_type="draft" if options.model_draft else options.spec_type,
        spec_draft_model=options.model_draft,
    )
    text = TEXT.read_text(encoding="utf-8")
    for row in bench_drafts(
        options.model,
        cache,
        text,
        length=options.length,
        n_tokens=options.tokens,
        rounds=options.rounds,
    ):
        print(
            f"{row.task:8} {row.speed_without:7.1f} {row.speed_with:7.1f} tokens/s, "
            f"{row.ratio:.2f} times; {row.tokens_per_step:.2f} tokens a step, {row.accepted} of "
            f"{row.drafted}{'' if row.same else '; the texts differ'}",
            flush=True,
        )
    for name, prompt in draft_tasks(text, options.length):
        if options.stock:
            stock(options, name, prompt)
        if options.sequences:
            together(options, name, prompt)
    if options.llama_server:
        with Session(options.model, CacheOptions(n_ctx=512)) as session:
            tasks = {
                name: session.tokenize(prompt)[-options.length :]
                for name, prompt in draft_tasks(text, options.length)
            }
        llama_server(options, tasks)


if __name__ == "__main__":
    main()
