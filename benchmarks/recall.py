"""Measure recall of the shipped BitNet model: questions about facts far back, by policy and budget.

A document of facts and filler is read inside the budget. The questions are asked only afterwards,
so that nothing tells a policy which facts will be needed. An answer is right if it is the whole
sentence. The facts never occurred in training. All answers are greedy:

python benchmarks/recall.py --json build/recall.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from entropykv import Session
from entropykv.model.shipped import DEMOS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training.facts import STOP, STOP_LINE, Writer

ANSWER_TOKENS = 12


@dataclass(frozen=True)
class Case:
    """Hold a document, and questions about it with their answers."""

    document: str
    questions: list[tuple[str, str]]


def cases(n_tokens: int, n_documents: int, n_questions: int) -> Iterator[Case]:
    writer = Writer(f"recall {n_tokens}")
    for _ in range(n_documents):
        words, facts = writer.test_document(n_tokens, n_questions)
        yield Case(
            "".join([*words[1:-1], STOP_LINE]),  # The session adds BOS itself.
            [("".join(fact.question()), "".join([*fact.statement(), STOP])) for fact in facts],
        )


def recall(session: Session, case: Case) -> list[bool]:
    """Return whether each question is answered right; all start from the document's state."""
    session.reset()
    session.decode(session.tokenize(case.document, add_bos=True))
    state = session.files.save_state()
    right = []
    for question, answer in case.questions:
        session.files.load_state(state)
        tokens = session.tokenize(question, add_bos=False)
        text = session.detokenize(
            list(session.generate(tokens, max_tokens=ANSWER_TOKENS, temperature=0.0))
        )
        right.append(text.strip() == answer.strip())
    return right


def measure(arguments: argparse.Namespace, n_tokens: int) -> list[dict[str, object]]:
    documents = list(cases(n_tokens, arguments.documents, arguments.questions))
    demo = DEMOS["bitnet"]
    rows: list[dict[str, object]] = []
    for policy in arguments.policies.split(","):
        for budget in map(float, arguments.budgets.split(",")):
            with Session(
                arguments.model or str(demo.path),
                n_ctx=n_tokens + 32,
                kv_budget=budget,
                policy=policy,
                kv_type=arguments.kv_type,
                n_threads=arguments.threads,
            ) as session:
                right = [r for case in documents for r in recall(session, case)]
                kept = session.stats().kv_bytes_budget
            share = sum(right) / len(right)
            rows.append(
                {"policy": policy, "tokens": n_tokens, "budget": budget, "recall": share}
                | {"questions": len(right), "kv_bytes": kept}
            )
            print(
                f"| {n_tokens} | {policy} | {budget:g} | {share:.3f} | {kept / 1024:.0f} KiB |",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-m", "--model", help="GGUF file (default: the shipped one)")
    parser.add_argument("--tokens", default="512,1536", help="lengths of the documents")
    parser.add_argument("--policies", default="uniform,entropy,recency,streaming")
    parser.add_argument("--budgets", default="1.0,0.5,0.2,0.1", help="fractions of the document")
    parser.add_argument("--kv-type", default="q8_0")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--questions", type=int, default=8, help="for each document")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    print("| tokens | policy | budget | recall | KV cache |\n|---|---|---|---|---|")
    rows = [row for n in arguments.tokens.split(",") for row in measure(arguments, int(n))]
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
