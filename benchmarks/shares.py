"""Measure what conversations of unequal need lose in one pool, compared with equal parts of its
bytes.

python benchmarks/shares.py [-m model.gguf] [--policy adaptive] [--case short,dull]

Case `short`: one long text and seven short ones, which need less than an equal part. Case `dull`:
two texts of the same length, of which one is repetitive; both need more than an equal part, but the
entries of the other one are worth more. Every text is read, then its continuation, whose logits are
compared with those of a full cache. Equal parts are measured in a pool of one conversation with the
bytes of its part; its numbers do not depend on other conversations. Prints for each: the mean KL
divergence over the continuation, how often the most probable token is the same, and the mean
entries of a KV head at the end.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropykv import Pool
from entropykv.llamacpp.distributions import mean_divergence
from entropykv.llamacpp.model import Model
from entropykv.model import shipped
from inputs import read_texts

CONTINUATION = 96
SENTENCE = "The train to the coast leaves at nine, and nobody is on it. "
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Conversation:
    """Hold a text and its continuation."""

    name: str
    tokens: list[int]
    follows: list[int]


def cut(name: str, text: list[int], first: int, n_tokens: int) -> Conversation:
    """Return a part of a text, and its continuation."""
    end = first + n_tokens
    return Conversation(name, text[first:end], text[end : end + CONTINUATION])


def cases(model: Model, length: int) -> dict[str, list[Conversation]]:
    """Return the conversations of each case, by the name of the case."""
    prose = "\n".join(read_texts("heldout_prose_*.txt").values())
    text = model.tokenize(prose, add_bos=False, special=False)
    again = model.tokenize(SENTENCE * length, add_bos=False, special=False)
    long = cut("long", text, 0, length)
    short = [cut(f"short {i}", text, length + 400 * i, 160) for i in range(1, 8)]
    half = length // 2
    return {
        "short": [long, *short],
        "dull": [cut("prose", text, 0, half), cut("the same again", again, 0, half)],
    }


def rows_of(pool: Pool, conversations: list[Conversation]) -> tuple[list[Rows], list[float]]:
    """Read all conversations together; return the logits of their continuations, and their mean
    entries per KV head.
    """
    sessions = [pool.session() for _ in conversations]
    n_heads = pool.runner.factory.facts.n_kv_heads
    with ThreadPoolExecutor(len(sessions)) as threads:
        pairs = list(zip(sessions, conversations, strict=True))
        list(threads.map(lambda pair: pair[0].decode(pair[1].tokens), pairs))
        rows = list(threads.map(lambda p: p[0].decode(p[1].follows, all_logits=True), pairs))
    held = [session.stats().entries_kept / n_heads for session in sessions]
    stats = pool.stats()
    if stats.kv_bytes_peak > stats.kv_bytes_budget:
        raise SystemExit(f"{stats.kv_bytes_peak} bytes are more than the budget")
    return rows, held


def divergence(reference: Rows, found: Rows) -> tuple[float, float]:
    """Return the mean KL divergence in nats, and how often the most probable token is the same."""
    same = (reference.argmax(axis=1) == found.argmax(axis=1)).mean()
    return mean_divergence(reference, found), float(same)


def run(options: argparse.Namespace, name: str, conversations: list[Conversation]) -> None:
    """Print a line for each conversation and way of sharing, and the mean of all conversations."""
    longest = max(len(each.tokens) + len(each.follows) for each in conversations)
    n, n_ctx = len(conversations), longest + 64

    def pool_of(n_sequences: int, budget: int | str, policy: str) -> Pool:
        return Pool(
            options.model,
            n_sequences=n_sequences,
            n_ctx=n_ctx,
            kv_budget=budget,
            kv_type="f16",
            policy=policy,
            n_threads=options.threads,
        )

    with pool_of(n, n * n_ctx, "uniform") as pool:
        reference, _ = rows_of(pool, conversations)
    budget = int(options.budget * n_ctx)
    with pool_of(n, budget, options.policy) as pool:
        n_bytes = pool.stats().kv_bytes_budget
        shared = rows_of(pool, conversations)
    equal: tuple[list[Rows], list[float]] = ([], [])
    for each in conversations:
        with pool_of(1, f"{n_bytes // n}B", options.policy) as pool:
            rows, held = rows_of(pool, [each])
            equal[0].extend(rows)
            equal[1].extend(held)
    for way, (rows, held) in {"equal": equal, "by need": shared}.items():
        found = [divergence(*pair) for pair in zip(reference, rows, strict=True)]
        for each, (kl, same), entries in zip(conversations, found, held, strict=True):
            print(
                f"{name:<6} {way:<8} {each.name:<15} {len(each.tokens):>5} tokens  "
                f"KL {kl:.4f}  same {same:.3f}  {entries:7.1f} entries"
            )
        mean = np.mean([kl for kl, _ in found])
        print(f"{name:<6} {way:<8} mean KL {mean:.4f} in {n_bytes:,} bytes", flush=True)


def main() -> None:
    """Run the cases that --case names, and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default=str(shipped.smollm2().path))
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--case", default="short,dull")
    parser.add_argument("--length", type=int, default=3000, help="of the long text")
    parser.add_argument("--budget", type=float, default=0.5, help="of one long text, for all")
    parser.add_argument("-t", "--threads", type=int, default=2)
    options = parser.parse_args()
    with_names = cases(Model(options.model, n_gpu_layers=0, verbose=False), options.length)
    for name in options.case.split(","):
        run(options, name, with_names[name])


if __name__ == "__main__":
    main()
