"""The headwise store keeps the right entries, under random operations and in examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from entropykv import _core
from tests.support.attention_layers import assert_near, assert_same
from tests.support.reference import SHARE_ROUNDING, ReferenceHead, Rope, Rules
from tests.support.stores import (
    HEADS,
    LAYERS,
    MAX_ENTRIES,
    MAX_TOKENS,
    N_SINKS,
    RECENT,
    SHAPES,
    WithOracle,
    pages_of,
    store_of,
)

FLOOR = N_SINKS + RECENT
WINDOWS = ((0, False), (30, False), (40, True))
WINDOWED_LAYERS = [_core.LayerShape(*s, *w) for s, w in zip(SHAPES, WINDOWS, strict=True)]


@dataclass
class Pair(WithOracle):
    """Hold a store and the oracle of each of its heads, which do the same."""

    rules: Rules
    budgets: list[int]
    seed: int = 0
    windowed: bool = False
    position: int = 0
    largest_budget: int = 0
    store: _core.HeadwiseStore = field(init=False)
    heads: dict[tuple[int, int], ReferenceHead] = field(init=False)

    def __post_init__(self) -> None:
        """Start with an empty store and empty oracles, which have equal budgets."""
        self.random = np.random.default_rng(self.seed)
        self.store = store_of(
            self.rules,
            WINDOWED_LAYERS if self.windowed else LAYERS,
            ropes=[_core.RopeParams(**self.rules.rope._asdict())] * len(SHAPES),
        )
        if self.rules.predicts:
            self.set_predictor()
        self.heads = {
            (layer, head): ReferenceHead(
                self.rules, *SHAPES[layer][2:], budget, *self.window(layer)
            )
            for (layer, head), budget in zip(HEADS, self.budgets, strict=True)
        }
        self.set_budgets(self.budgets, 0)

    def set_predictor(self) -> None:
        """Set weights that predict shares mostly from 1e-6 to 1, the same for heads of a layer."""
        for layer, (_, n_head_kv, _, _) in enumerate(SHAPES):
            n = self.store.predictor_features(layer)
            weights = self.random.standard_normal(n, np.float32) * np.float32(0.4)
            weights[-1] = -5.0
            self.rules.weights[n] = weights.astype(np.float64)
            self.store.set_predictor(layer, np.tile(weights, (n_head_kv, 1)))

    def window(self, layer: int) -> tuple[int, bool]:
        return WINDOWS[layer] if self.windowed else (0, False)

    def set_budgets(self, budgets: list[int], spare_pages: int) -> None:
        pages = pages_of(budgets, self.rules.kv_type) + spare_pages
        self.store.set_budgets(budgets, pages, N_SINKS, RECENT)
        self.largest_budget = max(self.largest_budget, self.store.budget_bytes)
        for key, budget in zip(HEADS, budgets, strict=True):
            self.heads[key].set_budget(budget, self.store.positions(*key))
        self.check()

    def check(self) -> None:
        """Compare the store with its oracles; called after every operation."""
        for key, oracle in self.heads.items():
            assert_same(self.store.positions(*key), oracle.positions)
            assert len(oracle.positions) <= oracle.budget == self.store.budget(*key)
            if self.rules.observes or self.rules.predicts:
                expected = self.rules.score_of(oracle.importance, oracle.shares)
                rtol = self.rules.tolerance
                # A mass of 1e-4 is already small here, so the absolute tolerance is not larger.
                atol = min(rtol, 1e-4) if self.rules.observes else 1e-7
                atol = rtol if self.rules.score == "products" else atol
                assert_near(self.store.importance(*key), expected, rtol, atol)
            if self.rules.predicts:
                shares = self.store.predicted_shares(*key)
                assert_near(shares, oracle.shares, 1.1 * SHARE_ROUNDING)
        whole_from = max(oracle.whole_from for oracle in self.heads.values())
        assert self.store.windows_whole_from == whole_from
        assert self.store.entries == sum(len(oracle.positions) for oracle in self.heads.values())
        assert self.store.evicted == sum(oracle.evicted for oracle in self.heads.values())
        assert self.store.used_bytes <= self.store.budget_bytes
        assert self.store.used_bytes <= self.store.mapped_bytes
        assert self.store.used_bytes <= self.store.peak_bytes <= self.largest_budget


def store_of_one_head(
    score: _core.ScoreKind, max_entries: int, dim: int = 32, window: int = 0
) -> _core.HeadwiseStore:
    shape = _core.LayerShape(1, 1, dim, dim, window)
    importance = _core.ImportanceSettings(score, observation_window=64)
    return _core.HeadwiseStore(
        [shape], "f16", importance, N_SINKS, RECENT, 512, max_entries, n_threads=1
    )


SCORES = ("streaming", "recency", "mass")
MEASURES = ("mass", "attention", "products", "predicted")
KV_TYPES = ("f16", "q8_0", "q8_0/iq4_nl")
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
@settings(max_examples=20)
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
@settings(max_examples=20)
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
    assert store.mapped_bytes == 0  # No memory is allocated before it is needed.
    rows = np.ones((512, 1, 128), np.float32)
    for position in range(0, 16_384, 512):
        store.attend_alone(0, rows, rows, rows, 0.0, position=position)
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


def test_the_entries_with_most_attention_are_kept() -> None:
    store = store_of_one_head(_core.ScoreKind.mass, max_entries=128)
    store.set_budgets([FLOOR + 2], 1, N_SINKS, RECENT)
    k = np.zeros((80, 1, 32), np.float32)
    k[[9, 17, 60], 0, 0] = 30.0
    q = np.zeros((80, 1, 32), np.float32)
    q[..., 0] = 1.0
    store.attend_alone(0, q, k, k, 1.0)
    assert store.positions(0, 0).tolist() == [0, 1, 2, 9, 17, *range(74, 80)]
    assert store.evicted == 80 - FLOOR - 2


def store_by(settings: _core.ImportanceSettings, budget: int, **more: Any) -> _core.HeadwiseStore:
    shape = _core.LayerShape(1, 1, 32, 32)
    store = _core.HeadwiseStore([shape], "f16", settings, N_SINKS, RECENT, 512, 512, 1, **more)
    store.set_budgets([budget], 64, N_SINKS, RECENT)
    return store


@pytest.mark.parametrize(("by_values", "kept"), [(False, 9), (True, 17)])
def test_attention_to_a_small_value_counts_less_by_values(by_values: bool, kept: int) -> None:
    settings = _core.ImportanceSettings(_core.ScoreKind.attention, by_values=by_values)
    store = store_by(settings, FLOOR + 1)
    k = np.zeros((80, 1, 32), np.float32)
    k[[9, 17], 0, 0] = 4.0, 3.0
    v = np.ones((80, 1, 32), np.float32)
    v[9] = 0.01
    store.attend_alone(0, np.ones_like(k), k, v, 1.0)
    assert kept in store.positions(0, 0)


def test_decoding_evicts_for_several_tokens_at_once() -> None:
    store = store_of_one_head(_core.ScoreKind.streaming, max_entries=200)
    # An eviction makes room for a quarter of the 40 entries that are not protected.
    budget = FLOOR + 40
    store.set_budgets([budget], 8, N_SINKS, RECENT)
    row = np.ones((1, 1, 32), np.float32)
    counts = []
    for position in range(100):
        store.attend_alone(0, row, row, row, 1.0, position=position)
        counts.append(store.entries)
    assert counts[: budget + 1] == [*range(1, budget + 1), budget - 9]
    assert max(counts) == budget
    assert set(counts[budget:]) == set(range(budget - 9, budget + 1))
