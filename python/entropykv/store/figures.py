"""Compute figures that several stores have: counters, and what a cache map shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.store.protocol import Shares


def core_counters(
    core: _core.HeadwiseStore | _core.DeviceStore, hook: _core.GraphHook
) -> dict[str, Any]:
    """Return the figures for SessionStats that all stores with budgets per KV head have."""
    return {
        "kv_bytes_budget": core.budget_bytes,
        "kv_bytes_peak": core.peak_bytes,
        "kv_bytes_now": core.used_bytes,
        "kv_bytes_staging": core.staging_bytes,
        "kv_bytes_scratch": core.scratch_bytes,
        "products": hook.products,
        "products_bytes_scratch": hook.products_scratch_bytes,
        "entries_kept": core.entries,
        "evictions": core.evicted,
        "eviction_seconds": core.eviction_seconds,
    }


def held_shares(
    rows: Sequence[npt.NDArray[np.int32]], first: int, per_column: int, n_columns: int
) -> tuple[Shares, Shares, Shares]:
    """Return a cache map of kept positions, (rows, n_columns): see CacheMapFunction.

    Nothing of it is frozen or restored.
    """
    counts = []
    for positions in rows:
        columns = (positions - first) // per_column
        inside = columns[(columns >= 0) & (columns < n_columns)]
        counts.append(np.bincount(inside, minlength=n_columns))
    held = np.ceil(255 * np.array(counts) / per_column).astype(np.uint8)
    return held, np.zeros_like(held), np.zeros_like(held)
