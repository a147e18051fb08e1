"""Record entries in attention, and frozen ones, as a text grew: Trajectory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

MOST_POINTS = 100_000


class Trajectory:
    """Keep the entries of all KV heads after every micro-batch, in bounded memory.

    Where there are more than `most` points, every second is left out, and from then on only every
    second, fourth, eighth micro-batch is kept.
    """

    def __init__(self, n_kv_heads: int, most: int = MOST_POINTS) -> None:
        """Begin with no points; `n_kv_heads` is the number of KV heads of all layers."""
        self.n_kv_heads = n_kv_heads
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forget all points and climbs."""
        self.positions = array("q")
        """Tokens read at each point, ascending; a full cache holds as many in every KV head."""
        self.hot = array("q")
        """Entries in attention at each point, of all KV heads."""
        self.frozen = array("q")
        """Entries in cold storage at each point, of all KV heads."""
        self.climbs: list[tuple[int, str]] = []
        """Position and rung of each climb of the recovery ladder."""
        self._stride = 1
        self._n_seen = 0

    def record(self, position: int, hot: int, frozen: int) -> None:
        """Add what is held after a micro-batch."""
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
        """Add that a rung of the recovery ladder was climbed."""
        self.climbs.append((position, rung))

    def truncate(self, position: int) -> None:
        """Forget what came after a position; climbs are what led back to it, and stay."""
        keep = len(self.positions)
        while keep and self.positions[keep - 1] > position:
            keep -= 1
        for values in self._arrays():
            del values[keep:]
        self.climbs = [(min(at, position), rung) for at, rung in self.climbs]

    def means(self) -> Iterator[tuple[int, float, float]]:
        """Yield position, and a KV head's hot and frozen entries on average."""
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
