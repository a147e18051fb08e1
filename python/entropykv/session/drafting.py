"""Guess the next tokens of a text, so that one step can read several of them.

A step reads the weights once, whether it has one token or eight. So a run of guessed tokens
(drafts) is read behind the token that was chosen last; those that the samplers choose, too, are
accepted, and the others are undone. Drafts come from the text itself (NgramDrafter), from a small
model (draft_model.py), or from a function of the user (FunctionDrafter). How many of them are read
follows from how often they were right, and from what steps cost (DraftLengths).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from entropykv.settings.cache_options import DraftFunction

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

_NGRAM = 3
"""Tokens that must occur before, for what followed them to be a draft."""
_LONGEST_MATCH = 32
_CANDIDATES = 8
"""Earlier places that are compared with the end of the text."""
_MOST_BUCKETS = 1 << 16
_LEAST_PLACES = 64


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

    @property
    def seconds_each(self) -> float:
        """Return the time that a draft takes; 0.0 where it is nothing beside a step."""

    def close(self) -> None:
        """Free what it holds; it is not used any more."""


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
    _SURENESS = 8
    """It says nothing about how sure it is; how often it was right will tell."""

    def __init__(self, function: DraftFunction) -> None:
        """Call `function` for drafts."""
        self._function = function

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], int]:
        """Return what the function returns for the text: see Drafter."""
        if most < 1:
            return [], 0
        drafts = np.asarray(self._function(tokens)).reshape(-1)[:most]
        return [int(draft) for draft in drafts], self._SURENESS

    def close(self) -> None:
        """Do nothing: the function belongs to the user."""


class NgramDrafter:
    """Find the end of the text at an earlier place of it, and draft what followed there.

    Every place is found by a hash of the three tokens before it; places with the same hash are
    linked, the latest first. Of the latest ones, the place whose preceding tokens agree longest
    with the end of the text is taken.
    """

    seconds_each = 0.0

    def __init__(self) -> None:
        """Begin without a text; the tables grow with it."""
        self._latest = np.full(0, -1, np.int32)
        """By hash, the end of the n-gram that was seen last; -1: none."""
        self._earlier = np.full(0, -1, np.int32)
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
        end = int(self._latest[self._hashes(tokens[n - _NGRAM :])[0]])
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

    def close(self) -> None:
        """Do nothing: the tables go with the object."""

    def _hashes(self, tokens: Tokens) -> npt.NDArray[np.int64]:
        """Return the bucket of every n-gram of some tokens, in order of their ends."""
        values = np.zeros(len(tokens) - _NGRAM + 1, np.uint64)
        for i in range(_NGRAM):
            part = tokens[i : i + len(values)].astype(np.uint64) + np.uint64(0x9E37)
            values = (values * np.uint64(0x01000193)) ^ part
        return ((values ^ (values >> np.uint64(15))) % np.uint64(len(self._latest))).astype(
            np.int64
        )

    def _index(self, tokens: Tokens) -> None:
        """Add the places of tokens that came since the last call; forget those rolled back."""
        n = len(tokens)
        if n < self._n_indexed:
            self._forget(n)
        if n > len(self._earlier):
            self._grow(n)
        # The end of the text itself is no earlier place.
        first = max(self._n_indexed, _NGRAM)
        if n <= first:
            return
        ends = np.arange(first, n)
        buckets = self._hashes(tokens[first - _NGRAM : n - 1])
        # In each bucket, every place is linked to the one before it.
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
    """Estimate the seconds of a step by its number of tokens.

    A step of a single token runs other kernels than one of several, so it has an estimate of its
    own. To steps of several tokens, a line is fitted: a constant and so much for each token. Older
    steps count less.
    """

    _DECAY = 0.97
    _FIRST, _SLOPE = 1.3, 0.12
    """In units of a single token's step: what a step of two tokens costs, and each token beyond,
    until that was measured.
    """
    _PRIOR = ((2, 0.5), (10, 0.25))
    """How many steps this guess counts for, at two numbers of tokens; it keeps the line defined."""
    _OUTLIER = 3.0
    """A step that takes longer than so many times what was expected is counted as so long: the
    thread was interrupted, or memory was allocated.
    """

    def __init__(self) -> None:
        """Begin without a step."""
        self._single = (0.0, 0.0)
        """Weight and seconds of steps with a single token."""
        self._several = _NOTHING
        """Of steps with several: weight, tokens, seconds, tokens squared, tokens x seconds."""
        self._line = (self._FIRST, self._SLOPE)
        """In units of a single token's step: the cost of two tokens, and of each beyond."""

    def note(self, n_tokens: int, seconds: float) -> None:
        """Take down a step that read nothing but written tokens and drafts."""
        single = self.single_seconds
        if single > 0.0:
            seconds = min(seconds, self._OUTLIER * single * self.relative(n_tokens))
        self._several = _sum(_NOTHING, self._several, self._DECAY)
        if n_tokens == 1:
            weight, total = self._single
            self._single = (self._DECAY * weight + 1.0, self._DECAY * total + seconds)
        else:
            self._several = _sum(self._several, _row(n_tokens, seconds))
        self._line = self._fit(self.single_seconds)

    @property
    def single_seconds(self) -> float:
        """Return the estimated seconds of a step with a single token; 0.0 before the first step."""
        weight, seconds = self._single
        if weight > 0.0:
            return seconds / weight
        weight, tokens, seconds, *_ = self._several
        return seconds / (weight * self._expected(tokens / weight)) if weight > 0.0 else 0.0

    def relative(self, n_tokens: int) -> float:
        """Return the cost of a step in units of one with a single token; at least 1.0."""
        first, slope = self._line
        return 1.0 if n_tokens == 1 else max(first + slope * (n_tokens - 2), 1.0)

    def _fit(self, single: float) -> tuple[float, float]:
        if single <= 0.0:
            return self._FIRST, self._SLOPE
        sums = self._several
        for n, times in self._PRIOR:
            sums = _sum(sums, _row(n, single * self._expected(n)), times)
        weight, tokens, seconds, squares, products = sums
        mean_n, mean_s = tokens / weight, seconds / weight
        slope = (products / weight - mean_n * mean_s) / (squares / weight - mean_n * mean_n)
        slope = max(slope, 0.0)
        return (mean_s - slope * (mean_n - 2.0)) / single, slope / single

    @classmethod
    def _expected(cls, n_tokens: float) -> float:
        """Return the cost of a step, in units of a single token's, before any was measured."""
        return 1.0 if n_tokens == 1 else cls._FIRST + cls._SLOPE * (n_tokens - 2)


