"""Make the tasks cwe and fwe, which ask for the most frequent words of a list or text."""

from __future__ import annotations

import math
import random
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from entropykv.evaluation.ruler.prompts import TaskPrompt
from entropykv.evaluation.ruler.vocabulary import Vocabulary, distinct, random_letters

_SHORT = 4096
"""Shorter prompts (in tokens) have a shorter example, and repeat their common words less often."""
_N_COMMON = 10
_ZETA_OF_2 = math.pi**2 / 6


@dataclass(frozen=True)
class CommonWordsTask:
    """Ask for the ten common words of a numbered list (cwe), after an example with its answer."""

    vocabulary: Vocabulary
    length: int

    n_generated = 120
    least = _N_COMMON

    @property
    def most(self) -> int:
        """Return the largest size: the number of different words that exist."""
        return len(self.vocabulary.all)

    def prompt(self, size: int, rng: random.Random) -> TaskPrompt:
        """Make a list of `size` different words."""
        short = self.length < _SHORT
        example = self._list(20, 3, 1, rng) if short else self._list(40, 10, 3, rng)
        asked = self._list(size, 6, 1, rng) if short else self._list(size, 30, 3, rng)
        return TaskPrompt(
            f"{example.text} {_numbered(example.references)}\n{asked.context}",
            asked.question,
            asked.answer_prefix,
            asked.references,
        )

    def _list(self, size: int, common: int, uncommon: int, rng: random.Random) -> TaskPrompt:
        """List each of ten words `common` times, the others `uncommon` times, in random order."""
        words = rng.sample(self.vocabulary.all, size)
        most_common = words[:_N_COMMON]
        listed = most_common * common + words[_N_COMMON:] * uncommon
        rng.shuffle(listed)
        return TaskPrompt(
            "Below is a numbered list of words. In these words, some appear more often than "
            f"others. Memorize the ones that appear most often.\n{_numbered(listed)}\n",
            "Question: What are the 10 most common words in the above list?",
            " Answer: The top 10 words that appear most often in the list are:",
            tuple(most_common),
        )


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


@dataclass(frozen=True)
class FrequentWordsTask:
    """Ask for the three most frequent words of a text (fwe), whose frequencies follow Zipf's law.

    The most frequent word of all is replaced by dots, which are noise.
    """

    length: int

    n_generated = 50
    least = 27
    """The smallest size at which every word that is asked for appears."""
    most = sys.maxsize

    def prompt(self, size: int, rng: random.Random) -> TaskPrompt:
        """Make a text of about `size` words."""
        n_words = max((self.length - self.n_generated) // 50, 4)
        words = distinct(lambda: random_letters(string.ascii_lowercase, 6, rng), n_words)
        words[0] = "..."
        text = [
            word
            for rank, word in enumerate(words, start=1)
            for _ in range(int(size * rank**-2.0 / _ZETA_OF_2))
        ]
        rng.shuffle(text)
        return TaskPrompt(
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(text)}\n",
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the "
            "three most frequently appeared words in the above coded text?",
            " Answer: According to the coded text above, the three most frequently appeared words "
            "are:",
            tuple(words[1:4]),
        )
