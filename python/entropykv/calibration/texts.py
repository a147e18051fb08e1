"""Read texts for calibration, and cut them into sequences of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from entropykv.errors import CalibrationError
from entropykv.files import read_text

LEAST_TOKENS = 4
"""The shortest sequence, in tokens, so that its four quarters end at different tokens."""
LEAST_CURVE_TOKENS = 64
"""The shortest text for loss curves, in tokens."""

_SHIPPED = Path(__file__).parent / "texts"


@dataclass(frozen=True)
class Text:
    """Hold a text to read, and the name of its source."""

    name: str
    content: str


@dataclass(frozen=True)
class Excerpt:
    """Hold the tokens of one part of a text; excerpts of different halves come from different
    texts.
    """

    name: str
    tokens: tuple[int, ...]
    half: int


def read_texts(files: Sequence[Path] | None = None) -> list[Text]:
    """Read the given files, or those that entropykv ships; raises CalibrationError that names an
    unreadable file.
    """
    paths = sorted(_SHIPPED.glob("*.txt")) if files is None else list(files)
    if not paths:
        raise CalibrationError(
            f"there are no texts in {_SHIPPED}; install entropykv again or give texts with --text"
        )
    return [Text(path.name, _read(path)) for path in paths]


def _read(path: Path) -> str:
    text = read_text(path, CalibrationError)
    if not text.strip():
        raise CalibrationError(f"{path}: is empty; give a text file")
    return text


def choose_sequences(
    texts: Sequence[Text],
    tokenize: Callable[[str], list[int]],
    *,
    n_sequences: int,
    max_length: int,
    seed: int,
) -> list[Excerpt]:
    """Return up to n_sequences of at most max_length tokens, beginning with the start of every
    text.

    The seed permutes the texts. If there are fewer texts than sequences, the next max_length tokens
    of each text follow, and so on, unless less than half of max_length is left. Raises
    CalibrationError for a text of fewer than 4 tokens.
    """
    order = list(texts)
    random.Random(seed).shuffle(order)  # noqa: S311
    tokens = [tokenize(text.content) for text in order[:n_sequences]]
    for text, ids in zip(order, tokens, strict=False):
        if min(len(ids), max_length) < LEAST_TOKENS:
            raise CalibrationError(
                f"{text.name}: has {len(ids)} tokens, fewer than {LEAST_TOKENS}; "
                "give a longer text or leave it out"
            )
    sequences: list[Excerpt] = []
    first = 0
    while len(sequences) < n_sequences:
        found = len(sequences)
        for number, ids in enumerate(tokens):
            part = tuple(ids[first : first + max_length])
            if len(sequences) < n_sequences and len(part) >= (max_length / 2 if first else 1):
                name = order[number].name + (f" from token {first}" if first else "")
                sequences.append(Excerpt(name, part, number % 2))
        if len(sequences) == found:
            break
        first += max_length
    return sequences


def long_sequences(
    texts: Sequence[Text],
    tokenize: Callable[[str], list[int]],
    *,
    n_sequences: int,
    length: int,
    seed: int,
) -> list[tuple[int, ...]]:
    """Join texts with blank lines, and cut them into sequences of exactly `length` tokens.

    Without enough text, fewer or shorter sequences are returned, all of one length, and none if all
    texts together have fewer than 64 tokens.
    """
    order = list(texts)
    random.Random(seed).shuffle(order)  # noqa: S311
    sequences: list[tuple[int, ...]] = []
    joined: list[str] = []
    longest: tuple[int, ...] = ()
    for text in order:
        if len(sequences) == n_sequences:
            break
        joined.append(text.content)
        ids = tuple(tokenize("\n\n".join(joined)))
        longest = max(longest, ids[:length], key=len)
        if len(ids) >= length:
            sequences.append(ids[:length])
            joined = []
    if n_sequences and not sequences and len(longest) >= LEAST_CURVE_TOKENS:
        sequences.append(longest)
    return sequences