_Sums = tuple[float, float, float, float, float]
_NOTHING: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)


def _row(n_tokens: int, seconds: float) -> _Sums:
    """Return what a step adds to the sums of a line: 1, n, s, n squared, n x s."""
    return 1.0, n_tokens, seconds, n_tokens * n_tokens, n_tokens * seconds


def _sum(first: _Sums, second: _Sums, times: float = 1.0) -> _Sums:
    """Return first + times x second."""
    (a, b, c, d, e), (f, g, h, i, j) = first, second
    return a + times * f, b + times * g, c + times * h, d + times * i, e + times * j


class DraftLengths:
    """Choose how many drafts to read: as many as make the time per token least.

    How often drafts are right is counted by how sure the drafter was, in classes.
    """

    _CLASSES = (4, 6, 9, 17, _LONGEST_MATCH)
    _PRIOR = (0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
    """Share of right drafts in each class, until it was seen."""
    _PRIOR_WEIGHT = 6.0
    _DECAY = 0.96
    _ANY, _LONGER = 1.05, 1.02
    """Estimates are not exact: as many times as many tokens per second must be expected of drafts
    as of none, and of a longer run as of the best shorter one.
    """
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

    def fade(self) -> None:
        """Let what was counted fade, once for every token that is written."""
        self._right *= self._RECOVERY
        self._tried *= self._RECOVERY

    def choose(
        self, n_drafts: int, sureness: int, n_others: int = 0, cost_each: float = 0.0
    ) -> int:
        """Return how many of `n_drafts` drafts pay.

        `n_others`: tokens of others in the step. `cost_each`: what making a draft costs, in units
        of a step with a single token; 0.0 for drafts that are there already.
        """
        chance, best, n_best = self.chance(sureness), 0.0, 0
        expected = 1.0
        for n in range(n_drafts + 1):
            cost = self._costs.relative(n_others + 1 + n) + cost_each * n
            gain = (n_others + expected) / cost
            if gain > best:
                best, n_best = gain * (self._ANY if n == 0 else self._LONGER), n
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

    _RETRY = 16
    """After so many tokens without drafts, one is made to see whether they are right again; twice
    as many after each time that they still do not pay.
    """
    _MOST_RETRY = 1024

    def __init__(self, drafter: Drafter, costs: StepCosts, most: int) -> None:
        """Read up to `most` drafts at a time; `costs` are those of the steps of all sequences."""
        self._drafter = drafter
        self._costs = costs
        self._lengths = DraftLengths(costs)
        self._most = most
        self._sureness = _LONGEST_MATCH
        """How sure the drafter was the last time; at first, it is tried."""
        self._skipped = 0
        """For how many tokens no drafts were made, because they would not have paid."""
        self._patience = self._RETRY
        self.counts = DraftCounts()

    @property
    def n_bytes(self) -> int:
        """Return the bytes that the drafter holds."""
        return self._drafter.n_bytes

    def propose(self, tokens: Tokens, most: int, n_others: int = 0) -> list[int]:
        """Return drafts of what follows the tokens, `most` at most.

        `n_others`: tokens of other sequences that are read in the same step.
        """
        most = min(most, self._most)
        self._lengths.fade()
        seconds, single = self._drafter.seconds_each, self._costs.single_seconds
        if seconds > 0.0 and single > 0.0:
            # As sure as the last time: it is not known before drafts are made.
            most = self._lengths.choose(most, self._sureness, n_others, seconds / single)
            if most == 0:
                self._skipped += 1
                if self._skipped < self._patience:
                    return []
                most, self._patience = 1, min(2 * self._patience, self._MOST_RETRY)
            else:
                self._patience = self._RETRY
            self._skipped = 0
        drafts, sureness = self._drafter.draft(tokens, most)
        if not drafts:
            return []
        self._sureness = sureness
        return drafts[: self._lengths.choose(len(drafts), sureness, n_others)]

    def close(self) -> None:
        """Free the drafter."""
        self._drafter.close()

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
