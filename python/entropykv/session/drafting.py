"""Guess the next tokens of a text, so that one step can read several of them.

A step reads the weights once, whether it has one token or eight. So a run of guessed tokens
(drafts) is read behind the token that was chosen last; those that the samplers choose, too, are
accepted, and the others are undone. A drafter makes the drafts (drafter.py). How many of them are
read follows from how often they were right (DraftLengths), and from what steps cost (StepCosts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from entropykv.session.drafter import LONGEST_MATCH, PRIORS, Drafter, Evidence, Tokens

_Sums = tuple[float, float, float, float, float]
_NOTHING: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)


class StepCosts:
    """Estimate the seconds of a step from its number of tokens.

    A step of a single token runs other kernels than one of several tokens, so it has an estimate of
    its own. To the steps of several tokens, a line is fitted: a constant, and a slope per token.
    Older steps count less.
    """

    _DECAY = 0.97
    _FIRST, _SLOPE = 1.3, 0.12
    """What is assumed before anything was measured, in units of a step with a single token: the
    cost of a step with two tokens, and the cost of each further token.
    """
    _PRIOR = ((2, 0.5), (10, 0.25))
    """How many steps the assumption (_FIRST, _SLOPE) counts for, at two numbers of tokens, as pairs
    (tokens, steps); they keep the fitted line defined.
    """
    _OUTLIER = 3.0
    """A step that takes longer than _OUTLIER times the expected seconds counts as a step of just
    that length: the thread was interrupted, or memory was allocated. If a step takes less than the
    expected seconds divided by _OUTLIER, the earlier steps were the slow ones, and are forgotten.
    """

    def __init__(self) -> None:
        """Begin without a step."""
        self._single = (0.0, 0.0)
        """Weight and seconds of steps with a single token."""
        self._several = _NOTHING
        """Weighted sums over the steps with several tokens: of 1, tokens, seconds, tokens squared,
        and tokens x seconds.
        """
        self._line = (self._FIRST, self._SLOPE)
        """The fitted line, in units of a step with a single token: the cost of two tokens, and of
        each further one.
        """

    def note(self, n_tokens: int, seconds: float) -> None:
        """Record a step that read nothing but written tokens and drafts."""
        single = self.single_seconds
        if single > 0.0:
            expected = single * self.relative(n_tokens)
            if seconds < expected / self._OUTLIER:
                self._single, self._several = (0.0, 0.0), _NOTHING
            else:
                seconds = min(seconds, self._OUTLIER * expected)
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
        """Return the expected cost of a step with n_tokens tokens, in units of a step with a single
        token; at least 1.0.
        """
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
        """Return the assumed cost of a step, in units of a step with a single token, before any was
        measured.
        """
        return 1.0 if n_tokens == 1 else cls._FIRST + cls._SLOPE * (n_tokens - 2)


def _row(n_tokens: int, seconds: float) -> _Sums:
    """Return what a step of n tokens and s seconds adds to the sums that a line is fitted to: 1, n,
    s, n squared, n x s.
    """
    return 1.0, n_tokens, seconds, n_tokens * n_tokens, n_tokens * seconds


def _sum(first: _Sums, second: _Sums, times: float = 1.0) -> _Sums:
    """Return first + times x second."""
    (a, b, c, d, e), (f, g, h, i, j) = first, second
    return a + times * f, b + times * g, c + times * h, d + times * i, e + times * j


class Outcomes:
    """Remember for each position of a text whether the draft of its token was right.

    A text that repeats a pattern differs from it in the same tokens again, such as the numbers in
    the rows of a table. So the outcome at the position from which a draft is copied tells how
    likely the draft is right.
    """

    _UNKNOWN, _RIGHT, _WRONG = 0, 1, 2
    _PRIORS = (0.7, 0.9, 0.4)
    """By outcome at the source (unknown, right, wrong), the fraction of right drafts that is
    assumed before any was seen.
    """
    _WEIGHT = 6.0
    """The weight of each prior, as a number of drafts, beside the drafts that were seen."""
    _LEAST_ROOM = 256

    def __init__(self) -> None:
        """Begin with nothing known; the table grows with the text."""
        self._of_position = np.zeros(0, np.int8)
        self._right, self._tried = np.zeros(3), np.zeros(3)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the table: up to 2 for each token."""
        return self._of_position.nbytes

    def at(self, source: int, n: int) -> npt.NDArray[np.int8]:
        """Return the outcomes at n positions from `source` on, (n,), as _UNKNOWN, _RIGHT or _WRONG;
        all are unknown if source is negative.
        """
        found = np.full(n, self._UNKNOWN, np.int8)
        if source >= 0:
            known = self._of_position[source : source + n]
            found[: len(known)] = known
        return found

    def factors(self) -> tuple[float, float, float]:
        """Return, for each outcome at the source, the factor by which this outcome multiplies the
        odds that a draft is right.
        """
        weight = self._WEIGHT
        right, tried = self._right.tolist(), self._tried.tolist()
        of_all = _odds((sum(right) + weight * self._PRIORS[0]) / (sum(tried) + weight))
        _, if_right, if_wrong = (
            _odds((n_right + weight * prior) / (n_tried + weight)) / of_all
            for n_right, n_tried, prior in zip(right, tried, self._PRIORS, strict=True)
        )
        return 1.0, if_right, if_wrong

    def note(
        self, first: int, n_right: int, n_known: int, at_sources: npt.NDArray[np.int8]
    ) -> None:
        """Record which of the drafts from position `first` on were right: the first `n_right` of
        `n_known`. `at_sources`: what at() returned when the drafts were made.
        """
        end = first + n_known
        if end > len(self._of_position):
            grown = np.zeros(max(2 * end, self._LEAST_ROOM), np.int8)
            grown[: len(self._of_position)] = self._of_position
            self._of_position = grown
        self._of_position[first : first + n_right] = self._RIGHT
        self._of_position[first + n_right : end] = self._WRONG
        self._right += np.bincount(at_sources[:n_right], minlength=3)
        self._tried += np.bincount(at_sources[:n_known], minlength=3)

    def fade(self, rate: float) -> None:
        """Multiply everything that was counted so far by `rate`."""
        self._right *= rate
        self._tried *= rate

    def truncate(self, position: int) -> None:
        """Forget the outcomes from a position on, after a rollback to it."""
        self._of_position[position:] = self._UNKNOWN


