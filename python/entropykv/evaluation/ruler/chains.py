"""Make the task vt (variable tracking): find all variables that got one value, each from another
one.
"""

from __future__ import annotations

import itertools
import random
import string
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from entropykv.evaluation.ruler.prompts import NOISE, TaskPrompt
from entropykv.evaluation.ruler.vocabulary import distinct, random_letters

_N_NAMES = 5
_EXAMPLE_TOKENS = 500


@dataclass(frozen=True)
class ChainTask:
    """Hide one chain of variable assignments in lines of noise, after an example with its answer.

    The example has as many lines as fit into 500 tokens, and its chain is at the same places in
    every prompt; only names and value change.
    """

    count_tokens: Callable[[str], int]
    seed: str
    """The random seed of the places at which the example's chain is hidden."""

    n_generated = 30
    least = _N_NAMES
    most = sys.maxsize

    def prompt(self, size: int, rng: random.Random) -> TaskPrompt:
        """Hide a chain in `size` lines of noise."""
        example = self._example(self._example_size, rng)
        asked = _prompt(size, 5, rng, rng)
        answer = " ".join(example.references)
        return TaskPrompt(
            f"{example.text} {answer}\n\n{asked.context}",
            asked.question,
            asked.answer_prefix,
            asked.references,
        )

    @cached_property
    def _example_size(self) -> int:
        size = self.least
        while self._n_example_tokens(size + 1) <= _EXAMPLE_TOKENS:
            size += 1
        return size

    def _n_example_tokens(self, size: int) -> int:
        return self.count_tokens(self._example(size, self._numbers()).text)

    def _example(self, size: int, rng: random.Random) -> TaskPrompt:
        return _prompt(size, 3, rng, self._numbers())

    def _numbers(self) -> random.Random:
        return random.Random(self.seed)  # noqa: S311


def _prompt(size: int, n_letters: int, rng: random.Random, places: random.Random) -> TaskPrompt:
    """Make a prompt with names of `n_letters` letters; `places` draws the lines between which the
    chain is hidden.
    """
    names = distinct(lambda: random_letters(string.ascii_uppercase, n_letters, rng), _N_NAMES)
    value = rng.randrange(10_000, 99_999)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {to} = VAR {of} " for of, to in itertools.pairwise(names)]
    lines = [NOISE] * size
    for place, link in reversed(
        list(zip(sorted(places.sample(range(size), _N_NAMES)), chain, strict=True))
    ):
        lines.insert(place, link)
    hidden = "\n".join(lines)
    return TaskPrompt(
        "Memorize and track the chain(s) of variable assignment hidden in the following text."
        f"\n\n{hidden}\n",
        f"Question: Find all variables that are assigned the value {value} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{_N_NAMES} variables are assigned the value {value}, they are: ",
        tuple(names),
    )
