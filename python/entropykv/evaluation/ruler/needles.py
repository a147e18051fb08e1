"""Make the niah tasks: values that are stated once in a haystack, and asked for by their keys."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from entropykv.evaluation.passkeys import split_sentences
from entropykv.evaluation.ruler.prompts import NOISE, TaskPrompt
from entropykv.evaluation.ruler.vocabulary import Vocabulary

_DEPTHS = [round(100 * i / 39) for i in range(40)]
"""The places among sentences where a needle can be, in percent."""


@dataclass(frozen=True)
class NeedleTask:
    """Make one of the eight niah tasks; the fields are those of RULER's synthetic.yaml."""

    vocabulary: Vocabulary
    essay: tuple[str, ...]
    """The words of the text that is the haystack; they are repeated if there are too few."""
    haystack: str
    """The kind of haystack: `noise`, `essay` or `needles`."""
    key_kind: str = "words"
    value_kind: str = "numbers"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1

    n_generated = 128
    most = sys.maxsize

    @property
    def least(self) -> int:
        """Return the smallest size: the number of needles, since each stands before
        another piece.
        """
        return self.n_keys * self.n_values

    def prompt(self, size: int, rng: random.Random) -> TaskPrompt:
        """Hide needles in a haystack of `size` words (essay) or lines (noise, needles)."""
        keys: dict[str, list[str]] = {}
        while len(keys) < self.n_keys:
            key = self.vocabulary.value(self.key_kind, rng)
            keys[key] = [self._value(rng) for _ in range(self.n_values)]
        needles = [self._needle(key, value) for key, values in keys.items() for value in values]
        rng.shuffle(needles)
        hide = self._among_sentences if self.haystack == "essay" else self._among_lines
        hidden = hide(needles, size, rng)
        asked = rng.sample(list(keys), self.n_queries)
        return self._worded(hidden, asked, tuple(value for key in asked for value in keys[key]))

    def _value(self, rng: random.Random) -> str:
        return self.vocabulary.value(self.value_kind, rng)

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value_kind} for {key} is: {value}."

    def _among_sentences(self, needles: Sequence[str], size: int, rng: random.Random) -> str:
        words = (self.essay * -(-size // len(self.essay)))[:size]
        sentences = [sentence.strip() for sentence in split_sentences(" ".join(words))]
        depths = sorted(rng.sample(_DEPTHS, len(needles)))
        places = [len(sentences) * depth // 100 for depth in depths]
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            sentences.insert(place, needle)
        return " ".join(sentences)

    def _among_lines(self, needles: Sequence[str], size: int, rng: random.Random) -> str:
        lines = [NOISE] * size
        if self.haystack == "needles":
            key = self.vocabulary.value
            lines = [self._needle(key(self.key_kind, rng), self._value(rng)) for _ in range(size)]
        places = sorted(rng.sample(range(size), len(needles)))
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _worded(self, hidden: str, asked: Sequence[str], references: tuple[str, ...]) -> TaskPrompt:
        *others, last = asked
        query = f"{', '.join(others)}, and {last}" if others else last
        one = self.n_queries * self.n_values == 1
        kind = self.value_kind.removesuffix("s") if one else self.value_kind
        some, what, are = ("A", "is", "is") if one else ("Some", "are all", "are")
        return TaskPrompt(
            f"{some} special magic {kind} {are} hidden within the following text. Make sure to "
            f"memorize it. I will quiz you about the {kind} afterwards.\n{hidden}\n",
            f"What {what} the special magic {kind} for {query} mentioned in the provided text?",
            f" The special magic {kind} for {query} mentioned in the provided text {are}",
            references,
        )
