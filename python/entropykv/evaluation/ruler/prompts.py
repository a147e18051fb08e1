"""Define RULER's tasks: each makes prompts of three parts, from random words and numbers."""

from __future__ import annotations

import functools
import itertools
import math
import random
import string
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from entropykv.errors import MissingExtraError
from entropykv.evaluation.passkeys import split_sentences

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
        """Return the whole prompt: context, question and answer_prefix."""
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


@dataclass(frozen=True)
class Vocabulary:
    """Hold the English words of the package wonderwords, from which RULER also draws."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]

    @functools.cached_property
    def all(self) -> tuple[str, ...]:
        """Return every word once, in alphabetical order."""
        return tuple(sorted({*self.nouns, *self.adjectives, *self.verbs}))

    def value(self, kind: str, rng: random.Random) -> str:
        """Draw a value of one kind: `words` (an adjective and a noun), `numbers` (7 digits) or
        `uuids`.
        """
        if kind == "words":
            return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"
        if kind == "numbers":
            return str(rng.randrange(10**6, 10**7))
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))


@functools.cache
def load_vocabulary() -> Vocabulary:
    """Return the words of the package wonderwords; raises MissingExtraError if it is missing."""
    try:
        from wonderwords import Defaults, RandomWord  # noqa: PLC0415
    except ImportError:
        raise MissingExtraError(
            "RULER's words come from wonderwords; install it with: pip install 'entropykv[eval]'"
        ) from None
    kinds = (Defaults.NOUNS, Defaults.ADJECTIVES, Defaults.VERBS)
    nouns, adjectives, verbs = (RandomWord(words=kind).filter() for kind in kinds)
    return Vocabulary(tuple(nouns), tuple(adjectives), tuple(verbs))


def random_letters(alphabet: str, n: int, rng: random.Random) -> str:
    """Make a word of `n` random letters."""
    return "".join(rng.choices(alphabet, k=n))


def distinct(draw: Callable[[], str], n: int) -> list[str]:
    """Draw until there are `n` different words; returns them in the order in which they
    were drawn.
    """
    words: dict[str, None] = {}
    while len(words) < n:
        words[draw()] = None
    return list(words)


_DEPTHS = [round(100 * i / 39) for i in range(40)]
"""The places among sentences where a needle can be, in percent."""


@dataclass(frozen=True)
class NeedleTask:
    """Make one of the eight niah tasks (needle in a haystack); the fields are those of RULER's
    synthetic.yaml.
    """

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
        """Return the smallest size: the number of needles, each of which precedes another piece."""
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


_N_NAMES = 5
_EXAMPLE_TOKENS = 500


@dataclass(frozen=True)
class ChainTask:
    """Hide one chain of variable assignments in lines of noise, after an example with its answer.

    This is RULER's vt (variable tracking): find all variables with one value, which each variable
    gets from the one before.

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


_SHORT = 4096
"""Prompts of CommonWordsTask with fewer tokens have a shorter example, and repeat words less
often.
"""
_N_COMMON = 10
_ZETA_OF_2 = math.pi**2 / 6


@dataclass(frozen=True)
class CommonWordsTask:
    """Ask for the ten common words of a numbered list (cwe), after an example with its answer;
    `length`: tokens of a prompt and its answer.
    """

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

    The most frequent word of all is replaced by dots, which are noise. `length`: tokens of a prompt
    and its answer.
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
