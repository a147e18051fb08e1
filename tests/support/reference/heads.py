"""Define a KV head that keeps as many entries as its budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.reference.attending import (
    NEIGHBOURHOOD,
    SCORING_INTERVAL,
    WINDOW_MARGIN,
    Attention,
    Options,
    attend_kv_head,
    oldest_seen,
)
from tests.support.reference.dropped import DroppedScores
from tests.support.reference.predicting import SHARE_ROUNDING, features, predicted
from tests.support.reference.ranking import (
    entries_to_keep,
    protected,
    recency_score,
    select_survivors,
    updated_importance,
)
from tests.support.reference.rope import Rope
from tests.support.reference.values import Bools, Floats, Ints, stored, stored_values


class Schedule(NamedTuple):
    """Hold the settings of section 3 of Metinov et al., named as in cpp/decide/freezing.hpp."""

    window: int = 32
    threshold: float = 1.0
    rate: float = 2.0
    history: int = 0


@dataclass
class Rules:
    """Hold the settings that all KV heads of a store have in common."""

    score: str
    """The policy streaming or recency, `predicted`, or a measure of given()."""
    kv_type: str = "f16"
    n_sinks: int = 4
    recent_window: int = 8
    variation: float = 0.0
    decay: float = 0.0
    observation_window: int = 64
    by_values: bool = False
    rope: Rope = field(default_factory=lambda: Rope(0))
    own_windows: bool = False
    """True if sinks and recent window of a KV head take at most half of its own budget."""
    weights: dict[int, Floats] = field(default_factory=dict)
    """The weights of the linear functions that predict shares, by the number of features."""
    expected_lookups: float = 0.0
    """The weight of predictions relative to what queries gave; 0: nothing is predicted."""
    schedule: Schedule | None = None
    """The freeze schedule; with one, the queries of every step give importance to all entries, also
    to their neighbours. None: there is none.
    """

    @property
    def observes(self) -> bool:
        """Tell whether queries give importance to entries."""
        return self.score in ("mass", "attention", "products")

    @property
    def predicts(self) -> bool:
        """Tell whether the score of an entry depends on a prediction from its key and value."""
        return self.score == "predicted" or self.expected_lookups > 0.0

    @property
    def tolerance(self) -> float:
        """Return the relative tolerance of scores.

        For q8_0, the store rounds the query to 16-bit integers. Predicted values are rounded, too,
        and may be squared and multiplied by the norm of a value.
        """
        if self.predicts:
            return 4 * SHARE_ROUNDING
        if self.kv_type != "f16":
            return 2e-3 if self.score == "products" else 1e-3
        return 1e-4

    def score_of(self, given: Floats, shares: Floats) -> Floats:
        """Return the scores, from what queries gave to entries and the predicted shares."""
        if self.score == "predicted":
            return shares
        return given + self.expected_lookups * shares ** (2 if self.score == "mass" else 1)


@dataclass
class ReferenceHead:
    """Hold the entries that one KV head keeps, ordered by position."""

    rules: Rules
    k_dim: int
    v_dim: int
    budget: int
    window: int = 0
    chunked: bool = False
    whole_from: int = 0
    """The first position whose query still sees every entry of its window."""
    positions: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    k: Floats = field(init=False)
    v: Floats = field(init=False)
    importance: Floats = field(default_factory=lambda: np.zeros(0))
    """What queries gave to each entry; it decays."""
    shares: Floats = field(default_factory=lambda: np.zeros(0))
    """The predicted share of each entry; it does not change."""
    evicted: int = 0

    def __post_init__(self) -> None:
        """Start empty."""
        self.k, self.v = np.zeros((0, self.k_dim)), np.zeros((0, self.v_dim))
        self.dropped = DroppedScores()

    def read(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        first_position: int,
        options: Options,
    ) -> Attention:
        """Attend to a micro-batch and update the importance; nothing is evicted yet."""
        result = self.attend(q, k, v, first_position, options)
        self.give(result.observed, first_position)
        return result

    @property
    def recent_window(self) -> int:
        """Return the number of newest entries that are protected from eviction."""
        if not self.rules.own_windows:
            return self.rules.recent_window
        return min(max(self.budget // 2 - self.rules.n_sinks, 1), self.rules.recent_window)

    def attend(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        first_position: int,
        options: Options,
    ) -> Attention:
        """Attend to a micro-batch (q [n][group][k_dim], k [n][k_dim]), and hold all its entries."""
        self.positions = np.append(self.positions, first_position + np.arange(len(k)))
        self.k = np.concatenate([self.k, stored(k, self.rules.kv_type)])
        self.v = np.concatenate([self.v, stored_values(v, self.rules.kv_type)])
        rules = self.rules
        shares = np.zeros(len(k))
        if rules.predicts:
            told = features(k, v, first_position + np.arange(len(k)), rules.rope)
            shares = predicted(told, rules.weights[told.shape[1]])
        self.importance = np.append(self.importance, np.zeros(len(k)))
        self.shares = np.append(self.shares, shares)
        measure = rules.score if rules.observes else "mass"
        rows = (q, self.k, self.v, self.positions, first_position)
        neighbourhood = 0 if rules.schedule else NEIGHBOURHOOD
        return attend_kv_head(*rows, options, measure, neighbourhood)

    def give(self, observed: Floats, first_position: int) -> None:
        """Add what the queries of a micro-batch at `first_position` gave: [n][T]."""
        rules = self.rules
        if rules.observes:
            interval = 1 if rules.schedule else SCORING_INTERVAL
            single = len(observed) == 1
            if not single or first_position % interval == 0:
                self.dropped.decay(rules.decay ** (interval if single else len(observed)))
            self.importance = updated_importance(
                self.importance,
                observed,
                rules.decay,
                rules.observation_window,
                first_position,
                interval=interval,
            )

    def losses(self, knots: Sequence[int], outputs: Floats, *, of_held: bool = False) -> Floats:
        """Return the losses of dropping all but k of the unprotected entries, for every k in
        `knots`.

        Entries that were dropped before count, too, unless `of_held`: with more room they would
        have been kept. For mass+values, which squares outputs, losses are relative to the outputs
        [n][group][v_dim] of the micro-batch.
        """
        rules, newest = self.rules, int(self.positions.max())
        free = ~protected(self.positions, newest, rules.n_sinks, self.recent_window)
        free &= self.positions >= oldest_seen(newest + 1, self.window, self.chunked)
        scores = self.scores()[free]
        if not of_held:
            scores = np.append(scores, self.dropped.scores())
        losses = losses_at(scores, knots)
        squares = rules.score == "mass" and rules.by_values
        return losses / (outputs**2).sum() if squares else losses

    def settle(self, n_new: int, theirs: Sequence[int] | npt.NDArray[Any]) -> None:
        """Evict after a micro-batch of n_new tokens; where scores are nearly equal, the store's
        positions `theirs` are accepted.
        """
        if len(self.positions) > self.budget:
            self._leave_window(0 if self.chunked else WINDOW_MARGIN)
        if len(self.positions) > self.budget:
            sinks, recent = self.rules.n_sinks, self.recent_window
            self._evict(entries_to_keep(self.budget, n_new, sinks, recent), theirs)
        np.testing.assert_array_equal(theirs, self.positions)

    def set_budget(self, budget: int, theirs: Sequence[int] | npt.NDArray[Any]) -> None:
        """Evict down to another budget; where scores are nearly equal, the store's positions
        `theirs` are accepted.
        """
        self.budget = budget
        if len(self.positions) > budget:
            self._leave_window(0)
        if len(self.positions) > budget:
            self._evict(budget, theirs)
        np.testing.assert_array_equal(theirs, self.positions)

    def truncate(self, position: int) -> None:
        """Drop the entries from `position` on."""
        self._keep(self.positions < position)
        self.whole_from = min(self.whole_from, position)
        if position == 0:
            self.dropped = DroppedScores()

    def scores(self) -> Floats:
        """Return the score of every entry; higher scores stay longer."""
        rules, newest = self.rules, int(self.positions.max())
        if rules.score == "streaming":
            return 1.0 / (1.0 + newest - self.positions.astype(np.float64))
        if rules.score == "recency":
            return np.array(
                [recency_score(int(p), newest, rules.variation) for p in self.positions]
            )
        scores = rules.score_of(self.importance, self.shares).copy()
        if rules.by_values:
            norms = np.sqrt((self.v**2).sum(axis=1))
            scores *= norms**2 if rules.score == "mass" else norms
        return scores

    def _evict(self, keep: int, theirs: Sequence[int] | npt.NDArray[Any]) -> None:
        """Keep the survivors; among nearly equal scores, those that the store (`theirs`) chose."""
        scores, newest = self.scores(), int(self.positions.max())
        n_sinks, recent = self.rules.n_sinks, self.recent_window
        ours = select_survivors(scores, self.positions, keep, n_sinks, recent, newest)
        chosen = np.isin(self.positions, theirs)
        free = ~protected(self.positions, newest, n_sinks, recent)
        if (ours != chosen).any() and ours.sum() == chosen.sum() and (ours & free).any():
            threshold = scores[ours & free].min()
            nearly_equal = np.isclose(scores, threshold, rtol=self.rules.tolerance, atol=1e-6)
            if nearly_equal[ours != chosen].all():
                ours = chosen
        self.dropped.add(scores[~ours])
        self._let_go(ours, newest)

    def _let_go(self, kept: Bools, newest: int) -> None:  # noqa: ARG002
        self.evicted += int((~kept).sum())
        self._keep(kept)

    def _leave_window(self, margin: int) -> None:
        """Drop entries that no later query sees, but not `margin` positions if there is room."""
        newest = int(self.positions.max())
        oldest = oldest_seen(newest + 1, self.window, self.chunked)
        if (self.positions >= oldest - margin).sum() <= self.budget:
            oldest -= margin
        stays = self.positions >= oldest
        gone = self.positions[~stays]
        if gone.size:
            query = int(gone.max())
            while oldest_seen(query, self.window, self.chunked) <= gone.max():
                query += 1
            self.whole_from = max(self.whole_from, query)
        self._keep(stays)

    def _keep(self, kept: Bools) -> None:
        self.positions, self.importance = self.positions[kept], self.importance[kept]
        self.k, self.v, self.shares = self.k[kept], self.v[kept], self.shares[kept]


def losses_at(scores: Floats, knots: Sequence[int]) -> Floats:
    """Return the sum of all but the k largest scores, for every k in `knots`: (knots,)."""
    ascending = np.sort(scores)
    return np.array([ascending[: max(len(scores) - k, 0)].sum() for k in knots])
