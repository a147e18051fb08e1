"""Draw the random words, numbers and uuids of the tasks."""

from __future__ import annotations

import functools
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from entropykv.errors import MissingExtraError


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
    """Read the words; raises MissingExtraError if wonderwords is not installed."""
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
