"""Define what the tasks share: a prompt in three parts, and how one is made."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Prompt:
    """Hold a sample of a task, three texts that follow each other with nothing between them."""

    context: str
    """The context with what introduces it, and an example where the task has one."""
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
    """Make the prompts of one task; their size is the number of pieces of the haystack."""

    @property
    def n_generated(self) -> int:
        """Return how many tokens an answer may have."""

    @property
    def least(self) -> int:
        """Return the smallest size."""

    @property
    def most(self) -> int:
        """Return the largest size."""

    def prompt(self, size: int, rng: random.Random) -> Prompt:
        """Make a prompt of so many words or lines; equal arguments make equal prompts."""
