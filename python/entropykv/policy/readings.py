"""Name what policies read of a store after a micro-batch; they change nothing of it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class StoreReadings(Protocol):
    """Read what the last micro-batch has shown; the headwise store of the extension has this."""

    def row_entropies(self, layer: int) -> npt.NDArray[np.float32]:
        """Return the entropies of attention rows in bits, (n_tokens, query heads).

        They are measured where OnlineBudgets.tracks_entropies asks for it.
        """

    def losses(self, of_held: bool = False) -> npt.NDArray[np.float64]:
        """Return losses at OnlineBudgets.knots(), [KV head of all layers][knot] in a row.

        `of_held`: of the entries that are held alone, without those that were dropped before.
        """

    def positions(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending, (n,)."""

    def importance(self, layer: int, kv_head: int) -> npt.NDArray[np.float32]:
        """Return the importance of those entries, (n,)."""
