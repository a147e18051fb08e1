"""Streams of several clients at a time: `entropykv serve -np N` against llama-server, in one run.

    python benchmarks/servers.py --llama-server PATH [-m model.gguf] [--clients 1,4,8,16]

PATH is a llama-server of the release that llama-cpp-python carries: its source archive on PyPI has
vendor/llama.cpp, of which CMake builds the target llama-server. Both servers get the same clients,
prompts, threads and bytes of KV cache (f16), in alternation; with --kv-budget, ours gets a part.
Prompts differ from their first token on, so that nobody can share what another one has read.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from entropykv.llamacpp.context import CELL_PADDING
from entropykv.llamacpp.model import Model
from entropykv.model import shipped
from inputs import read_texts
from parallel import Streams, cache_bytes, report

SECONDS = 900
"""What one request may take."""


@dataclass
class Answers(Streams):
    """What clients saw, and whose streams broke off."""

    failures: list[str] = field(default_factory=list)


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[str]:
    """Run a server on a free port; yields its address once it is ready."""
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
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(url: str, prompt: list[int], options: dict[str, Any], times: list[float]) -> str:
    """Stream one answer, and note when each token came; returns what went wrong, if anything."""
    body = {"prompt": prompt, "stream": True, "temperature": 0, "cache_prompt": False, **options}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as answer:
            if answer.status_code != httpx.codes.OK:
                return f"{answer.status_code}: {answer.read()[:200]!r}"
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if chunk.get("error"):
                        return str(chunk["error"])
                    times.append(time.perf_counter())
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return "" if times else "no token"


def stream_all(url: str, prompts: list[list[int]], options: dict[str, Any]) -> Answers:
    """All clients come at once."""
    answers = Answers([0.0] * len(prompts), [[] for _ in prompts])

    def client(i: int) -> str:
        answers.starts[i] = time.perf_counter()
        return ask(url, prompts[i], options, answers.times[i])

    with ThreadPoolExecutor(len(prompts)) as clients:
        found = list(clients.map(client, range(len(prompts))))
    answers.failures = [why for why in found if why]
    return answers


def newcomer(name: str, url: str, prompts: list[list[int]], options: dict[str, Any]) -> None:
    """One more comes with a prompt while the others write."""
    writers, waits = len(prompts) - 1, []
    answers = Answers([0.0] * writers, [[] for _ in range(writers)])
    with ThreadPoolExecutor(writers) as clients:
        asked = [
            clients.submit(ask, url, prompts[i][:50], options, answers.times[i])
            for i in range(writers)
        ]
        while not all(answers.times):
            time.sleep(0.01)
        while sum(not each.done() for each in asked) == writers and len(waits) < 3:
            times: list[float] = []
            fresh = prompts[-1][1 + len(waits) :]  # begins as nothing that was read before
            start = time.perf_counter()
            ask(url, fresh, {**options, "max_tokens": 1}, times)
            waits.append(times[0] - start)
        for each in asked:
            each.result()
    print(
        f"{name:<14} a newcomer beside {writers} writers: first token after "
        f"{statistics.median(waits):.2f} s (worst {max(waits):.2f} of {len(waits)}); longest pause "
        f"of a writer {answers.longest_pause():.3f} s",
        flush=True,
    )


def commands(
    options: argparse.Namespace, n: int, longest: int, n_bytes: int
) -> dict[str, list[str]]:
    """Both servers for n conversations of at most `longest` tokens, in so many bytes."""
    usual = ["-m", options.model, "-np", str(n), "-t", str(options.threads)]
    stock = [options.llama_server, *usual, "-c", str(n * longest), "-fa", "on", "--no-webui"]
    ours = [sys.executable, "-m", "entropykv.cli", "serve", *usual, "-c", str(longest)]
    budget = ["--kv-budget", f"{int(options.kv_budget * n_bytes)}B", "--kv-type", "f16"]
    return {"llama-server": stock, "entropykv": ours + budget}


def main() -> None:
    """Print a line for each server and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("-m", "--model", default=str(shipped.smollm2().path))
    parser.add_argument("--clients", default="1,2,4,8,16")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--write", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-budget", type=float, default=1.0, help="of llama-server's bytes")
    options = parser.parse_args()
    options.llama_server = str(options.llama_server)
    model = Model(options.model, n_gpu_layers=0, verbose=False)
    prose = "\n".join(read_texts("heldout_*.txt").values())
    text = model.tokenize(prose, add_bos=False, special=False) * 20
    longest = -(-(options.prompt + options.write + 1) // CELL_PADDING) * CELL_PADDING
    asked: dict[str, Any] = {"max_tokens": options.write, "logit_bias": {"0": -100, "2": -100}}
    for n in map(int, options.clients.split(",")):
        prompts = [text[i * 997 :][: options.prompt] for i in range(n)]
        servers = commands(options, n, longest, cache_bytes(model, n * longest))
        for _ in range(options.rounds):
            for name, command in servers.items():
                with running(command) as url:
                    ask(url, prompts[0][:20], {**asked, "max_tokens": 2}, [])  # the first is slow
                    answers = stream_all(url, prompts, asked)
                    for why in answers.failures:
                        print(f"{name:<14} failed: {why}")
                    if not answers.failures:
                        report(name, n, answers)
                    if n > 1:
                        newcomer(name, url, prompts, {**asked, "max_tokens": 8 * options.write})


if __name__ == "__main__":
    main()
