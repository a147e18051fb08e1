"""Run RULER as a part of an evaluation: tokenise samples, generate answers, and score them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entropykv.errors import ContextError, SettingsError
from entropykv.evaluation.reading import (
    AnswersPart,
    AnySession,
    Item,
    Tick,
    Values,
    read,
    write,
)
from entropykv.evaluation.ruler.prompts import (
    ChainTask,
    CommonWordsTask,
    FrequentWordsTask,
    NeedleTask,
    Task,
    TaskPrompt,
    load_vocabulary,
)
from entropykv.evaluation.texts import Text, digest_of, read_texts
from entropykv.llamacpp.distributions import Logits
from entropykv.llamacpp.model import Model

_NEEDLES: dict[str, dict[str, str | int]] = {
    "niah_single_1": {"haystack": "noise"},
    "niah_single_2": {"haystack": "essay"},
    "niah_single_3": {"haystack": "essay", "value_kind": "uuids"},
    "niah_multikey_1": {"haystack": "essay", "n_keys": 4},
    "niah_multikey_2": {"haystack": "needles"},
    "niah_multikey_3": {"haystack": "needles", "key_kind": "uuids", "value_kind": "uuids"},
    "niah_multivalue": {"haystack": "essay", "n_values": 4},
    "niah_multiquery": {"haystack": "essay", "n_keys": 4, "n_queries": 4},
}
TASKS = (*_NEEDLES, "vt", "cwe", "fwe")
QUESTIONS = ("unknown", "known")
"""`unknown`: the context is read before the question; `known`: both are read as one prompt."""

_OWN_PROSE = ("encyclopedia", "fiction", "news", "manual", "abstract", "history")
_SHRINKING = 64
"""A sample that is too long is shortened by 1/64 of its size at a time, until it fits."""


@dataclass(frozen=True)
class Suite:
    """Hold tasks, lengths and samples to measure; raises SettingsError for impossible values."""

    lengths: Sequence[int] = (4096,)
    """The lengths of the prompts with their answers, in tokens."""
    tasks: Sequence[str] = TASKS
    n_samples: int = 10
    """How many samples each task has at each length."""
    questions: Sequence[str] = QUESTIONS[:1]

    def __post_init__(self) -> None:
        """Raise SettingsError for an unknown task; sort tasks and lengths, without duplicates."""
        for name in self.tasks:
            if name not in TASKS:
                raise SettingsError(
                    f"RULER has no task {name!r} here; give some of {', '.join(TASKS)}"
                )
        object.__setattr__(self, "tasks", [name for name in TASKS if name in self.tasks])
        object.__setattr__(self, "lengths", sorted(set(self.lengths)))


def own_texts() -> list[Text]:
    """Return the English prose that entropykv ships, as haystacks."""
    return [text for text in read_texts() if text.name.removesuffix(".txt")[3:] in _OWN_PROSE]


def make_task(
    name: str,
    length: int,
    texts: Sequence[Text],
    seed: int,
    count_tokens: Callable[[str], int],
) -> Task:
    """Prepare the task `name`, one of TASKS, for prompts of `length` tokens; `texts` replace
    RULER's essays. Raises MissingExtraError without wonderwords.
    """
    if name == "vt":
        return ChainTask(count_tokens, f"{seed} {name}")
    if name == "cwe":
        return CommonWordsTask(load_vocabulary(), length)
    if name == "fwe":
        return FrequentWordsTask(length)
    words = re.split(r"\s+", " ".join(text.content for text in texts).strip())
    return NeedleTask(load_vocabulary(), tuple(words), **_NEEDLES[name])  # type: ignore[arg-type]


def make_prompts(
    name: str,
    task: Task,
    suite: Suite,
    length: int,
    seed: int,
    count_tokens: Callable[[TaskPrompt], int],
) -> list[TaskPrompt]:
    """Make samples of at most `length` tokens with the answer, nearly as large as possible.

    All samples have the largest size at which the first one fits; those that do not fit are
    shortened. A sample depends on the task's name, the length, the seed and its number, not on how
    many samples are made. Raises ContextError if not even the smallest prompt fits.
    """

    def prompt(number: int, size: int) -> TaskPrompt:
        return task.prompt(size, random.Random(f"{seed} {name} {length} {number}"))  # noqa: S311

    def fits(made: TaskPrompt) -> bool:
        return count_tokens(made) + task.n_generated <= length

    largest = _largest(task, lambda size: fits(prompt(0, size)))
    prompts = []
    for number in range(suite.n_samples if largest else 0):
        size = largest
        while size >= task.least and not fits(prompt(number, size)):
            size -= max(1, size // _SHRINKING)
        if size >= task.least:
            prompts.append(prompt(number, size))
    if len(prompts) < suite.n_samples:
        raise ContextError(
            f"{length} tokens are too few for prompts of {name} with this model; use larger "
            "--lengths or leave the task out of --tasks"
        )
    return prompts


def _largest(task: Task, fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits, found by doubling and bisection; 0 if none fits."""
    if not fits(task.least):
        return 0
    low, high = task.least, 2 * task.least
    while high <= task.most and fits(high):
        low, high = high, 2 * high
    high = min(high, task.most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class RulerItem(Item):
    """Hold a sample: `tokens` are the context, followed by the question if that is known."""

    task: str
    question: tuple[int, ...]
    """The tokens that are read after the context; empty if `tokens` contain the question."""
    references: tuple[str, ...]
    n_generated: int


class RulerPart(AnswersPart):
    """Measure samples of one length, either all with a known or all with an unknown question."""

    name = "ruler"

    def __init__(
        self,
        items: Sequence[RulerItem],
        length: int,
        question: str,
        haystacks: Sequence[str],
        *,
        inside: bool,
    ) -> None:
        """Use items that ruler_parts() made; `haystacks` are the names of the texts.

        `inside`: the budget does not grow for question and answer.
        """
        self.items = items
        self.tasks = list(dict.fromkeys(item.task for item in items))
        self.n_ctx = max(item.n_steps for item in items)
        self._length = length
        self._question = question
        self._haystacks = haystacks
        self._inside = inside

    @property
    def title(self) -> str:
        """Return the title of the part's table, with the names of the texts that replace RULER's
        essays.
        """
        return (
            f"RULER, {self._length} tokens, question {self._question} while the context is read; "
            f"essays replaced by {', '.join(self._haystacks)}"
        )

    def growth(self, item: RulerItem) -> int:
        """Return the most tokens of question and answer; 0 if `inside` is set."""
        return 0 if self._inside else len(item.question) + item.n_generated

    def answer(self, session: AnySession, last: Logits, item: RulerItem, tick: Tick) -> Values:
        """Read the question if it is not known yet, answer, and score the answer."""
        if item.question:
            last, _ = read(session, item.question, tick)
        written = write(session, last, item.n_generated, tick, stops=True)
        answer = session.detokenize(written.tokens)
        return {
            "task": item.task,
            "length": self._length,
            "question": self._question,
            "answer": answer,
            "score": string_match_all(answer, item.references),
        }


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Return the share of references that an answer contains, ignoring case."""
    return sum(each.lower() in answer.lower() for each in references) / len(references)


def ruler_parts(
    suite: Suite, model: Model, texts: Sequence[Text], *, seed: int, inside: bool
) -> list[RulerPart]:
    """Return a part with samples of all tasks for each length and each question of the suite.

    `texts` replace RULER's essays; `seed` determines the samples; `inside`: the budget does not
    grow for question and answer. Raises ContextError for a length that is too large for the model,
    or too small for a task, and MissingExtraError without wonderwords.
    """
    trained = model.geometry.n_ctx_train
    if max(suite.lengths) > trained:
        raise ContextError(
            f"prompts of {max(suite.lengths)} tokens are longer than the {trained} that the model "
            "was trained for, and so would be those of the full cache; use smaller --lengths"
        )
    names = [text.name for text in texts]
    parts = []
    for length in suite.lengths:
        samples = _samples(suite, length, model, texts, seed)
        for question in suite.questions:
            known = question == QUESTIONS[1]
            items = [_item(sample, model, known=known) for sample in samples]
            parts.append(RulerPart(items, length, question, names, inside=inside))
    return parts


@dataclass(frozen=True)
class _Sample:
    name: str
    task: str
    prompt: TaskPrompt
    n_generated: int


def _samples(
    suite: Suite, length: int, model: Model, texts: Sequence[Text], seed: int
) -> list[_Sample]:
    def count_tokens(text: str) -> int:
        return len(model.tokenize(text, add_bos=False, special=True))

    def count_prompt(prompt: TaskPrompt) -> int:
        return sum(map(len, prompt_tokens(prompt, model)))

    samples = []
    for name in suite.tasks:
        task = make_task(name, length, texts, seed, count_tokens)
        prompts = make_prompts(name, task, suite, length, seed, count_prompt)
        samples += [
            _Sample(f"{name} {length} {number}", name, prompt, task.n_generated)
            for number, prompt in enumerate(prompts)
        ]
    return samples


def _item(sample: _Sample, model: Model, *, known: bool) -> RulerItem:
    tokens, question = prompt_tokens(sample.prompt, model)
    if known:
        tokens, question = (*tokens, *question), ()
    references, n_generated = sample.prompt.references, sample.n_generated
    return RulerItem(
        sample.name,
        digest_of(json.dumps([tokens, question, references, n_generated])),
        tokens,
        len(tokens) + len(question) + n_generated,
        sample.task,
        question,
        references,
        n_generated,
    )


def prompt_tokens(prompt: TaskPrompt, model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of the context, and the tokens from the question on, with the chat
    template.

    As in RULER, the beginning of the answer follows the template, and the model continues it.
    """
    context, question, add_bos = prompt.context, prompt.question, model.adds_bos
    chat = model.chat_prompt(context + question)
    if chat is not None and (cut := chat.rfind(question)) >= 0:
        context, question, add_bos = chat[:cut], chat[cut:], False
    return (
        tuple(model.tokenize(context, add_bos=add_bos, special=True)),
        tuple(model.tokenize(question + prompt.answer_prefix, add_bos=False, special=True)),
    )
