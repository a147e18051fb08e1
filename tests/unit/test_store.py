"""The headwise store under random operations: what it keeps, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from entropykv import _core
from tests.support.reference import Rope, Rules
from tests.support.store_pairs import FLOOR, Pair, store_of_one_head
from tests.support.stores import (
    HEADS,
    LAYERS,
    MAX_ENTRIES,
    MAX_TOKENS,
    N_SINKS,
    RECENT,
    pages_of,
)

SCORES = ("streaming", "recency", "mass")
MEASURES = ("mass", "attention", "products", "predicted")
KV_TYPES = ("f16", "q8_0")
ROPES = (Rope(0), Rope(16), Rope(12, offset=2, neox=True, freq_base=100.0))
budget_lists = st.lists(st.integers(FLOOR, 160), min_size=len(HEADS), max_size=len(HEADS))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("attend"), st.integers(1, MAX_TOKENS)),
        st.tuples(st.just("decode"), st.integers(1, 20)),
        st.tuples(st.just("set_budgets"), budget_lists, st.integers(0, 3)),
        st.tuples(st.just("truncate"), st.floats(0.0, 1.0)),
    ),
    min_size=1,
    max_size=9,
)


def perform(pair: Pair, operation: tuple[Any, ...]) -> None:
    match operation:
        case ("attend", n_tokens):
            pair.attend(n_tokens)
        case ("decode", n_steps):
            for _ in range(n_steps):
                pair.attend(1)
        case ("set_budgets", budgets, spare_pages):
            pair.set_budgets(budgets, spare_pages)
        case ("truncate", fraction):
            pair.truncate(round(fraction * pair.position))


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("score", SCORES)
@settings(max_examples=150)
@given(
    budgets=budget_lists,
    todo=operations,
    variation=st.sampled_from([0.0, 0.7]),
    decay=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    observation_window=st.sampled_from([1, 16, 128]),
    seed=st.integers(0, 2**32 - 1),
    windowed=st.booleans(),
)
def test_random_operations_keep_what_the_oracle_keeps(
    score: str,
    kv_type: str,
    budgets: list[int],
    todo: list[tuple[Any, ...]],
    variation: float,
    decay: float,
    observation_window: int,
    seed: int,
    windowed: bool,
) -> None:
    rules = Rules(score, kv_type, N_SINKS, RECENT, variation, decay, observation_window)
    pair = Pair(rules, budgets, seed, windowed)
    for operation in todo:
        perform(pair, operation)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("measure", MEASURES)
@settings(max_examples=40)
@given(
    budgets=budget_lists,
    todo=operations,
    decay=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    observation_window=st.sampled_from([16, 128]),
    by_values=st.booleans(),
    rope=st.sampled_from(ROPES),
    expected_lookups=st.sampled_from([0.0, 0.0, 0.5, 4.0]),
    seed=st.integers(0, 2**32 - 1),
)
@example(
    budgets=[40] * 6,
    todo=[("attend", 96), ("decode", 20)],
    decay=0.9,
    observation_window=16,
    by_values=True,
    rope=ROPES[1],
    expected_lookups=4.0,
    seed=1,
)
def test_every_measure_and_modifier_keeps_what_the_oracle_keeps(
    measure: str,
    kv_type: str,
    budgets: list[int],
    todo: list[tuple[Any, ...]],
    decay: float,
    observation_window: int,
    by_values: bool,
    rope: Rope,
    expected_lookups: float,
    seed: int,
) -> None:
    if measure not in ("mass", "attention"):
        expected_lookups = 0.0
    rules = Rules(
        measure,
        kv_type,
        N_SINKS,
        RECENT,
        decay=decay,
        observation_window=observation_window,
        by_values=by_values,
        rope=rope,
        expected_lookups=expected_lookups,
    )
    pair = Pair(rules, budgets, seed)
    for operation in todo:
        perform(pair, operation)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("batches", [[1] * 120, [96, 96, 96], [50, 1, 7, 1, 1, 90]])
def test_sinks_and_recent_window_survive_every_eviction(score: str, batches: list[int]) -> None:
    pair = Pair(Rules(score, "q8_0", N_SINKS, RECENT), [FLOOR + 3 * i for i in range(len(HEADS))])
    for n_tokens in batches:
        pair.attend(n_tokens)
        kept = {key: set(pair.store.positions(*key).tolist()) for key in HEADS}
        newest = set(range(max(pair.position - RECENT, 0), pair.position))
        oldest = set(range(min(N_SINKS, pair.position)))
        assert all(oldest | newest <= positions for positions in kept.values())
    assert pair.store.evicted > 0


def test_memory_goes_back_after_a_large_shrink() -> None:
    store = store_of_one_head(_core.ScoreKind.streaming, max_entries=20_000, dim=128)
    shape = _core.LayerShape(1, 1, 128, 128)
    page_bytes, (per_page,) = _core.page_geometry([shape], "f16")
    pages = _core.pages_for(20_000, per_page)
    store.set_budgets([20_000], pages, N_SINKS, RECENT)
    assert store.mapped_bytes == 0  # No memory is used before it is needed.
    rows = np.ones((512, 1, 128), np.float32)
    for position in range(0, 16_384, 512):
        store.attend(0, rows, rows, rows, 0.0, position=position)
    full = store.mapped_bytes
    assert full >= 16_384 * 512 > 3 * 2**20
    store.set_budgets([1000], _core.pages_for(1000, per_page), N_SINKS, RECENT)
    assert store.entries == 1000
    assert store.mapped_bytes <= 2 * 2**20 < full
    assert store.budget_bytes == _core.pages_for(1000, per_page) * page_bytes
    expected = [*range(N_SINKS), *range(16_384 - 1000 + N_SINKS, 16_384)]
    assert store.positions(0, 0).tolist() == expected


@pytest.mark.parametrize(
    ("budgets", "spare_pages", "message"),
    [
        ([20] * 5, 0, "too few budgets"),
        ([20] * 7, 0, "too many budgets"),
        ([20] * 6, -1, "the budgets exceed the pool"),
        ([20] * 5 + [FLOOR - 1], 0, "below sinks"),
        ([20] * 5 + [MAX_ENTRIES + 1], 0, "outside of 1 .. max_entries"),
        ([0] + [20] * 5, 0, "outside of 1 .. max_entries"),
        ([-5] + [20] * 5, 0, "outside of 1 .. max_entries"),
    ],
)
def test_impossible_budgets_are_refused_and_change_nothing(
    budgets: list[int], spare_pages: int, message: str
) -> None:
    pair = Pair(Rules("mass", "f16", N_SINKS, RECENT), [30] * 6)
    pair.attend(25)
    pages = pages_of([*budgets, 20][:6], "f16") + spare_pages
    with pytest.raises(ValueError, match=message):
        pair.store.set_budgets(budgets, pages, N_SINKS, RECENT)
    pair.check()
    pair.attend(60)


@pytest.mark.parametrize("n_tokens", [0, -1, MAX_TOKENS + 1])
def test_a_micro_batch_of_impossible_length_is_refused(n_tokens: int) -> None:
    pair = Pair(Rules("mass", "f16", N_SINKS, RECENT), [30] * 6)
    with pytest.raises(ValueError, match=r"outside of 1 \.\. max_tokens"):
        pair.store.begin(n_tokens, 0, 0)


def test_pages_of_every_layer_have_the_same_bytes() -> None:
    """A layer with smaller entries has more groups of 16 in a page; the largest layer has one."""
    page_bytes, per_page = _core.page_geometry(LAYERS, "f16")
    assert min(per_page) == per_page[1] == 16
    sizes = [2 * (32 + 32) + 8, 2 * (48 + 64) + 8, 2 * (16 + 32) + 8]
    for entries, size in zip(per_page, sizes, strict=True):
        assert entries * size <= page_bytes < (entries + 16) * size + 4 * 64
    alone, (entries,) = _core.page_geometry([LAYERS[2]], "q8_0")
    assert entries == 16
    assert alone < page_bytes
