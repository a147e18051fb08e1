"""Define a KV head that freezes the entries that it does not keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.reference.attending import Attention, Options
from tests.support.reference.heads import ReferenceHead, Schedule
from tests.support.reference.ranking import entries_to_keep
from tests.support.reference.values import Bools, Floats


class Undecided(Exception):  # noqa: N818
    """Raised if a value is so close to the limit of detection that rounding decides."""


@dataclass
class Detections:
    """Count the detections of one entry in windows of `history` positions; 0: a single window."""

    history: int
    counts: dict[int, int] = field(default_factory=dict)

    def detect(self, now: int) -> int:
        """Count one more detection at position `now`; return the count.

        The previous window counts in proportion to its overlap with a window that ends at `now`.
        """
        if self.history == 0:
            self.counts[0] = self.counts.get(0, 0) + 1
            return self.counts[0]
        number, elapsed = divmod(now, self.history)
        last = max(self.counts, default=0)
        if number < last:  # The text was rolled back, so later detections never happened.
            self.counts = {}
        self.counts[number] = self.counts.get(number, 0) + 1
        before = self.counts.get(number - 1, 0)
        return self.counts[number] + before * (self.history - 1 - elapsed) // self.history


@dataclass
class FrozenEntry:
    """Hold a frozen entry; `due`: the position of the text at which it is restored; None: it has no
    timer.
    """

    k: Floats
    v: Floats
    importance: float
    share: float
    frozen_at: int
    due: int | None = None


@dataclass
class FreezingHead(ReferenceHead):
    """Freeze instead of evicting. Recall is off, and cold storage has no limit."""

    frozen: dict[int, FrozenEntry] = field(default_factory=dict)
    """The frozen entries by position."""
    detections: dict[int, Detections] = field(default_factory=dict)
    """The detections of active and of frozen entries by position."""

    def read(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        first_position: int,
        options: Options,
    ) -> Attention:
        """Read as a head without freezing, and record for settle() what queries gave to entries."""
        self.n_stored = len(self.positions)
        result = super().read(q, k, v, first_position, options)
        self.given = result.observed[-self.rules.observation_window :]
        self.group = q.shape[1]
        self.newest = first_position + len(q) - 1
        return result

    def settle(self, n_new: int, theirs: Sequence[int] | npt.NDArray[Any]) -> None:
        """Freeze detected entries, then those beyond the budget; restore entries that are due."""
        if self.rules.schedule and self.rules.observes:
            self._freeze_detected(self.rules.schedule)
        if len(self.positions) > self.budget:
            sinks, recent = self.rules.n_sinks, self.recent_window
            self._evict(entries_to_keep(self.budget, n_new, sinks, recent), theirs)
        if self.rules.schedule:
            due = [p for p, e in self.frozen.items() if e.due is not None and e.due <= self.newest]
            self._restore(due, self.newest, theirs)
        np.testing.assert_array_equal(theirs, self.positions)

    def freeze_all(self, now: int) -> None:
        """Freeze all held entries."""
        self._freeze(np.ones(len(self.positions), bool), now)

    def restore(
        self,
        now: int,
        theirs: Sequence[int] | npt.NDArray[Any],
        frozen_after: int = -1,
        due_after: int = -1,
        *,
        forget: bool = False,
    ) -> int:
        """Restore the entries frozen after `frozen_after` and due after `due_after` (or never), as
        far as the budget has room; returns how many. `theirs`: the store's positions afterwards;
        `forget`: drop the detections.
        """
        if forget:
            self.detections = {}
        wanted = [
            position
            for position, entry in self.frozen.items()
            if entry.frozen_at > frozen_after and (entry.due is None or entry.due > due_after)
        ]
        n = self._restore(wanted, now, theirs)
        np.testing.assert_array_equal(theirs, self.positions)
        return n

    def truncate(self, position: int) -> None:
        """Forget what was read from `position` on; timers continue as if that was never read."""
        super().truncate(position)
        now = position - 1
        self.detections = {p: d for p, d in self.detections.items() if p < position}
        self.frozen = {p: entry for p, entry in self.frozen.items() if p < position}
        for entry in self.frozen.values():
            if entry.frozen_at > now:
                if entry.due is not None:
                    entry.due -= entry.frozen_at - now
                entry.frozen_at = now

    def _freeze_detected(self, schedule: Schedule) -> None:
        """Freeze stored entries outside the window that get less than `threshold` times an even
        share of attention, or |q.k| below it. Raises Undecided if rounding decides.
        """
        means = self.given.mean(axis=0) / self.group
        limit = schedule.threshold
        if self.rules.score != "products":
            limit = schedule.threshold / max(self.n_stored, 1)
            limit = limit**2 if self.rules.score == "mass" else limit
        timers = {}
        for i in range(self.n_stored):
            position = int(self.positions[i])
            if position < self.rules.n_sinks or position > self.newest - schedule.window:
                continue
            if abs(means[i] - limit) <= 1e-4 * limit:
                raise Undecided
            if means[i] < limit:
                known = self.detections.setdefault(position, Detections(schedule.history))
                steps = int(np.sqrt(known.detect(self.newest)) / schedule.rate)
                if steps > 0:
                    timers[position] = self.newest + steps
        self._freeze(np.isin(self.positions, list(timers)), self.newest, timers)

    def _let_go(self, kept: Bools, newest: int) -> None:
        self._freeze(~kept, newest)

    def _freeze(self, chosen: Bools, now: int, timers: dict[int, int] | None = None) -> None:
        for i in np.flatnonzero(chosen):
            position = int(self.positions[i])
            due = (timers or {}).get(position)
            scores = float(self.importance[i]), float(self.shares[i])
            self.frozen[position] = FrozenEntry(self.k[i], self.v[i], *scores, now, due)
        self._keep(~chosen)

    def _restore(
        self, wanted: Sequence[int], now: int, theirs: Sequence[int] | npt.NDArray[Any]
    ) -> int:
        """Restore all wanted entries; if not all fit, those that the store (`theirs`) chose."""
        room = self.budget - len(self.positions)
        if len(wanted) > room:
            wanted = [p for p in wanted if p in set(np.asarray(theirs).tolist())]
            assert len(wanted) == max(room, 0)
        for position in wanted:
            entry = self.frozen.pop(position)
            decay = self.rules.decay
            left = decay ** (now - entry.frozen_at) if decay > 0.0 else 0.0
            self.positions = np.append(self.positions, position)
            self.k = np.concatenate([self.k, entry.k[None]])
            self.v = np.concatenate([self.v, entry.v[None]])
            self.importance = np.append(self.importance, entry.importance * left)
            self.shares = np.append(self.shares, entry.share)
        order = np.argsort(self.positions)
        self.positions, self.importance = self.positions[order], self.importance[order]
        self.k, self.v, self.shares = self.k[order], self.v[order], self.shares[order]
        return len(wanted)