def _odds(share: float) -> float:
    """Return p / (1 - p) for p between 0.001 and 0.999."""
    bounded = min(max(share, 0.001), 0.999)
    return bounded / (1.0 - bounded)


class _Run(NamedTuple):
    """Hold drafts of which it is not known yet whether they are right."""

    first: int
    """The length of the text before the drafts."""
    drafts: Tokens
    group: int
    at_sources: npt.NDArray[np.int8]


class DraftLengths:
    """Choose how many drafts to read: as many as make the time per token least.

    For each group of evidence, the object counts how often the first draft was right, how often the
    second was where the first was right, and so on. All drafts that were made are compared with the
    text that was written, also drafts that were not read, to find out whether a longer run would
    have saved time. Drafts that are copied from the text are also counted by whether the draft at
    their source was right (Outcomes).
    """

    _PRIOR_WEIGHT = 6.0
    """The weight of a group's prior, as a number of drafts, beside the drafts that were seen."""
    _PLACE_WEIGHT = 2.0
    """The weight, as a number of drafts, of the fraction of right drafts of a whole group in the
    estimate for one place within a run.
    """
    _DECAY = 0.96
    _ANY, _LONGER = 1.05, 1.02
    """By which factor the expected tokens per second must be higher: with drafts than without, and
    with a longer run than with the best shorter one. Both factors are above 1, because estimates
    are not exact.
    """
    _RECOVERY = 0.995
    """The factor by which counts fade with every step, so that drafts that did not pay are tried
    again after a while.
    """

    def __init__(self, costs: StepCosts, most: int) -> None:
        """Choose up to `most` drafts; `costs`: the costs of the steps of all sequences."""
        self._costs = costs
        self._right = np.zeros((len(PRIORS), most))
        self._tried = np.zeros((len(PRIORS), most))
        self._outcomes = Outcomes()
        self._made: list[_Run] = []
        """The runs of drafts of which it is not known yet whether they are right."""
        self._n_seen = 0

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tables that grow with the text."""
        return self._outcomes.n_bytes

    def chances(self, evidence: Evidence) -> list[float]:
        """Return, for each draft of a run, the estimated probability that it and all drafts before
        it are right.
        """
        group, weight, place = evidence.group, self._PRIOR_WEIGHT, self._PLACE_WEIGHT
        right, tried = self._right[group].tolist(), self._tried[group].tolist()
        share = (sum(right) + weight * evidence.prior) / (sum(tried) + weight)
        outcomes = self._outcomes.at(evidence.source, len(right)).tolist()
        factors = self._outcomes.factors()
        chances, chance = [], 1.0
        for n_right, n_tried, outcome in zip(right, tried, outcomes, strict=True):
            odds = _odds((n_right + place * share) / (n_tried + place)) * factors[outcome]
            chance *= odds / (1.0 + odds)
            chances.append(chance)
        return chances

    def choose(
        self, n_drafts: int, evidence: Evidence, n_others: int = 0, cost_each: float = 0.0
    ) -> int:
        """Return how many of `n_drafts` drafts should be read, so that the expected time per token
        is least.

        `n_others`: tokens that other sequences write in the step. `cost_each`: what making one
        draft costs, in units of a step with a single token; 0.0 for drafts that are made already.
        """
        best, n_best, expected = 0.0, 0, 1.0
        for n, chance in enumerate([0.0, *self.chances(evidence)[:n_drafts]]):
            expected += chance
            cost = self._costs.relative(n_others + 1 + n) + cost_each * n
            gain = (n_others + expected) / cost
            if gain > best:
                best, n_best = gain * (self._ANY if n == 0 else self._LONGER), n
        return n_best

    def expect(self, tokens: Tokens, drafts: list[int], evidence: Evidence) -> None:
        """Record drafts of the tokens that follow a text, so that compare() can tell later whether
        they were right.
        """
        if self._made and self._made[-1].first == len(tokens):
            self._made.pop()
        at_sources = self._outcomes.at(evidence.source, len(drafts))
        run = _Run(len(tokens), np.array(drafts, np.int32), evidence.group, at_sources)
        self._made.append(run)

    def compare(self, tokens: Tokens) -> None:
        """Count which of the drafts that were made are right, by a text that has become longer.

        After a rollback, these drafts are forgotten, because another text may follow.
        """
        if len(tokens) < self._n_seen:
            self._made.clear()
            self._outcomes.truncate(len(tokens))
        self._n_seen = len(tokens)
        self._right *= self._RECOVERY
        self._tried *= self._RECOVERY
        self._outcomes.fade(self._RECOVERY)
        unknown = []
        for run in self._made:
            n = len(run.drafts)
            written = tokens[run.first : run.first + n]
            wrong = np.flatnonzero(written != run.drafts[: len(written)])
            if wrong.size:
                self._count(run, int(wrong[0]), int(wrong[0]) + 1)
            elif len(written) == n:
                self._count(run, n, n)
            else:
                unknown.append(run)
        self._made = unknown

    def _count(self, run: _Run, n_right: int, n_known: int) -> None:
        """Count the known drafts of a run; drafts after a wrong one are not counted, because they
        belong to another text.
        """
        self._right[run.group] *= self._DECAY
        self._tried[run.group] *= self._DECAY
        self._right[run.group, :n_right] += 1.0
        self._tried[run.group, :n_known] += 1.0
        self._outcomes.note(run.first, n_right, n_known, run.at_sources)


Logits = npt.NDArray[np.float32]


@dataclass
class DraftCounts:
    """Count what drafts were read, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    """Steps of written tokens, with drafts or without."""


