"""Cut texts for calibration into sequences of tokens, and hold some of them back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entropykv.errors import CalibrationError
from entropykv.evaluation.texts import Text

LEAST_TOKENS = 4
"""The shortest sequence, in tokens, so that its four quarters end at different tokens."""
LEAST_CURVE_TOKENS = 64
"""The shortest text for loss curves, in tokens."""
LEAST_PIECE = 256
"""The shortest piece of a text, in tokens, that is joined with pieces of other texts."""
HELD_BACK_SHARE = 0.4
"""The largest share of the texts that is held back."""
_FEW = 5
"""Of fewer texts than this, the end of each is held back instead of whole texts."""
HELD_BACK_PART = 0.25
"""The part of each text, at its end, that is held back if there are few texts."""


@dataclass(frozen=True)
class Excerpt:
    """Hold the tokens of one part of a text; excerpts of different halves come from different
    texts.
    """

    name: str
    tokens: tuple[int, ...]
    half: int


def hold_back(
    texts: Sequence[Text],
    count_tokens: Callable[[str], int],
    least_tokens: int,
    seed: int,
    most: int,
) -> tuple[list[Text], list[Text]]:
    """Split the texts into those that a profile is made with, and those that it is compared on.

    HELD_BACK_SHARE of the texts is held back, at most `most`, or, of fewer than five, the end of
    each. What is held back has `least_tokens` tokens or more; shorter texts are kept.
    """
    if len(texts) < _FEW:
        return _hold_back_ends(texts, count_tokens, least_tokens)
    order = list(texts)
    random.Random(seed).shuffle(order)  # noqa: S311
    most = min(int(HELD_BACK_SHARE * len(order)), most)
    held: list[Text] = []
    for text in reversed(order):
        if len(held) < most and count_tokens(text.content) >= least_tokens:
            held.append(text)
    return [text for text in texts if text not in held], held


def _hold_back_ends(
    texts: Sequence[Text], count_tokens: Callable[[str], int], least_tokens: int
) -> tuple[list[Text], list[Text]]:
    kept, held = [], []
    for text in texts:
        end = int(len(text.content) * (1 - HELD_BACK_PART))
        rest = text.content[end:].lstrip()
        if count_tokens(rest) < least_tokens:
            kept.append(text)
        else:
            kept.append(Text(text.name, text.content[:end]))
            held.append(Text(text.name, rest))
    return kept, held


def choose_sequences(
    texts: Sequence[Text],
    tokenize: Callable[[str], list[int]],
    *,
    n_sequences: int,
    max_length: int,
    seed: int,
) -> list[Excerpt]:
    """Return up to `n_sequences` sequences of at most `max_length` tokens, those at the start of
    every text first.

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
    mixed: bool = False,
) -> list[tuple[int, ...]]:
    """Join texts with blank lines, and cut them into sequences of exactly `length` tokens.

    If `mixed`, as many texts as possible are represented, each by its beginning of LEAST_PIECE
    tokens or more. Without enough text, fewer or shorter sequences are returned, all of one length,
    and none if all texts together have fewer than 64 tokens.
    """
    order = list(texts)
    random.Random(seed).shuffle(order)  # noqa: S311
    most_pieces = min(len(order) // max(1, n_sequences), length // LEAST_PIECE)
    n_pieces = max(1, most_pieces) if mixed else 1
    sequences: list[tuple[int, ...]] = []
    joined: list[str] = []
    longest: tuple[int, ...] = ()
    for text in order:
        if len(sequences) == n_sequences:
            break
        is_last = len(joined) + 1 >= n_pieces
        content = text.content
        joined.append(content if is_last else _beginning(content, tokenize, length // n_pieces))
        ids = tuple(tokenize("\n\n".join(joined)))
        longest = max(longest, ids[:length], key=len)
        if is_last and len(ids) >= length:
            sequences.append(ids[:length])
            joined = []
    if n_sequences and not sequences and len(longest) >= LEAST_CURVE_TOKENS:
        sequences.append(longest)
    return sequences


def _beginning(content: str, tokenize: Callable[[str], list[int]], n_tokens: int) -> str:
    """Return the first words of a text, of about `n_tokens` tokens."""
    share = n_tokens / max(1, len(tokenize(content)))
    if share >= 1.0:
        return content
    end = int(share * len(content))
    return content[: content.rfind(" ", 0, end) + 1].rstrip() or content[:end]
