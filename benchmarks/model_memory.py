"""Measure the memory that the models of one server take, and how much remains after unloading.

`python benchmarks/model_memory.py DIR` serves the GGUF files in DIR one at a time: it asks each for
an answer, unloads it, and prints the resident set of the process and the server's estimate, in MiB.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from tests.support.running_server import Server

WORDS = 300
OPTIONS = ("-c", 2048, "-t", 2, "--kv-budget", 0.25, "--models-max", 1)


def states(server: Server) -> dict[str, Any]:
    """Return the status of every model by its name."""
    return {each["id"]: each["status"] for each in server.get("/v1/models").json()["data"]}


def ask(server: Server, model: str) -> None:
    """Let a model read a prompt and write a few tokens; exits if the server answers an error."""
    body = {"model": model, "prompt": "word " * WORDS, "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/completions", json.dumps(body))
    if answer.status_code != 200:
        raise SystemExit(answer.text)


def unload(server: Server, model: str) -> None:
    """Unload a model, and wait until it is unloaded."""
    server.post("/models/unload", json.dumps({"model": model}))
    while states(server)[model]["value"] != "unloaded":
        time.sleep(0.05)


def main() -> None:
    """Load and unload all models of a directory in turn, several times, and print their memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    server = Server("--models-dir", options.directory, *OPTIONS, model=None, usual=())
    try:
        names = list(states(server))
        # The first request allocates memory that stays for the whole process.
        ask(server, names[0])
        unload(server, names[0])
        before = server.rss()
        print(f"the process without a model: {before / 2**20:.1f} MiB")
        print(f"{'model':<24} {'estimate':>9} {'loaded':>9} {'after':>9}   (beyond that)")
        for name in names * options.rounds:
            ask(server, name)
            loaded = server.rss() - before
            estimate = states(server)[name]["memory_bytes"]
            unload(server, name)
            sizes = (estimate, loaded, server.rss() - before)
            print(f"{name:<24} " + " ".join(f"{size / 2**20:>9.1f}" for size in sizes))
    finally:
        server.end()


if __name__ == "__main__":
    main()
