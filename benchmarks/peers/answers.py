"""Ask questions about a text after it was read: facts planted into it, or RULER's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.inputs import read_texts
from benchmarks.peers.protocol import Passage, Question
from entropykv.evaluation.passkeys import Fact, recall_items
from entropykv.evaluation.reading import AnySession, read, write
from entropykv.evaluation.ruler.scores import Suite, ruler_parts, string_match_all
from entropykv.evaluation.texts import Text
from entropykv.llamacpp.model import Model


@dataclass(frozen=True)
class FactsSize:
    """Hold how many passages with facts are read, their length in tokens, and the number of facts
    of each.
    """

    n_passages: int
    n_tokens: int
    n_facts: int


def score(session: AnySession, questions: Sequence[Question]) -> float:
    """Ask questions after the prompt that a session has read, each from the same state; return the
    mean score.
    """
    state = session.files.save_state()
    scores = []
    for question in questions:
        session.files.load_state(state)
        logits, _ = read(session, question.tokens, _ignore)
        written = write(session, logits, question.n_answer, _ignore, stops=True)
        scores.append(question.score(session.detokenize(written.tokens)))
    return sum(scores) / len(scores)


def longest(questions: Sequence[Question]) -> int:
    """Return the number of tokens of the longest question with its answer."""
    return max(len(question.tokens) + question.n_answer for question in questions)


def facts_passages(pattern: str, model: Model, size: FactsSize, seed: int) -> list[Passage]:
    """Return the passages that `entropykv eval --passkeys` makes of the texts that match."""
    items = recall_items(
        _texts(pattern),
        model,
        n_cases=size.n_passages,
        n_tokens=size.n_tokens,
        facts_per_text=size.n_facts,
        seed=seed,
    )
    return [
        Passage(
            f"facts {size.n_tokens} {number}",
            item.tokens,
            questions=tuple(
                Question(tokens, n_answer, partial(_knows, fact))
                for tokens, n_answer, fact in zip(
                    item.questions, item.answer_tokens, item.case.facts, strict=True
                )
            ),
        )
        for number, item in enumerate(items)
    ]


def ruler_passages(pattern: str, model: Model, suite: Suite, seed: int) -> list[Passage]:
    """Return the samples of `entropykv eval --suite ruler`; questions are not known while the
    context is read.
    """
    parts = ruler_parts(
        replace(suite, questions=("unknown",)), model, _texts(pattern), seed=seed, inside=False
    )
    return [
        Passage(
            item.name,
            item.tokens,
            questions=(
                Question(
                    item.question,
                    item.n_generated,
                    partial(string_match_all, references=item.references),
                ),
            ),
            is_chat=model.chat_prompt("") is not None,
        )
        for part in parts
        for item in part.items
    ]


def _texts(pattern: str) -> list[Text]:
    return [
        Text(name, text)
        for each in pattern.split(",")
        for name, text in read_texts(f"{each}.txt").items()
    ]


def _knows(fact: Fact, answer: str) -> float:
    return float(fact.is_answered_by(answer))


def _ignore(_n_tokens: int) -> None:
    """Take the progress of reading, which is not shown."""
