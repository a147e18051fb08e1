"""Answer questions about long contexts, in LongBench's form, and score them by ROUGE."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from entropykv.errors import ContextError, MissingExtraError, SettingsError
from entropykv.evaluation.combination import grow
from entropykv.evaluation.part import Item, Values, kept_values
from entropykv.evaluation.reading import Reader, Tick, read, write
from entropykv.evaluation.texts import digest_of
from entropykv.files import read_text
from entropykv.llamacpp.distributions import Logits
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.stock import StockSession
from entropykv.session.session import Session

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
DEFAULT_TEMPLATE = "{context}\n\n{input}"
Scorer = Callable[[Sequence[str], str], dict[str, float]]
"""Returns the F1 of each of ROUGE_TYPES for (right answers, an answer)."""


@dataclass(frozen=True)
class Question:
    """Hold one line of a data set."""

    name: str
    context: str
    input: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class DatasetItem(Item):
    """Hold a prompt, and the answers that are right."""

    answers: tuple[str, ...]


class DatasetPart:
    """Measure the questions of a data set."""

    name = "dataset"
    needs_reference = False

    def __init__(
        self, items: Sequence[DatasetItem], max_tokens: int, score: Scorer, *, inside: bool
    ) -> None:
        """Take items as dataset_items() makes them, with the same max_tokens.

        `inside`: the budget does not grow for an answer.
        """
        self.items = items
        self.n_ctx = max(len(item.tokens) for item in items) + max_tokens
        self._max_tokens = max_tokens
        self._score = score
        self._inside = inside

    def reference(self, stock: StockSession, item: DatasetItem, tick: Tick) -> Values:
        """Answer with the full cache."""
        stock.reset()
        last, _ = read(stock, item.tokens, tick)
        return self._answer(stock, last, item, tick)

    def measure(self, session: Session, item: DatasetItem, tick: Tick) -> Values:
        """Answer after a prompt that was read inside the budget."""
        last, _ = read(session, item.tokens, tick)
        kept = kept_values(session)
        if not self._inside:
            grow(session, self._max_tokens)
        return {**self._answer(session, last, item, tick), **kept}

    def _answer(self, reader: Reader, last: Logits, item: DatasetItem, tick: Tick) -> Values:
        written = write(reader, last, self._max_tokens, tick, stops=True)
        answer = reader.detokenize(written.tokens).strip()
        return {"answer": answer, **self._score(item.answers, answer)}


def rouge_scorer() -> Scorer:
    """Return ROUGE F1 by the package rouge-score, the best over the right answers of each type."""
    try:
        from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415
    except ImportError:
        raise MissingExtraError(
            "answers are scored by rouge-score; install it with: pip install 'entropykv[eval]'"
        ) from None
    scorer = RougeScorer(list(ROUGE_TYPES))

    def score(answers: Sequence[str], answer: str) -> dict[str, float]:
        best = scorer.score_multi(answers, answer)
        return {name: float(best[name].fmeasure) for name in ROUGE_TYPES}

    return score


def read_dataset(path: str | os.PathLike[str]) -> list[Question]:
    """Read the questions of a JSON Lines file; ContextError names file and line of what is none."""
    questions = []
    # Splitlines() also knows ends of lines that JSON does not.
    lines = read_text(path, ContextError).split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            questions.append(_question(line, f"{path}: line {number}", f"line {number}"))
    if not questions:
        raise ContextError(f"{path}: is empty; give one JSON object in each line")
    return questions


def _question(line: str, where: str, name: str) -> Question:
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ContextError(f"{where} is no JSON object; give context, input and answers in it")
    for key in ("context", "input"):
        if not isinstance(content.get(key), str):
            raise ContextError(f"{where} has no text under {key!r}; give context, input, answers")
    answers = content.get("answers")
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(answer, str) for answer in answers)
    ):
        raise ContextError(f"{where} has no list of texts under 'answers'; give one answer or more")
    return Question(name, content["context"], content["input"], tuple(answers))


def check_template(template: str) -> None:
    """Raise SettingsError where a template does not say where the context goes."""
    if "{context}" not in template:
        raise SettingsError(
            "the prompt template has no {context}; write {context} and {input} where they go"
        )


def dataset_items(
    questions: Sequence[Question], model: Model, *, template: str, max_tokens: int, n_ctx: int
) -> list[DatasetItem]:
    """Make prompts, with the model's chat template where it has one, that fit into n_ctx tokens.

    Of a context that is too long the middle is left out, as LongBench does. Raises ContextError
    where a prompt is too long without it.
    """
    items = []
    for question in questions:
        tokens = _fitted(question, model, template, n_ctx - max_tokens)
        digest = digest_of(*question.answers, json.dumps(tokens))
        items.append(
            DatasetItem(
                question.name, digest, tuple(tokens), len(tokens) + max_tokens, question.answers
            )
        )
    return items


def _fitted(question: Question, model: Model, template: str, room: int) -> list[int]:
    context = model.tokenize(question.context, add_bos=False, special=False)
    text, left_out = question.context, 0
    while True:
        tokens = _prompt(question, text, model, template)
        if len(tokens) <= room:
            return tokens
        if left_out >= len(context):
            raise ContextError(
                f"{question.name}: the prompt has {len(tokens)} tokens even without its context, "
                f"more than the {room} that are left of the model's context; lower --max-tokens"
            )
        left_out += len(tokens) - room
        half = max(len(context) - left_out, 0) // 2
        ends = context[:half], context[len(context) - half :]
        text = "".join(model.detokenize(end, special=False) for end in ends)


def _prompt(question: Question, context: str, model: Model, template: str) -> list[int]:
    before, _, after = template.partition("{context}")  # not format(): the context may have braces
    parts = (before.replace("{input}", question.input), context)
    text = "".join((*parts, after.replace("{input}", question.input)))
    chat = model.chat_prompt(text)
    if chat is None:
        return model.tokenize(text, add_bos=model.adds_bos, special=True)
    return model.tokenize(chat, add_bos=False, special=True)
