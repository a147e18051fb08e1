"""Choose how many drafts to read: by how often they were right, and by what steps cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from entropykv.session.drafter import PRIORS, Evidence, Tokens
from entropykv.session.step_costs import StepCosts


class Outcomes:
    """Remember for each position of a text whether the draft of its token was right.

    A text that repeats a pattern differs from it in the same tokens again, such as the numbers in
    the rows of a table. So the outcome at the position from which a draft is copied tells how
    likely the draft is right.
    """

    _UNKNOWN, _RIGHT, _WRONG = 0, 1, 2
    _PRIORS = (0.7, 0.9, 0.4)
    """By outcome at the source, the share of right drafts that is expected before any was seen."""
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
        """Return the outcomes at n positions from `source` on; unknown if source is negative."""
        found = np.full(n, self._UNKNOWN, np.int8)
        if source >= 0:
            known = self._of_position[source : source + n]
            found[: len(known)] = known
        return found

    def factors(self) -> tuple[float, float, float]:
        """Return, by outcome at the source, by how much it multiplies the odds of a right draft."""
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
        `n_known`. `at_sources`: what at() returned when they were made.
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
        """Make what was counted so far count less by a factor."""
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
    """Hold drafts that are not known yet to be right."""

    first: int
    """The length of the text before the drafts."""
    drafts: Tokens
    group: int
    at_sources: npt.NDArray[np.int8]


class DraftLengths:
    """Choose how many drafts to read: as many as make the time per token least.

    It counts, for each group of evidence, how often the first draft was right, the second where the
    first was, and so on. All drafts that were made are compared with the text that was written, and
    not only those that were read; so it learns that a longer run would have paid. Where drafts are
    copied from the text, it also counts how often those were right whose source was (Outcomes).
    """

    _PRIOR_WEIGHT = 6.0
    """The weight of a group's prior, as a number of drafts, beside the drafts that were seen."""
    _PLACE_WEIGHT = 2.0
    """The weight of the share of right drafts of a whole group, as a number of drafts, in the
    estimate for one number within a run.
    """
    _DECAY = 0.96
    _ANY, _LONGER = 1.05, 1.02
    """How many times as many tokens per second must be expected: of drafts as of none, and of a
    longer run as of the best shorter one. Both are above 1, because estimates are not exact.
    """
    _RECOVERY = 0.995
    """By which counts fade with every token, so that drafts are tried again after a while."""

    def __init__(self, costs: StepCosts, most: int) -> None:
        """Choose up to `most` drafts; `costs` are those of the steps of all sequences."""
        self._costs = costs
        self._right = np.zeros((len(PRIORS), most))
        self._tried = np.zeros((len(PRIORS), most))
        self._outcomes = Outcomes()
        self._made: list[_Run] = []
        """The drafts that are not known yet to be right."""
        self._n_seen = 0

    @property
    def n_bytes(self) -> int:
        """Return the bytes that grow with the text."""
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
        """Return how many of `n_drafts` drafts pay.

        `n_others`: tokens that other sequences write in the step. `cost_each`: what making a draft
        costs, in units of a step with a single token; 0.0 for drafts that are there already.
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
        """Record drafts of what follows a text, to compare them with it later."""
        if self._made and self._made[-1].first == len(tokens):
            self._made.pop()
        at_sources = self._outcomes.at(evidence.source, len(drafts))
        run = _Run(len(tokens), np.array(drafts, np.int32), evidence.group, at_sources)
        self._made.append(run)

    def compare(self, tokens: Tokens) -> None:
        """Count which of the drafts that were made are right, by a text that has become longer.

        After a rollback they are forgotten: another text may follow now.
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
        """Count a run; drafts after a wrong one say nothing."""
        self._right[run.group] *= self._DECAY
        self._tried[run.group] *= self._DECAY
        self._right[run.group, :n_right] += 1.0
        self._tried[run.group, :n_known] += 1.0
        self._outcomes.note(run.first, n_right, n_known, run.at_sources)
