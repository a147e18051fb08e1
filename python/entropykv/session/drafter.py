"""Guess the next tokens of a text (drafters), and say why the guesses may be right (Evidence).

Drafts come from the text itself (NgramDrafter), from a small model (draft_model.py), or from a
function of the user (FunctionDrafter).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from entropykv.settings.cache_options import DraftFunction

Tokens = npt.NDArray[np.int32]

LONGEST_MATCH = 32
"""The most tokens before two positions of a text that are compared."""
_MATCHED = (4, 6, 9, 17, LONGEST_MATCH)
"""The limits of groups of drafts: drafts with at least this many agreeing tokens before them belong
to the next group.
"""
_RESUMED = (6, 9, 12)
"""The limits of agreeing tokens for drafts that are resumed (see Evidence.is_resumed), whose groups
follow those of _MATCHED.
"""
PRIORS = (0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.2, 0.3, 0.4, 0.6)
"""For each group, the fraction of right drafts that is assumed before any outcome is known."""


class Evidence(NamedTuple):
    """Say why drafts may be right; drafts with similar evidence are counted together, to learn how
    often such drafts are right.
    """

    agreed: int
    """How many tokens before the drafts agree with what the drafter has found, at most
    LONGEST_MATCH.
    """
    is_resumed: bool = False
    """True if the drafts are copied from where earlier drafts were copied from, although the text
    has differed from that place since.
    """
    source: int = -1
    """The position in the text from which the drafts are copied; -1: they come from elsewhere."""

    @property
    def group(self) -> int:
        """Return the number of the group in which these drafts are counted, from 0."""
        if self.is_resumed:
            return len(_MATCHED) + 1 + sum(self.agreed >= least for least in _RESUMED)
        return sum(self.agreed >= least for least in _MATCHED)

    @property
    def prior(self) -> float:
        """Return the fraction of right drafts that is assumed before any outcome is known."""
        return PRIORS[self.group]


class Drafter(Protocol):
    """Guess what follows a text."""

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], Evidence]:
        """Return up to `most` tokens that may follow `tokens`, and the evidence for them."""

    @property
    def n_bytes(self) -> int:
        """Return the bytes of memory that the drafter holds for its text."""

    @property
    def seconds_each(self) -> float:
        """Return the seconds that making one draft takes; 0.0 where that is nothing compared with a
        step.
        """

    def close(self) -> None:
        """Free what the drafter holds; it must not be used afterwards."""


class DraftModels(Protocol):
    """Make drafters that share a small model."""

    def drafter(self) -> Drafter:
        """Make a drafter for another sequence."""

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the small model's KV budget."""

    def close(self) -> None:
        """Free the small model after the running step."""


class FunctionDrafter:
    """Draft by a function of the user, such as an object of llama_cpp's LlamaDraftModel."""

    n_bytes = 0
    seconds_each = 0.0
    _EVIDENCE = Evidence(8)
    """The evidence of all drafts of a function, which does not say how sure it is. Outcomes show
    how often it is right.
    """

    def __init__(self, function: DraftFunction) -> None:
        """Call `function` for drafts."""
        self._function = function

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], Evidence]:
        """Return what the function returns for the text: see Drafter."""
        if most < 1:
            return [], self._EVIDENCE
        drafts = np.asarray(self._function(tokens)).reshape(-1)[:most]
        return [int(draft) for draft in drafts], self._EVIDENCE

    def close(self) -> None:
        """Do nothing: the function belongs to the user."""


_NGRAM = 3
"""How many tokens at the end of the text must occur earlier, so that what followed there is
drafted.
"""
_CANDIDATES = 8
"""How many earlier positions are compared with the end of the text."""
_RESUMED_WINDOW, _LEAST_RESUMED = 16, 4
"""Earlier drafts are resumed at a position if at least `_LEAST_RESUMED` of the `_RESUMED_WINDOW`
tokens before it agree with the end of the text.
"""
_MOST_BUCKETS = 1 << 16
_LEAST_PLACES = 64
_FEW = 32
"""Up to this many new tokens are added to the tables one by one, which is then faster than with
arrays.
"""
_FACTOR, _OFFSET, _SHIFT, _MASK = 0x01000193, 0x9E37, 15, (1 << 64) - 1
"""Constants of the hash, whose values have 64 bits."""


