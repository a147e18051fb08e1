"""Guess the next tokens of a text, so that one step can read several of them.

A step reads the weights once, whether it has one token or eight. So a run of guessed tokens
(drafts) is read behind the token that was chosen last; those that the samplers choose, too, are
accepted, and the others are undone. Drafts come from the text itself (NgramDrafter). How many of
them are read follows from how often they were right, and from what steps cost (DraftLengths).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

_NGRAM = 3
"""Tokens that must occur before, for what followed them to be a draft."""
_LONGEST_MATCH = 32
_CANDIDATES = 8
"""Earlier places that are compared with the end of the text."""
_MOST_BUCKETS = 1 << 16


class Drafter(Protocol):
    """Guess what follows a text."""

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens that may follow, and how sure they are.

        The second value is the number of tokens before them that speak for them; drafts with larger
        ones are right more often.
        """

    @property
    def n_bytes(self) -> int:
        """Return the bytes that it holds."""


class NgramDrafter:
    """Find the end of the text at an earlier place of it, and draft what followed there.

    Every place is found by a hash of the three tokens before it; places with the same hash are
    linked, the latest first. Of the latest ones, the place whose preceding tokens agree longest
    with the end of the text is taken.
    """

    def __init__(self, n_ctx: int) -> None:
        """Allocate the tables for texts of up to `n_ctx` tokens."""
        self._n_buckets = min(_MOST_BUCKETS, 1 << max(4, (n_ctx - 1).bit_length()))
        self._latest = np.full(self._n_buckets, -1, np.int32)
        """By hash, the end of the n-gram that was seen last; -1: none."""
        self._earlier = np.full(n_ctx + 1, -1, np.int32)
        """By the end of an n-gram, the end of the one with the same hash before it."""
        self._n_indexed = 0

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tables."""
        return self._latest.nbytes + self._earlier.nbytes

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], int]:
        """Return what followed the longest earlier match: see Drafter."""
        self._index(tokens)
        n = len(tokens)
        if n <= _NGRAM or most < 1:
            return [], 0
        best, length = -1, 0
        end = int(self._latest[self._hash(tokens[n - _NGRAM :])])
        for _ in range(_CANDIDATES):
            if end < 0:
                break
            if end < n:  # a longer text may have been there before a rollback
                agreed = _common_suffix(tokens[:end], tokens)
                if agreed > length:
                    best, length = end, agreed
            end = int(self._earlier[end])
        if length < _NGRAM:
            return [], 0
        return tokens[best : best + most].tolist(), length

    def _hash(self, ngram: Tokens) -> int:
        value = 0
        for token in ngram.tolist():
            value = (value * 0x01000193) ^ (token + 0x9E37)
        return (value ^ (value >> 15)) & (self._n_buckets - 1)

    def _index(self, tokens: Tokens) -> None:
        """Add the places of tokens that came since the last call; forget those rolled back."""
        n = len(tokens)
        if n < self._n_indexed:
            self._forget(n)
        # The end of the text itself is no earlier place.
        for end in range(max(self._n_indexed, _NGRAM), n):
            bucket = self._hash(tokens[end - _NGRAM : end])
            self._earlier[end] = self._latest[bucket]
            self._latest[bucket] = end
        self._n_indexed = max(self._n_indexed, n) if n >= _NGRAM else 0

    def _forget(self, n: int) -> None:
        """Unlink all places from position n on."""
        stale = np.flatnonzero(self._latest >= n)
        for bucket in stale.tolist():
            end = int(self._latest[bucket])
            while end >= n:
                end = int(self._earlier[end])
            self._latest[bucket] = end
        self._n_indexed = n


def _common_suffix(first: Tokens, second: Tokens) -> int:
    """Return how many tokens two texts have in common at their ends, _LONGEST_MATCH at most."""
    n = min(len(first), len(second), _LONGEST_MATCH)
    differs = np.flatnonzero(first[len(first) - n :] != second[len(second) - n :])
    return n if differs.size == 0 else n - 1 - int(differs[-1])


class StepCosts:
    """Estimate the seconds of a step by its number of tokens: a constant and so much a token.

    A line is fitted to the steps so far, each of which counts less than the one after it.
    """

    _DECAY = 0.97
    _SLOPE = 0.15
    """Of a single token's step: what each further token costs, until that was measured."""
    _PRIOR = 4.0
    """Steps that this guess counts for."""

    def __init__(self) -> None:
        """Begin without a step."""
        self._sums = np.zeros(5)
        """Of weights, tokens, seconds, tokens squared, and tokens x seconds."""

    def note(self, n_tokens: int, seconds: float) -> None:
        """Take down a step that read nothing but written tokens and drafts."""
        row = (1.0, n_tokens, seconds, n_tokens * n_tokens, n_tokens * seconds)
        self._sums = self._sums * self._DECAY + np.array(row)

    def relative(self, n_tokens: int) -> float:
        """Return the cost of a step in units of one with a single token."""
        weight, tokens, seconds, squares, products = self._sums.tolist()
        if weight == 0.0 or seconds <= 0.0:
            return 1.0 + self._SLOPE * (n_tokens - 1)
        mean_n, mean_s = tokens / weight, seconds / weight
        spread = squares / weight - mean_n * mean_n
        slope = (products / weight - mean_n * mean_s) / spread if spread > 1e-9 else 0.0
        single = max(mean_s - slope * (mean_n - 1.0), 0.1 * mean_s)
        # Few different lengths say little about the slope.
        trust = weight * spread / (weight * spread + self._PRIOR)
        of_token = max(trust * slope / single + (1.0 - trust) * self._SLOPE, 0.0)
        return 1.0 + of_token * (n_tokens - 1)


