"""Define what the tasks share: a prompt in three parts, and the interface of a task."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class TaskPrompt:
    """Hold a sample of a task as three texts, which are joined without anything between them."""

    context: str
    """The context with its introduction, and an example if the task has one."""
    question: str
    answer_prefix: str
    """The text that the model's answer begins with."""
    references: tuple[str, ...]
    """The texts that a right answer contains."""

    @property
    def text(self) -> str:
        """Return all three parts."""
        return self.context + self.question + self.answer_prefix


class Task(Protocol):
    """Make the prompts of one task; a prompt's size is the number of pieces in its haystack."""

    @property
    def n_generated(self) -> int:
        """Return how many tokens an answer may have."""

    @property
    def least(self) -> int:
        """Return the smallest possible size."""

    @property
    def most(self) -> int:
        """Return the largest possible size."""

    def prompt(self, size: int, rng: random.Random) -> TaskPrompt:
        """Make a prompt of `size` words or lines; equal arguments make equal prompts."""
