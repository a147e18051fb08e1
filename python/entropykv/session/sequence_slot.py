"""Define a sequence's slot in a model runner: its text, store, weight, and whether it is live."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import cast

from entropykv.policy.division import LossCurve
from entropykv.session.kept_texts import KeptText
from entropykv.session.sequence import TokenSequence
from entropykv.store.protocol import Pooled, Store

MOST_POINTS = 100_000


class Trajectory:
    """Record the entries of all KV heads after every micro-batch, in bounded memory.

    If there are more than `most` points, every second one is removed, and from then on only every
    second (then fourth, eighth) micro-batch is recorded.
    """

    def __init__(self, n_kv_heads: int, most: int = MOST_POINTS) -> None:
        """Start without points; `n_kv_heads` is the number of KV heads of all layers."""
        self.n_kv_heads = n_kv_heads
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Remove all points and climbs."""
        self.positions = array("q")
        """The tokens read at each point, ascending; a full cache has this many entries per
        KV head.
        """
        self.hot = array("q")
        """How many entries of all KV heads were active, that is, not frozen, at each point."""
        self.frozen = array("q")
        """How many entries of all KV heads were frozen at each point."""
        self.climbs: list[tuple[int, str]] = []
        """Position and rung of each climb of the recovery ladder."""
        self._stride = 1
        self._n_seen = 0

    def record(self, position: int, hot: int, frozen: int) -> None:
        """Add a point after a micro-batch."""
        self._n_seen += 1
        if self._n_seen % self._stride != 0:
            return
        for values, value in zip(self._arrays(), (position, hot, frozen), strict=True):
            values.append(value)
        if len(self.positions) > self._most:
            self._stride *= 2
            for values in self._arrays():
                del values[::2]

    def mark(self, position: int, rung: str) -> None:
        """Add a climb of the recovery ladder."""
        self.climbs.append((position, rung))

    def truncate(self, position: int) -> None:
        """Remove points after a position; climbs that led to the rollback are kept."""
        keep = len(self.positions)
        while keep and self.positions[keep - 1] > position:
            keep -= 1
        for values in self._arrays():
            del values[keep:]
        self.climbs = [(min(at, position), rung) for at, rung in self.climbs]

    def means(self) -> Iterator[tuple[int, float, float]]:
        """Yield position, and the mean numbers of active and of frozen entries per KV head."""
        for position, hot, frozen in zip(*self._arrays(), strict=True):
            yield position, hot / self.n_kv_heads, frozen / self.n_kv_heads

    def to_json(self) -> dict[str, list[object]]:
        """Return `positions`, means per KV head of `hot` and `frozen` entries, and `climbs`."""
        rows = list(self.means())
        return {
            "positions": [position for position, _, _ in rows],
            "hot": [round(hot, 2) for _, hot, _ in rows],
            "frozen": [round(frozen, 2) for _, _, frozen in rows],
            "climbs": [list(climb) for climb in self.climbs],
        }

    def _arrays(self) -> tuple[array[int], array[int], array[int]]:
        return self.positions, self.hot, self.frozen


IDLE_SECONDS = 1.0
"""After this many seconds without reading, a sequence counts as idle, and may be swapped out."""


class SequenceSlot:
    """Hold everything that belongs to one sequence; a session is a handle on it."""

    def __init__(
        self, store: Store, weight: float, number: int, text: TokenSequence, *, live: bool
    ) -> None:
        """Start with nothing read."""
        self.store = store
        self.number = number
        """A unique number: how many slots the runner has made before."""
        self.weight = weight
        """The weight of the sequence, relative to the other sequences of the pool."""
        self.live = live
        self.gone = False
        """True once the session of the slot is closed; then nothing more can be read."""
        self.swapped: KeptText | None = None
        """The text that is kept of the sequence while it is swapped out; None while it is live or
        empty.
        """
        self.text = text
        """The text that was read; loading and forking replace it."""
        self.trajectory: Trajectory | None = None
        """How many entries were held as the text grew; None unless entries are frozen."""
        self.broken = False
        """True while a decode of the sequence runs, and if the last decode has failed half-way."""
        self.half_read = False
        """True if the last step has failed half-way, so that its store may hold entries beyond
        `position`.
        """
        self.writes = False
        """True if the latest tokens were written one by one, and are not a prompt."""
        self.position = 0
        """How many tokens had been read at the end of the last step."""
        self.expected = 0
        """The length in tokens that its text is expected to reach at least; pages that this length
        does not need go to other sequences.
        """
        self.shared_for = 0
        """The length of text that the current shares have room for, or were planned with."""
        self.loss_curve: LossCurve | None = None
        """The loss curve that the current shares of the pool are based on; None if there
        is none.
        """
        self.rests = False
        """True if Session.rest() has said that no token follows soon."""
        self.last_step = 0.0
        self.n_others = 0
        """How many other sequences wrote a token in its last step."""
        self.inherited = 0
        """How many entries had been evicted from the sequence that it was copied from."""
        self.given_up = 0
        """How many entries were evicted because its share shrank for others."""

    @property
    def evicted(self) -> int:
        """Return how many entries were evicted, without those of the sequence it was
        copied from.
        """
        return self.store.evicted - self.inherited

    def mend(self) -> None:
        """Record that the text and the store of the sequence agree again, after a load or
        a copy.
        """
        self.broken = self.half_read = False

    def note_evictions(self) -> None:
        """Record in the text where it ended at the last eviction."""
        self.text.note_evictions(self.store.evicted)

    def is_idle(self, now: float) -> bool:
        """Tell whether it can be swapped out without delaying a thread."""
        return self.live and (self.rests or now - self.last_step > IDLE_SECONDS)

    @property
    def pooled(self) -> Pooled:
        """Return the store by its interface for pools; only for stores that can share a pool."""
        return cast(Pooled, self.store.pooled)

    @property
    def measured_curve(self) -> LossCurve | None:
        """Return how much the text would lose with fewer pages; None if that was not measured."""
        return None if self.store.sharing is None else self.store.sharing.loss_curve()
