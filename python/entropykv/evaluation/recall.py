"""Measure recall of planted facts: the passage is read once, then every fact is asked for.

All questions about a passage start from the same state, so that none sees another one's answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from entropykv.errors import ContextError
from entropykv.evaluation.part import Item, Values, kept_values
from entropykv.evaluation.passkeys import Case, make_cases
from entropykv.evaluation.reading import Reader, Tick, read, write
from entropykv.evaluation.texts import EvaluationText, digest_of
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.stock import StockSession
from entropykv.session.session import Session

_MORE_TOKENS = 3
"""How many tokens an answer may have besides the value's, which may be cut into other tokens."""


@dataclass(frozen=True)
class RecallItem(Item):
    """Hold a passage with facts, and the tokens that ask for each of them."""

    case: Case
    questions: tuple[tuple[int, ...], ...]
    answer_tokens: tuple[int, ...]
    """How many tokens are written to see whether each answer is right."""


class RecallPart:
    """Measure the facts of all passages."""

    name = "passkeys"
    needs_reference = False

    def __init__(self, items: Sequence[RecallItem]) -> None:
        """Take items as recall_items() makes them."""
        self.items = items
        self.n_ctx = max(_longest(item) for item in items)

    def reference(self, stock: StockSession, item: RecallItem, tick: Tick) -> Values:
        """Measure what the full cache knows."""
        stock.reset()
        read(stock, item.tokens, tick)
        return ask(stock, item, tick)

    def measure(self, session: Session, item: RecallItem, tick: Tick) -> Values:
        """Measure what is known inside the budget, which does not grow for the questions."""
        read(session, item.tokens, tick)
        kept = kept_values(session)
        return {**ask(session, item, tick), **kept}


def ask(reader: Reader, item: RecallItem, tick: Tick) -> Values:
    """Ask a reader that has read the passage for every fact; each time from the same state."""
    state = reader.save_state()
    answers = []
    for question, n_tokens in zip(item.questions, item.answer_tokens, strict=True):
        reader.load_state(state)
        last, _ = read(reader, question, tick)
        written = write(reader, last, n_tokens, tick, stops=True)
        answers.append(reader.detokenize(written.tokens))
    right = [
        fact.is_answered_by(answer) for fact, answer in zip(item.case.facts, answers, strict=True)
    ]
    return {"right": right, "answers": answers}


def recall_items(
    texts: Sequence[EvaluationText],
    model: Model,
    *,
    n_cases: int,
    n_tokens: int,
    facts_per_text: int,
    seed: int,
) -> list[RecallItem]:
    """Make passages of the texts; raises as make_cases(), and where the context is too small."""

    def tokens_of(text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        return tuple(model.tokenize(text, add_bos=add_bos, special=True))

    cases = make_cases(
        [text.content for text in texts],
        lambda text: len(tokens_of(text)),
        n_cases=n_cases,
        n_tokens=n_tokens,
        facts_per_text=facts_per_text,
        seed=seed,
    )
    items = []
    for number, case in enumerate(cases):
        tokens = tokens_of(case.text, add_bos=model.adds_bos)
        questions = tuple(tokens_of(fact.prompt) for fact in case.facts)
        answers = tuple(len(tokens_of(f" {fact.value}")) + _MORE_TOKENS for fact in case.facts)
        items.append(
            RecallItem(
                f"passage {number}",
                digest_of(json.dumps(asdict(case))),
                tokens,
                len(tokens) + sum(map(len, questions)) + sum(answers),
                case,
                questions,
                answers,
            )
        )
    longest, trained = max(map(_longest, items)), model.geometry.n_ctx_train
    if longest > trained:
        raise ContextError(
            f"passages with a question have up to {longest} tokens, more than the {trained} that "
            "the model was trained for; lower --passkey-tokens"
        )
    return items


def _longest(item: RecallItem) -> int:
    return len(item.tokens) + max(map(len, item.questions)) + max(item.answer_tokens)