class NgramDrafter:
    """Find the end of the text at an earlier position of it, and draft what followed there.

    Every position is found by a hash of the three tokens before it; positions with the same hash
    are linked, the latest first. Of the latest such positions, the drafter takes the one whose
    preceding tokens agree longest with the end of the text.
    """

    seconds_each = 0.0

    def __init__(self) -> None:
        """Begin without a text; the tables grow with it."""
        self._latest = np.full(0, -1, np.int32)
        """By hash, the position where the latest n-gram with this hash ends; -1: there is none."""
        self._earlier = np.full(0, -1, np.int32)
        """By the position at which an n-gram ends, where the n-gram before it with the same hash
        ends; -1: there is none.
        """
        self._n_indexed = 0
        self._source, self._n_before = -1, 0
        """The position that the last drafts were copied from, or -1, and how long the text was
        then.
        """

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tables."""
        return self._latest.nbytes + self._earlier.nbytes

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], Evidence]:
        """Return the tokens that followed at the better of two earlier positions: see Drafter.

        One is the position with the longest match. The other one is where the last drafts were
        copied from, moved on by as many tokens as were written since. It is right where the text
        repeats a pattern with other numbers or names of equally many tokens.
        """
        self._index(tokens)
        n = len(tokens)
        if n < self._n_before:  # The text was rolled back.
            self._source = -1
        if n <= _NGRAM or most < 1:
            return [], Evidence(0)
        place, evidence = self._longest_match(tokens)
        resumed = self._source + n - self._n_before
        if self._source >= 0 and resumed < n:
            length = min(resumed, _RESUMED_WINDOW)
            same = tokens[resumed - length : resumed] == tokens[n - length :]
            follows = Evidence(int(np.count_nonzero(same)), is_resumed=True)
            if follows.agreed >= _LEAST_RESUMED and (place < 0 or follows.prior > evidence.prior):
                place, evidence = resumed, follows
        if place < 0:
            return [], evidence
        self._source, self._n_before = place, n
        return tokens[place : place + most].tolist(), evidence._replace(source=place)

    def close(self) -> None:
        """Do nothing: the tables go with the object."""

    def _longest_match(self, tokens: Tokens) -> tuple[int, Evidence]:
        """Return the earlier position whose preceding tokens agree longest with the end of the
        text; -1: there is none.
        """
        n = len(tokens)
        best, length = -1, 0
        last = tokens[-LONGEST_MATCH:].tolist()
        end = int(self._latest[self._bucket(last[-_NGRAM:])])
        for _ in range(_CANDIDATES):
            if end < 0:
                break
            if end < n:  # A rollback may have cut the text.
                before = tokens[max(end - LONGEST_MATCH, 0) : end].tolist()
                agreed = _common_suffix(before, last)
                if agreed > length:
                    best, length = end, agreed
            end = int(self._earlier[end])
        return (best, Evidence(length)) if length >= _NGRAM else (-1, Evidence(0))

    def _bucket(self, ngram: list[int]) -> int:
        """Return the index of an n-gram's hash in `_latest`."""
        value = 0
        for token in ngram:
            value = (value * _FACTOR & _MASK) ^ (token + _OFFSET)
        return (value ^ (value >> _SHIFT)) % len(self._latest)

    def _hashes(self, tokens: Tokens) -> npt.NDArray[np.int64]:
        """Return _bucket() of every n-gram of n tokens, in the order of their ends: (n - 2,)."""
        values = np.zeros(len(tokens) - _NGRAM + 1, np.uint64)
        for i in range(_NGRAM):
            part = tokens[i : i + len(values)].astype(np.uint64) + np.uint64(_OFFSET)
            values = (values * np.uint64(_FACTOR)) ^ part
        return ((values ^ (values >> np.uint64(_SHIFT))) % np.uint64(len(self._latest))).astype(
            np.int64
        )

    def _index(self, tokens: Tokens) -> None:
        """Add the positions of tokens that are new since the last call; forget those that were
        rolled back.
        """
        n = len(tokens)
        if n < self._n_indexed:
            self._forget(n)
        if n > len(self._earlier):
            self._grow(n)
        # The end of the text itself is no earlier position.
        first = max(self._n_indexed, _NGRAM)
        if n <= first:
            return
        if n - first <= _FEW:
            last = tokens[first - _NGRAM : n - 1].tolist()
            for end in range(first, n):
                bucket = self._bucket(last[end - first : end - first + _NGRAM])
                self._earlier[end] = self._latest[bucket]
                self._latest[bucket] = end
            self._n_indexed = n
            return
        ends = np.arange(first, n)
        buckets = self._hashes(tokens[first - _NGRAM : n - 1])
        # In each bucket, every position is linked to the one before it.
        order = np.argsort(buckets, kind="stable")
        ends, buckets = ends[order], buckets[order]
        before = np.concatenate(([-1], ends[:-1]))
        begins = np.concatenate(([True], buckets[1:] != buckets[:-1]))
        before[begins] = self._latest[buckets[begins]]
        self._earlier[ends] = before
        self._latest[buckets] = ends  # The last one of equal buckets stays.
        self._n_indexed = n

    def _grow(self, n: int) -> None:
        """Make tables for a text of n tokens, and for as many more; they are empty."""
        size = 2 * max(n, _LEAST_PLACES)
        self._earlier = np.full(size, -1, np.int32)
        self._latest = np.full(min(_MOST_BUCKETS, size // 2), -1, np.int32)
        self._n_indexed = 0

    def _forget(self, n: int) -> None:
        """Unlink all positions from n on."""
        stale = np.flatnonzero(self._latest >= n)
        for bucket in stale.tolist():
            end = int(self._latest[bucket])
            while end >= n:
                end = int(self._earlier[end])
            self._latest[bucket] = end
        self._n_indexed = n


def _common_suffix(first: list[int], second: list[int]) -> int:
    """Return how many tokens two texts have in common at their ends."""
    n = 0
    for one, other in zip(reversed(first), reversed(second), strict=False):
        if one != other:
            break
        n += 1
    return n
