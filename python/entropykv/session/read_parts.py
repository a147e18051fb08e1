"""Say where to read on from, so that reading a text again gives the same bits as reading it first.

Sums in floating point depend on how a text is cut: a kernel for one token adds in another order
than one for many, and so do matrix products of different sizes. A text that is read again from the
beginning of one of its micro-batches is cut as it was before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_STRETCH = 256
"""Tokens of two texts that are compared at once."""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    n = min(len(first), len(second))
    for begin in range(0, n, _STRETCH):
        one, other = first[begin : begin + _STRETCH], second[begin : begin + _STRETCH]
        if one != other:  # lists are compared at once, many tokens in the time of one
            for index in range(min(len(one), len(other))):
                if one[index] != other[index]:
                    return begin + index
    return n


@dataclass(frozen=True)
class _Part:
    """Hold the positions of one micro-batch: `begin` is the first, `end` follows the last."""

    begin: int
    end: int


class ReadParts:
    """Hold the micro-batches of several tokens that were read, and the last prompt's logits.

    Tokens that were read one by one, as generated ones are, need no place here: a text can be cut
    between any two of them.
    """

    def __init__(self, n_ubatch: int) -> None:
        """Begin with nothing read; a micro-batch has up to `n_ubatch` tokens."""
        self._n_ubatch = n_ubatch
        self._parts: list[_Part] = []
        self._end_of_prompt = 0
        self._logits: npt.NDArray[np.float32] | None = None

    def note(
        self,
        position: int,
        n_tokens: int,
        logits: npt.NDArray[np.float32] | None,
        *,
        is_prompt: bool = False,
    ) -> None:
        """Take down a micro-batch read at `position`, and the logits of its last token, if any.

        `is_prompt`: it is no token that was written. The last micro-batch of a prompt may have one
        token, too.
        """
        if n_tokens > 1:
            self._parts.append(_Part(position, position + n_tokens))
        if n_tokens > 1 or is_prompt:
            self._end_of_prompt, self._logits = position + n_tokens, logits

    @property
    def n_bytes(self) -> int:
        """Return the bytes that a copy takes, logits not counted."""
        return sys.getsizeof(self._parts)

    @property
    def logits(self) -> npt.NDArray[np.float32] | None:
        """Return the logits of the last prompt; None: they are not known."""
        return self._logits

    def forget_logits(self) -> None:
        """Forget the logits of the last prompt, which take 4 bytes for every token known."""
        self._logits = None

    def copy(self) -> ReadParts:
        """Return the same, for a session that was forked."""
        other = ReadParts(self._n_ubatch)
        other._parts = self._parts[:]
        other._end_of_prompt, other._logits = self._end_of_prompt, self._logits
        return other

    def truncate(self, position: int) -> None:
        """Forget what was read at and beyond a position."""
        while self._parts and self._parts[-1].begin >= position:
            self._parts.pop()
        if self._parts and self._parts[-1].end > position:
            self._parts[-1] = _Part(self._parts[-1].begin, position)
        if self._end_of_prompt > position:
            self._logits = None

    @property
    def end_of_prompt(self) -> int:
        """Return the end of the last micro-batch of several tokens; 0 where there was none."""
        return self._end_of_prompt

    def begin_before(self, position: int) -> int:
        """Return the last position up to `position` where a reading of the same text was cut.

        A micro-batch that is not full ends where its text ended: a longer text is not cut there.
        """
        for part in reversed(self._parts):
            if part.begin < position <= part.end:
                full = position == part.end and part.end - part.begin == self._n_ubatch
                return position if full else part.begin
            if part.end < position:
                break
        return position

    def logits_at(self, position: int) -> npt.NDArray[np.float32] | None:
        """Return the logits after a prompt that ended at `position`; None: they are not known."""
        return self._logits if position == self._end_of_prompt else None
