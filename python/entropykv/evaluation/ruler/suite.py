"""Choose which RULER tasks are measured at which lengths, and make their samples."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entropykv.errors import ContextError, SettingsError
from entropykv.evaluation.ruler.prompts import (
    ChainTask,
    CommonWordsTask,
    FrequentWordsTask,
    NeedleTask,
    Task,
    TaskPrompt,
    load_vocabulary,
)
from entropykv.evaluation.shipped_texts import read_texts
from entropykv.evaluation.texts import EvaluationText

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
    """Hold the tasks, lengths and samples to measure; raises SettingsError for impossible
    values.
    """

    lengths: Sequence[int] = (4096,)
    """The lengths of the prompts with their answers, in tokens."""
    tasks: Sequence[str] = TASKS
    n_samples: int = 10
    """How many samples each task has at each length."""
    questions: Sequence[str] = QUESTIONS[:1]

    def __post_init__(self) -> None:
        """Check the names of the tasks, and remove duplicates."""
        for name in self.tasks:
            if name not in TASKS:
                raise SettingsError(
                    f"RULER has no task {name!r} here; give some of {', '.join(TASKS)}"
                )
        object.__setattr__(self, "tasks", [name for name in TASKS if name in self.tasks])
        object.__setattr__(self, "lengths", sorted(set(self.lengths)))


def own_texts() -> list[EvaluationText]:
    """Return the English prose that entropykv ships, as haystacks."""
    texts = read_texts(None)
    prose = (text for text in texts if text.name.removesuffix(".txt")[3:] in _OWN_PROSE)
    return [EvaluationText(text.name, text.content) for text in prose]


def make_task(
    name: str,
    length: int,
    texts: Sequence[EvaluationText],
    seed: int,
    count_tokens: Callable[[str], int],
) -> Task:
    """Prepare the task `name`, one of TASKS, for prompts of `length` tokens; `texts` replace
    RULER's essays.
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

    The size is the largest that fits for the first sample. A sample depends on the task's name, the
    length, the seed and its number, not on how many samples are made. Raises ContextError if not
    even the smallest prompt fits.
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
