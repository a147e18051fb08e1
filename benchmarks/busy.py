"""Measure speed on a machine that runs other work, against stock llama.cpp under the same load.

Busy loops run next to two threads on two cores; every round measures stock and each budget in turn,
with and without the loops:

python benchmarks/busy.py
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

from entropykv import Session
from entropykv.evaluation.reading import read, write
from entropykv.llamacpp.stock import StockSession
from inputs import find_model, read_texts

KINDS = ("stock", "f16 1", "f16 0.2", "q8_0 0.2")


@contextlib.contextmanager
def busy_loops(n: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def speeds(model: str, kind: str, options: argparse.Namespace, text: str) -> tuple[float, float]:
    """Return the tokens per second of a prompt, and of the text that is written after it."""
    sizes = {"n_ctx": options.tokens + options.written, "n_threads": options.threads}
    if kind == "stock":
        reader: Session | StockSession = StockSession(model, **sizes)
    else:
        kv_type, budget = kind.split()
        reader = Session(model, kv_budget=float(budget), kv_type=kv_type, **sizes)
    tokens = reader.tokenize(text)[: options.tokens]
    logits, seconds = read(reader, tokens, lambda _: None)
    written = write(reader, logits, options.written, lambda _: None)
    reader.close()
    return len(tokens) / seconds, written.n_decoded / written.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-m", "--model", help="GGUF file (default: SmolLM2)")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--written", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--loops", type=int, default=2, help="busy loops beside it")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = find_model(options.model)
    text = "\n\n".join(read_texts("heldout_prose_*.txt").values())
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for loops in (0, options.loops):
            for kind in KINDS:
                with busy_loops(loops):
                    found[loops, kind].append(speeds(model, kind, options, text))
    print("| busy loops | cache | prompt tok/s | ratio | decode tok/s | ratio |")
    print("|---|---|---|---|---|---|")
    for (loops, kind), rounds in found.items():
        cells = []
        for part in (0, 1):
            ratios = [a[part] / b[part] for a, b in zip(rounds, found[loops, "stock"], strict=True)]
            speed = statistics.median(each[part] for each in rounds)
            cells += [f"{speed:.0f}", f"{statistics.median(ratios):.2f}"]
        print(f"| {loops} | {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
