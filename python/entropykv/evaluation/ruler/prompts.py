"""What the tasks have in common: a prompt in three parts, and how one is made."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Prompt:
    """One sample of a task. The three texts follow each other without anything between them."""

    context: str
    """With what introduces it, and an example where the task has one."""
    question: str
    answer_prefix: str
    """What the model's answer begins with."""
    references: tuple[str, ...]
    """What a right answer contains."""

    @property
    def text(self) -> str:
        """All three parts."""
        return self.context + self.question + self.answer_prefix


class Task(Protocol):
    """How the prompts of one task are made. Their size is the number of pieces of the haystack."""

    @property
    def n_generated(self) -> int:
        """Tokens of an answer."""

    @property
    def least(self) -> int:
        """The smallest size."""

    @property
    def most(self) -> int:
        """The largest one."""

    def prompt(self, size: int, rng: random.Random) -> Prompt:
        """Make a prompt of so many words or lines; equal arguments make equal prompts."""
