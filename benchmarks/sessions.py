"""Compare loading a saved session with reading its prompt: time and bytes.

python benchmarks/sessions.py

Reads prose into a session, saves it, loads it into a new one (the median of five), and checks that
both write the same text.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from entropykv import Session
from inputs import find_model, read_texts

CACHES = (("f16", 1.0), ("q8_0", 1.0), ("f16", 0.2), ("q8_0", 0.2))
TEXT_TOKENS = 100
ROUNDS = 5


def measure(model: str, n_tokens: int, n_threads: int, kv_type: str, budget: float) -> str:
    """Return a table row: reading, saving and loading with one type and budget of the cache."""
    n_ctx = n_tokens + TEXT_TOKENS

    def session() -> Session:
        return Session(model, n_ctx=n_ctx, kv_budget=budget, kv_type=kv_type, n_threads=n_threads)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "session.ekv"
        with session() as first:
            tokens = first.tokenize("\n".join(read_texts("*.txt").values()))[:n_tokens]
            start = time.perf_counter()
            first.decode(tokens)
            read = time.perf_counter() - start
            start = time.perf_counter()
            contents = first.files.save(file)
            saved = time.perf_counter() - start
            text = list(first.generate([], TEXT_TOKENS))
        with session() as second:
            times = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                second.files.load(file)
                times.append(time.perf_counter() - start)
            same = list(second.generate([], TEXT_TOKENS)) == text
        size = file.stat().st_size / 2**20
    loaded = statistics.median(times)
    return (
        f"| {contents.n_tokens} | {kv_type} {budget:g} | {size:.1f} | {read:.1f} | {saved:.2f} | "
        f"{loaded:.2f} | {read / loaded:.0f} | {'yes' if same else 'NO'} |"
    )


def main() -> None:
    """Print a table row for each type and budget of the cache."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model")
    parser.add_argument("-n", "--tokens", type=int, default=6144)
    parser.add_argument("-t", "--threads", type=int, default=2)
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    print("| tokens | cache | file MiB | prompt s | save s | load s | ratio | same text |")
    print("|---|---|---|---|---|---|---|---|")
    for kv_type, budget in CACHES:
        row = measure(model, arguments.tokens, arguments.threads, kv_type, budget)
        print(row, flush=True)


if __name__ == "__main__":
    main()
