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


@pytest.mark.parametrize(
    ("distinct", "expected"), [(False, {9, 17}), (True, {17, 25})], ids=["", "distinct"]
)
def test_of_two_keys_that_say_the_same_the_newer_is_kept(
    distinct: bool, expected: set[int]
) -> None:
    """Tokens 9 and 17 get most attention and have the same key; 25 gets less and has its
    own key.
    """
    settings = _core.ImportanceSettings(_core.ScoreKind.attention, distinct=distinct)
    store = store_by(settings, FLOOR + 2)
    k = np.zeros((80, 1, 32), np.float32)
    k[:, 0, 2:] = np.random.default_rng(3).standard_normal((80, 30)) * 0.1
    k[[9, 17], 0] = 0.0
    k[[9, 17, 25], 0, [0, 0, 1]] = 4.0, 4.0, 3.5
    q = np.zeros_like(k)
    q[..., :2] = 1.0
    store.attend(0, q, k, k, 1.0)
    assert set(store.positions(0, 0).tolist()) - {0, 1, 2, *range(74, 80)} == expected


def test_expected_attention_follows_the_queries_to_later_positions() -> None:
    """All queries are equal except for RoPE; a key that they will point at is kept.

    One pair of values rotates by 2 pi in 100 positions: at positions 0..79, queries have pointed at
    angles of 0..0.8 turns; in the next 10 positions they will point at 0.8..0.9.
    """
    rope = _core.RopeParams(2, freq_scale=2 * np.pi / 100)
    settings = _core.ImportanceSettings(_core.ScoreKind.expected, decay=1.0, future_positions=10)
    store = store_by(settings, FLOOR + 1, ropes=[rope])
    turns = np.arange(80) / 100
    q, k = np.zeros((80, 1, 32), np.float32), np.zeros((80, 1, 32), np.float32)
    q[:, 0, 0], q[:, 0, 1] = np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)
    for position, angle in ((20, 0.2), (40, 0.4), (60, 0.85)):
        k[position, 0, :2] = 3 * np.cos(2 * np.pi * angle), 3 * np.sin(2 * np.pi * angle)
    store.attend(0, q, k, k, 1.0)
    assert 60 in store.positions(0, 0)


@pytest.mark.parametrize("ropes", [[_core.RopeParams(34)], [_core.RopeParams(3)]])
def test_rope_that_does_not_fit_is_refused(ropes: list[_core.RopeParams]) -> None:
    with pytest.raises(ValueError, match="do not fit the queries"):
        store_by(_core.ImportanceSettings(_core.ScoreKind.expected), FLOOR, ropes=ropes)


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
