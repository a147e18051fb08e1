"""The headwise store keeps the right entries with each measure, in examples computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entropykv import _core
from tests.support.store_pairs import FLOOR, store_of_one_head
from tests.support.stores import (
    N_SINKS,
    RECENT,
)


def test_the_entries_with_most_attention_are_kept() -> None:
    """Queries point at the keys of two early tokens, which are kept; their neighbours are not."""
    store = store_of_one_head(_core.ScoreKind.mass, max_entries=128)
    store.set_budgets([FLOOR + 2], 1, N_SINKS, RECENT)
    k = np.zeros((80, 1, 32), np.float32)
    k[[9, 17, 60], 0, 0] = 30.0
    q = np.zeros((80, 1, 32), np.float32)
    q[..., 0] = 1.0
    store.attend(0, q, k, k, 1.0)
    assert store.positions(0, 0).tolist() == [0, 1, 2, 9, 17, *range(74, 80)]
    assert store.evicted == 80 - FLOOR - 2


def store_by(settings: _core.ImportanceSettings, budget: int, **more: Any) -> _core.HeadwiseStore:
    shape = _core.LayerShape(1, 1, 32, 32)
    store = _core.HeadwiseStore([shape], "f16", settings, N_SINKS, RECENT, 512, 512, 1, **more)
    store.set_budgets([budget], 64, N_SINKS, RECENT)
    return store


@pytest.mark.parametrize(("by_values", "kept"), [(False, 9), (True, 17)])
def test_attention_to_a_small_value_counts_less_by_values(by_values: bool, kept: int) -> None:
    """Token 9 gets more attention than token 17, but its value is nearly zero."""
    settings = _core.ImportanceSettings(_core.ScoreKind.attention, by_values=by_values)
    store = store_by(settings, FLOOR + 1)
    k = np.zeros((80, 1, 32), np.float32)
    k[[9, 17], 0, 0] = 4.0, 3.0
    v = np.ones((80, 1, 32), np.float32)
    v[9] = 0.01
    store.attend(0, np.ones_like(k), k, v, 1.0)
    assert kept in store.positions(0, 0)


def test_decoding_evicts_for_several_tokens_at_once() -> None:
    store = store_of_one_head(_core.ScoreKind.streaming, max_entries=200)
    budget = FLOOR + 40  # One eviction makes room for a quarter of 40.
    store.set_budgets([budget], 8, N_SINKS, RECENT)
    row = np.ones((1, 1, 32), np.float32)
    counts = []
    for position in range(100):
        store.attend(0, row, row, row, 1.0, position=position)
        counts.append(store.entries)
    assert counts[: budget + 1] == [*range(1, budget + 1), budget - 9]
    assert max(counts) == budget
    assert set(counts[budget:]) == set(range(budget - 9, budget + 1))