class DraftLengths:
    """Choose how many drafts to read: as many as make the time per token least.

    How often drafts are right is counted by how sure the drafter was, in classes.
    """

    _CLASSES = (4, 6, 9, 17, _LONGEST_MATCH)
    _PRIOR = (0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
    """Share of right drafts in each class, until it was seen."""
    _PRIOR_WEIGHT = 6.0
    _DECAY = 0.96
    _RECOVERY = 0.995
    """By which counts fade with every token, so that drafts are tried again after a while."""

    def __init__(self, costs: StepCosts) -> None:
        """Take the costs of steps, which all sequences of a pool share."""
        self._costs = costs
        self._right = np.zeros(len(self._PRIOR))
        self._tried = np.zeros(len(self._PRIOR))

    def _class_of(self, sureness: int) -> int:
        return sum(sureness >= least for least in self._CLASSES)

    def chance(self, sureness: int) -> float:
        """Return the estimated probability that a draft is right whose predecessors are."""
        i = self._class_of(sureness)
        right = self._right[i] + self._PRIOR_WEIGHT * self._PRIOR[i]
        return float(right / (self._tried[i] + self._PRIOR_WEIGHT))

    def choose(self, n_drafts: int, sureness: int, n_others: int = 0) -> int:
        """Return how many drafts to read; `n_others`: tokens of others in the step."""
        self._right *= self._RECOVERY
        self._tried *= self._RECOVERY
        chance, best, n_best = self.chance(sureness), 0.0, 0
        expected = 1.0
        for n in range(n_drafts + 1):
            gain = (n_others + expected) / self._costs.relative(n_others + 1 + n)
            if gain > best * 1.02:  # a longer run must pay
                best, n_best = gain, n
            expected += chance ** (n + 1)
        return n_best

    def note(self, sureness: int, n_drafts: int, n_right: int) -> None:
        """Take down how many of the drafts were right; those after a wrong one say nothing."""
        i = self._class_of(sureness)
        self._right[i] = self._right[i] * self._DECAY + n_right
        self._tried[i] = self._tried[i] * self._DECAY + min(n_right + 1, n_drafts)


@dataclass
class DraftCounts:
    """Count what drafts were read, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    """Steps of written tokens, with drafts or without."""


class Drafting:
    """Draft for one text: with the drafter, as many tokens as pay."""

    def __init__(self, drafter: Drafter, costs: StepCosts, most: int) -> None:
        """Read up to `most` drafts at a time; `costs` are those of the steps of all sequences."""
        self._drafter = drafter
        self._lengths = DraftLengths(costs)
        self._most = most
        self._sureness = 0
        self.counts = DraftCounts()

    @property
    def n_bytes(self) -> int:
        """Return the bytes that the drafter holds."""
        return self._drafter.n_bytes

    def propose(self, tokens: Tokens, most: int, n_others: int = 0) -> list[int]:
        """Return drafts of what follows the tokens, `most` at most.

        `n_others`: tokens of other sequences that are read in the same step.
        """
        drafts, self._sureness = self._drafter.draft(tokens, min(most, self._most))
        return drafts[: self._lengths.choose(len(drafts), self._sureness, n_others)]

    def note(self, n_drafts: int, n_right: int) -> None:
        """Take down how many drafts were read after propose(), and how many were right."""
        self.counts.steps += 1
        if n_drafts:
            self.counts.drafted += n_drafts
            self.counts.accepted += n_right
            self._lengths.note(self._sureness, n_drafts, n_right)


class Verification:
    """Choose tokens by the logits of a run with drafts, as long as they are the drafts."""

    def __init__(
        self,
        drafts: Sequence[int],
        choose: Callable[[Logits], int | None],
        is_end: Callable[[int], bool],
    ) -> None:
        """Verify `drafts`: `choose` samples a token by logits; None: a grammar allows none."""
        self._drafts = drafts
        self._choose = choose
        self._is_end = is_end
        self.is_asked = False
        """Whether drafts were read, and tokens chosen."""
        self.accepted: list[int] = []
        """The drafts that are right."""
        self.next: int | None = None
        """The token that was chosen after them."""
        self.error: Exception | None = None
        """The error that choosing it raised, if any."""

    def verify(self, rows: Logits) -> int:
        """Return how many drafts are right; an error is kept until the step has ended."""
        self.is_asked = True
        for i, logits in enumerate(rows):
            try:
                self.next = self._choose(logits)
            except Exception as error:
                self.error = error
                break
            if self.next is None or self._is_end(self.next):
                break
            if i == len(rows) - 1 or self.next != self._drafts[i]:
                break
            self.accepted.append(self.next)
        return len(self.accepted)
