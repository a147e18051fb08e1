"""Define what policies read from a store after a micro-batch; they change nothing in it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class StoreReadings(Protocol):
    """Define how to read measurements of the last micro-batch; the extension's headwise store does
    so.
    """

    def row_entropies(self, layer: int) -> npt.NDArray[np.float32]:
        """Return the entropies of attention rows in bits, (n_tokens, query heads).

        They are measured if OnlineBudgets.tracks_entropies is true.
        """

    def losses(self, of_held: bool = False) -> npt.NDArray[np.float64]:
        """Return losses at OnlineBudgets.knots(), a flat array [KV head of all layers][knot].

        `of_held`: only of entries that are still held, without those that were dropped before.
        """

    def count(self, layer: int, kv_head: int) -> int:
        """Return how many entries a KV head keeps."""

    def positions(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending, (n,)."""

    def importance(self, layer: int, kv_head: int) -> npt.NDArray[np.float32]:
        """Return the importance of the entries that a KV head keeps, (n,), in order of
        positions.
        """
