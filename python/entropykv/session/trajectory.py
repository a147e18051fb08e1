"""Record the numbers of active and of frozen entries while a text grows: Trajectory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

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
        """The active entries of all KV heads at each point."""
        self.frozen = array("q")
        """The frozen entries of all KV heads at each point."""
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
