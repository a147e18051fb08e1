"""The headwise store under random operations: what it keeps, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from entropykv import _core
from tests.support.reference import Options, ReferenceHead, Rope, Rules
from tests.support.stores import (
    HEADS,
    LAYERS,
    MAX_ENTRIES,
    MAX_TOKENS,
    N_SINKS,
    RECENT,
    SHAPES,
    importance_of,
    pages_of,
)

FLOOR = N_SINKS + RECENT

WINDOWS = ((0, False), (30, False), (40, True))
WINDOWED_LAYERS = [_core.LayerShape(*s, *w) for s, w in zip(SHAPES, WINDOWS, strict=True)]

SCORES = ("streaming", "recency", "mass")
MEASURES = ("mass", "attention", "products", "expected")
KV_TYPES = ("f16", "q8_0")
ROPES = (Rope(0), Rope(16), Rope(12, offset=2, neox=True, freq_base=100.0))


@dataclass
class Pair:
    """A store and the oracle of each of its heads, doing the same."""

    rules: Rules
    budgets: list[int]
    seed: int = 0
    windowed: bool = False
    position: int = 0
    largest_budget: int = 0
    store: _core.HeadwiseStore = field(init=False)
    heads: dict[tuple[int, int], ReferenceHead] = field(init=False)

    def __post_init__(self) -> None:
        """Both empty, with the same budgets."""
        self.random = np.random.default_rng(self.seed)
        self.store = _core.HeadwiseStore(
            WINDOWED_LAYERS if self.windowed else LAYERS,
            self.rules.kv_type,
            importance_of(self.rules),
            n_sinks=N_SINKS,
            recent_window=RECENT,
            max_tokens=MAX_TOKENS,
            max_entries=MAX_ENTRIES,
            n_threads=1,
            ropes=[_core.RopeParams(**self.rules.rope._asdict())] * len(SHAPES),
        )
        self.heads = {
            (layer, head): ReferenceHead(
                self.rules, *SHAPES[layer][2:], budget, *self.window(layer)
            )
            for (layer, head), budget in zip(HEADS, self.budgets, strict=True)
        }
        self.set_budgets(self.budgets, 0)

    def window(self, layer: int) -> tuple[int, bool]:
        return WINDOWS[layer] if self.windowed else (0, False)

    def set_budgets(self, budgets: list[int], spare_pages: int) -> None:
        pages = pages_of(budgets, self.rules.kv_type) + spare_pages
        self.store.set_budgets(budgets, pages, N_SINKS, RECENT)
        self.largest_budget = max(self.largest_budget, self.store.budget_bytes)
        for key, budget in zip(HEADS, budgets, strict=True):
            self.heads[key].set_budget(budget, self.store.positions(*key))
        self.check()

    def attend(self, n_tokens: int) -> None:
        """A micro-batch through all layers; outputs show that K and V moved with their entries."""
        n_tokens = min(n_tokens, MAX_ENTRIES - self.position)
        if n_tokens == 0:
            return
        for layer in range(len(SHAPES)):
            self.attend_layer(layer, n_tokens)
        self.position += n_tokens
        self.check()

    def attend_layer(self, layer: int, n_tokens: int) -> None:
        n_head, n_head_kv, k_dim, v_dim = SHAPES[layer]
        normal = self.random.standard_normal
        q = normal((n_tokens, n_head, k_dim), np.float32) * 2
        k = self.keys(n_tokens, n_head_kv, k_dim)
        v = normal((n_tokens, n_head_kv, v_dim), np.float32)
        window, chunked = self.window(layer)
        options = Options(k_dim**-0.5, window=window, chunked=chunked)
        output = self.store.attend(layer, q, k, v, options.scale, position=self.position)
        group = n_head // n_head_kv
        for head in range(n_head_kv):
            heads = slice(head * group, (head + 1) * group)
            oracle = self.heads[layer, head]
            expected = oracle.read(q[:, heads], k[:, head], v[:, head], self.position, options)
            atol = 2e-5 if self.rules.kv_type == "f16" else 2e-3  # as in test_attention.py
            np.testing.assert_allclose(output[:, heads], expected.outputs, rtol=0, atol=atol)
            oracle.settle(n_tokens, self.store.positions(layer, head))

    def keys(self, *shape: int) -> Any:
        """Some of them nearly the same, where that counts."""
        k = self.random.standard_normal(shape, np.float32)
        if self.rules.distinct:
            few = np.random.default_rng(shape[2]).standard_normal((5, shape[2]), np.float32)
            k = np.float32(0.25) * k + few[self.random.integers(0, 5, shape[:2])]
        return k

    def truncate(self, position: int) -> None:
        self.position = min(position, self.position)
        self.store.truncate(self.position)
        for oracle in self.heads.values():
            oracle.truncate(self.position)
        self.check()

    def check(self) -> None:
        """Everything that holds after every operation."""
        for key, oracle in self.heads.items():
            np.testing.assert_array_equal(self.store.positions(*key), oracle.positions)
            assert len(oracle.positions) <= oracle.budget == self.store.budget(*key)
            if self.rules.observes:
                importance = self.store.importance(*key)
                tolerance = self.rules.tolerance
                np.testing.assert_allclose(importance, oracle.importance, tolerance, tolerance)
        whole_from = max(oracle.whole_from for oracle in self.heads.values())
        assert self.store.windows_whole_from == whole_from
        assert self.store.entries == sum(len(oracle.positions) for oracle in self.heads.values())
        assert self.store.evicted == sum(oracle.evicted for oracle in self.heads.values())
        assert self.store.used_bytes <= self.store.budget_bytes
        assert self.store.used_bytes <= self.store.mapped_bytes
        assert self.store.used_bytes <= self.store.peak_bytes <= self.largest_budget


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
@settings(max_examples=150, deadline=None)
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
@settings(max_examples=40, deadline=None)
@given(
    budgets=budget_lists,
    todo=operations,
    decay=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    observation_window=st.sampled_from([16, 128]),
    by_exposure=st.booleans(),
    by_values=st.booleans(),
    distinct=st.booleans(),
    rope=st.sampled_from(ROPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_measure_and_modifier_keeps_what_the_oracle_keeps(
    measure: str,
    kv_type: str,
    budgets: list[int],
    todo: list[tuple[Any, ...]],
    decay: float,
    observation_window: int,
    by_exposure: bool,
    by_values: bool,
    distinct: bool,
    rope: Rope,
    seed: int,
) -> None:
    if measure == "expected":
        assume(decay > 0.0 and not by_exposure)
    rules = Rules(
        measure,
        kv_type,
        N_SINKS,
        RECENT,
        decay=decay,
        observation_window=observation_window,
        by_exposure=by_exposure,
        by_values=by_values,
        distinct=distinct,
        rope=rope,
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


def test_the_entries_with_most_attention_are_kept() -> None:
    """By hand: queries that point at the keys of two early tokens keep them; neighbours do not."""
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
    """By hand: token 9 gets more attention than token 17, but its value is next to nothing."""
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
    """By hand: tokens 9 and 17 get most attention, by the same key; 25 gets less, by its own."""
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
    """By hand: queries are the same but for RoPE; a key that they will point at is kept.

    One pair that turns by 2 pi in 100 positions: at positions 0..79 queries pointed at the angles
    0..0.8 of a turn, in the next 10 positions they will at 0.8..0.9.
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