class Drafting:
    """Guess the next tokens of one text with a drafter, as many as are expected to save time."""

    _RETRY = 16
    """After this many tokens without drafts, drafts are made once to see whether they are right
    again; each time that they still do not pay, the number doubles.
    """
    _MOST_RETRY = 1024

    def __init__(self, drafter: Drafter, costs: StepCosts, most: int) -> None:
        """Read up to `most` drafts at a time; `costs`: the costs of the steps of all sequences."""
        self._drafter = drafter
        self._costs = costs
        self._lengths = DraftLengths(costs, most)
        self._most = most
        self._evidence = Evidence(LONGEST_MATCH)
        """The evidence of the last drafts; the first value is the strongest one, so that the
        drafter is tried.
        """
        self._skipped = 0
        """For how many tokens no drafts were made, because they would not have paid."""
        self._patience = self._RETRY
        self.counts = DraftCounts()

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the drafter, and of the tables of which drafts were right."""
        return self._drafter.n_bytes + self._lengths.n_bytes

    def propose(self, tokens: Tokens, most: int, n_others: int = 0) -> list[int]:
        """Return drafts of what follows the tokens, `most` at most.

        `n_others`: tokens that other sequences write in the same step; drafts delay these, too.
        """
        most = min(most, self._most)
        self._lengths.compare(tokens)
        seconds, single = self._drafter.seconds_each, self._costs.single_seconds
        if seconds > 0.0 and single > 0.0:
            # The evidence of the last drafts is used here, because that of new drafts is not known
            # before they are made.
            most = self._lengths.choose(most, self._evidence, n_others, seconds / single)
            if most == 0:
                self._skipped += 1
                if self._skipped < self._patience:
                    return []
                most, self._patience = 1, min(2 * self._patience, self._MOST_RETRY)
            else:
                self._patience = self._RETRY
            self._skipped = 0
        drafts, evidence = self._drafter.draft(tokens, most)
        if not drafts:
            return []
        self._evidence = evidence
        self._lengths.expect(tokens, drafts, evidence)
        return drafts[: self._lengths.choose(len(drafts), evidence, n_others)]

    def close(self) -> None:
        """Free the drafter."""
        self._drafter.close()

    def note(self, n_drafts: int, n_right: int) -> None:
        """Record how many drafts were read after propose(), and how many were right."""
        self.counts.steps += 1
        if n_drafts:
            self.counts.drafted += n_drafts
            self.counts.accepted += n_right


class Verification:
    """Choose tokens by the logits of a run with drafts, as long as they are the drafts."""

    def __init__(
        self,
        drafts: Sequence[int],
        choose: Callable[[Logits], int | None],
        is_end: Callable[[int], bool],
    ) -> None:
        """Verify `drafts`: `choose` samples a token by logits, or returns None if a constraint
        allows no token; `is_end` tells whether a token ends the text.
        """
        self._drafts = drafts
        self._choose = choose
        self._is_end = is_end
        self.is_asked = False
        """Whether drafts were read, and tokens chosen."""
        self.accepted: list[int] = []
        """The drafts that are right."""
        self.next: int | None = None
        """The token that was chosen after the accepted drafts; None if none was chosen."""
        self.error: Exception | None = None
        """The error that `choose` raised, if any."""

    def verify(self, rows: Logits) -> int:
        """Return how many drafts are right, by the logits of all tokens of the run, (1 + drafts,
        n_vocab). An error of `choose` is kept in `error` until the step has ended.
        """
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
