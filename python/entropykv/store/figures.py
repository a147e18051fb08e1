"""Compute the figures that stores with budgets per KV head have."""

from __future__ import annotations

from typing import Any

from entropykv import _core


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