@pytest.mark.parametrize("split", [[96], [40, 56], [2, 30, 7, 57]])
def test_exposure_makes_ages_and_micro_batches_count_the_same(split: list[int]) -> None:
    """Every query gives the same to every entry: per query, so did every entry get."""
    settings = _core.ImportanceSettings(
        _core.ScoreKind.products, decay=0.97, observation_window=96, by_exposure=True
    )
    store = store_by(settings, 128)
    position = 0
    for n_tokens in split:
        rows = np.ones((n_tokens, 1, 32), np.float32)
        store.attend(0, rows, rows, rows, 0.5, position=position)
        position += n_tokens
    seen = position - 32  # the others are within the neighbourhood of every query
    exposures = [_core.exposure(position - 1 - p, settings) for p in range(seen)]
    importance = store.importance(0, 0)
    np.testing.assert_allclose(importance[:seen] / exposures, np.full(seen, 16.0), rtol=1e-5)
    assert not importance[seen:].any()


def test_decoding_evicts_for_several_tokens_at_once() -> None:
    store = store_of_one_head(_core.ScoreKind.streaming, max_entries=200)
    budget = FLOOR + 40  # a quarter of 40 is the room that one eviction makes
    store.set_budgets([budget], 8, N_SINKS, RECENT)
    row = np.ones((1, 1, 32), np.float32)
    counts = []
    for position in range(100):
        store.attend(0, row, row, row, 1.0, position=position)
        counts.append(store.entries)
    assert counts[: budget + 1] == [*range(1, budget + 1), budget - 9]
    assert max(counts) == budget
    assert set(counts[budget:]) == set(range(budget - 9, budget + 1))


def store_of_one_head(
    score: _core.ScoreKind, max_entries: int, dim: int = 32, window: int = 0
) -> _core.HeadwiseStore:
    shape = _core.LayerShape(1, 1, dim, dim, window)
    importance = _core.ImportanceSettings(score, observation_window=64)
    return _core.HeadwiseStore(
        [shape], "f16", importance, N_SINKS, RECENT, 512, max_entries, n_threads=1
    )


def test_memory_goes_back_after_a_large_shrink() -> None:
    store = store_of_one_head(_core.ScoreKind.streaming, max_entries=20_000, dim=128)
    shape = _core.LayerShape(1, 1, 128, 128)
    page_bytes, (per_page,) = _core.page_geometry([shape], "f16")
    pages = _core.pages_for(20_000, per_page)
    store.set_budgets([20_000], pages, N_SINKS, RECENT)
    assert store.mapped_bytes == 0  # nothing is taken before it is needed
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
    """A layer with smaller entries has more groups of 16 in a page; the largest has one."""
    page_bytes, per_page = _core.page_geometry(LAYERS, "f16")
    assert min(per_page) == per_page[1] == 16
    sizes = [2 * (32 + 32) + 8, 2 * (48 + 64) + 8, 2 * (16 + 32) + 8]
    for entries, size in zip(per_page, sizes, strict=True):
        assert entries * size <= page_bytes < (entries + 16) * size + 4 * 64
    alone, (entries,) = _core.page_geometry([LAYERS[2]], "q8_0")
    assert entries == 16
    assert alone < page_bytes
