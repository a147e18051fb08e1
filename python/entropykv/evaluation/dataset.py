"""Answer questions about long contexts, in LongBench's format, and score the answers by ROUGE."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entropykv.errors import ContextError, MissingExtraError, SettingsError
from entropykv.evaluation.reading import AnswersPart, AnySession, Item, Tick, Values, write
from entropykv.evaluation.texts import digest_of
from entropykv.files import json_of, read_text
from entropykv.llamacpp.distributions import Logits
from entropykv.llamacpp.model import Model

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
DEFAULT_TEMPLATE = "{context}\n\n{input}"
Scorer = Callable[[Sequence[str], str], dict[str, float]]
"""Returns F1 for each of ROUGE_TYPES, given the right answers and the model's answer."""


@dataclass(frozen=True)
class Question:
    """Hold one line of a data set: a context, a question and its right answers."""

    name: str
    context: str
    input: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class DatasetItem(Item):
    """Hold a prompt, and its right answers."""

    answers: tuple[str, ...]


class DatasetPart(AnswersPart):
    """Measure how well the questions of a data set are answered."""

    name = "dataset"

    def __init__(
        self, items: Sequence[DatasetItem], max_tokens: int, score: Scorer, *, inside: bool
    ) -> None:
        """Use items that dataset_items() made with the same max_tokens.

        `inside`: the budget does not grow for an answer.
        """
        self.items = items
        self.n_ctx = max(len(item.tokens) for item in items) + max_tokens
        self._max_tokens = max_tokens
        self._score = score
        self._inside = inside

    def growth(self, item: DatasetItem) -> int:  # noqa: ARG002
        """Return the most tokens of an answer; 0 if `inside` is set."""
        return 0 if self._inside else self._max_tokens

    def answer(self, session: AnySession, last: Logits, item: DatasetItem, tick: Tick) -> Values:
        """Answer the question at the end of the prompt, and score the answer."""
        written = write(session, last, self._max_tokens, tick, stops=True)
        answer = session.detokenize(written.tokens).strip()
        return {"answer": answer, **self._score(item.answers, answer)}


def rouge_scorer() -> Scorer:
    """Return a function that computes ROUGE F1 with the package rouge-score.

    Of several right answers, the best score counts for each type. Raises MissingExtraError without
    the package.
    """
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
    """Read the questions of a JSON Lines file. Raises ContextError for a file that cannot be read
    or has no questions, and for an invalid line, which it names.
    """
    questions = []
    # Do not use splitlines(): it also splits at characters that are no line ends in JSON.
    lines = read_text(path, ContextError).split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            questions.append(_question(line, f"{path}: line {number}", f"line {number}"))
    if not questions:
        raise ContextError(f"{path}: is empty; give one JSON object in each line")
    return questions


def _question(line: str, where: str, name: str) -> Question:
    content = json_of(line)
    if not isinstance(content, dict):
        raise ContextError(f"{where} is not a JSON object; give context, input and answers in it")
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
    """Raise SettingsError if a template does not contain {context}."""
    if "{context}" not in template:
        raise SettingsError(
            "the prompt template has no {context}; write {context} and {input} where they go"
        )


def dataset_items(
    questions: Sequence[Question], model: Model, *, template: str, max_tokens: int, n_ctx: int
) -> list[DatasetItem]:
    """Make prompts with the model's chat template if it has one; a prompt and an answer of
    max_tokens have at most n_ctx tokens together.

    If a context is too long, its middle is left out, as in LongBench. Raises ContextError if a
    prompt is too long even without a context.
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
    # format() would fail, because the context may contain braces.
    before, _, after = template.partition("{context}")
    parts = (before.replace("{input}", question.input), context)
    text = "".join((*parts, after.replace("{input}", question.input)))
    chat = model.chat_prompt(text)
    if chat is None:
        return model.tokenize(text, add_bos=model.adds_bos, special=True)
    return model.tokenize(chat, add_bos=False, special=True)
