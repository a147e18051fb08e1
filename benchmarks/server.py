"""Measure a server's growth of memory, its latency, and how fast it stops, over many requests.

python benchmarks/server.py [-n 1000] [-m model.gguf]
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import openai

from entropykv.model import shipped
from inputs import memory_mib

N_CTX = 16384
WARM_UP = 100


def start(model: str, threads: int) -> tuple[subprocess.Popen[str], str]:
    """Start the server on a free port; returns the process and its address."""
    options = ["-m", model, "--port", "0", "--n_ctx", N_CTX, "--kv-budget", "256"]
    options += ["--n_threads", threads, "--n_threads_batch", threads]
    process = subprocess.Popen(
        [sys.executable, "-m", "entropykv.cli", "serve", *map(str, options)],
        stderr=subprocess.PIPE,
        text=True,
    )
    log = process.stderr or sys.stdin
    first = log.readline()
    # A thread reads the log, because a full pipe would block the server.
    threading.Thread(target=log.read, daemon=True).start()
    return process, re.findall(r"http://\S+/v1", first)[0]


def one_request(client: openai.OpenAI, index: int) -> float:
    """Return the seconds of one answer of 16 tokens.

    The index decides whether the request is whole, streamed, of a chat, or refused.
    """
    begin = time.perf_counter()
    options: dict[str, Any] = {"model": "any", "max_tokens": 16}
    prompt = f"The old garden, number {index}. " * (1 + index % 20)
    if index % 4 == 0:
        client.completions.create(prompt=prompt, **options)
    elif index % 4 == 1:
        list(client.completions.create(prompt=prompt, stream=True, **options))
    elif index % 4 == 2:
        client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options)
    else:
        options["extra_body"] = {"grammar": "root ::= ("}
        with contextlib.suppress(openai.BadRequestError):
            client.completions.create(prompt=prompt, **options)
    return time.perf_counter() - begin


def tokens_after_leaving(client: openai.OpenAI) -> tuple[int, float]:
    """Return the tokens and seconds that a generation takes after its client has disconnected."""
    stream = client.completions.create(
        model="any",
        prompt="The old garden",
        max_tokens=N_CTX - 100,
        extra_body={"min_tokens": N_CTX},
        stream=True,
    )
    before = figures(client)["generated_tokens"]
    chunks = iter(stream)
    for _ in range(200):
        next(chunks)
    stream.close()
    begin = time.perf_counter()
    while figures(client)["requests"]["waiting"]:
        pass
    seconds = time.perf_counter() - begin
    return figures(client)["generated_tokens"] - before - 200, seconds


def figures(client: openai.OpenAI) -> Any:
    return client.get("/kv", cast_to=object)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=1000, help="requests (default: %(default)s)")
    parser.add_argument("-m", default=str(shipped.DEMOS["bitnet"].path), help="GGUF model")
    parser.add_argument("-t", type=int, default=1, help="threads (default: %(default)s)")
    options = parser.parse_args()
    process, url = start(options.m, options.t)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for index in range(WARM_UP):
            one_request(client, index)
        before = memory_mib(process=process.pid)
        seconds = [one_request(client, index) for index in range(options.n)]
        after = memory_mib(process=process.pid)
        left = [tokens_after_leaving(client) for _ in range(5)]
    process.terminate()
    print(f"{options.n} requests after {WARM_UP} to warm up: exit code {process.wait()}")
    print(f"memory: {before:.1f} MiB before, {after:.1f} MiB after: {after - before:+.1f} MiB")
    tenth = options.n // 10
    for name, part in (("first", seconds[:tenth]), ("last", seconds[-tenth:]), ("all", seconds)):
        ordered = sorted(part)
        print(
            f"latency, {name}: median {1e3 * statistics.median(ordered):.1f} ms, "
            f"99th percentile {1e3 * ordered[int(0.99 * len(ordered))]:.1f} ms"
        )
    print(
        f"a client leaves: at most {max(tokens for tokens, _ in left)} more tokens, "
        f"{1e3 * max(time for _, time in left):.0f} ms"
    )


if __name__ == "__main__":
    main()
