"""Measure recall of planted facts: a passage is read once, then every fact is asked for.

All questions about a passage start from the same state, so that no question sees the answer to
another one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from entropykv.errors import ContextError
from entropykv.evaluation.passkeys import Case, make_cases
from entropykv.evaluation.reading import (
    AnswersPart,
    AnySession,
    Item,
    Tick,
    Values,
    read,
    write,
)
from entropykv.evaluation.texts import EvaluationText, digest_of
from entropykv.llamacpp.distributions import Logits
from entropykv.llamacpp.model import Model

_MORE_TOKENS = 3
"""How many more tokens an answer may have than the value, which may be split into tokens
differently.
"""


@dataclass(frozen=True)
class RecallItem(Item):
    """Hold a passage with facts, and for each fact the tokens that ask for it."""

    case: Case
    questions: tuple[tuple[int, ...], ...]
    answer_tokens: tuple[int, ...]
    """For each fact, how many tokens are written before the answer is judged."""


class RecallPart(AnswersPart):
    """Measure how many facts are recalled, over all passages; the budget does not grow for the
    questions.
    """

    name = "passkeys"

    def __init__(self, items: Sequence[RecallItem]) -> None:
        """Use items that recall_items() made."""
        self.items = items
        self.n_ctx = max(_longest(item) for item in items)

    def answer(self, session: AnySession, last: Logits, item: RecallItem, tick: Tick) -> Values:  # noqa: ARG002
        """Ask for every fact, each time from the state after the passage."""
        state: Any = session.files.save_state()
        answers = []
        for question, n_tokens in zip(item.questions, item.answer_tokens, strict=True):
            session.files.load_state(state)
            first, _ = read(session, question, tick)
            written = write(session, first, n_tokens, tick, stops=True)
            answers.append(session.detokenize(written.tokens))
        right = [
            fact.is_answered_by(answer)
            for fact, answer in zip(item.case.facts, answers, strict=True)
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
    """Make passages of the texts; raises the errors of make_cases(), and ContextError if the
    context is too small.
    """

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
