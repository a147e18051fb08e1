"""The headwise store with cold storage under random operations, against the numpy oracle."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv import _core
from tests.support.reference import (
    FreezingHead,
    Options,
    Rope,
    Rules,
    Schedule,
    Undecided,
    attend_kv_head,
    rope_positions,
    rotated,
    stored,
)
from tests.support.stores import importance_of

MAX_TOKENS = 40
MAX_ENTRIES = 300
N_SINKS = 3
RECENT = 6
FLOOR = N_SINKS + RECENT

SHAPES = ((4, 2, 32, 32), (2, 1, 20, 40))  # pages of 16 entries, and of more
LAYERS = [_core.LayerShape(*shape) for shape in SHAPES]
HEADS = [(layer, head) for layer, shape in enumerate(SHAPES) for head in range(shape[1])]
KV_TYPES = ("f16", "q8_0")
OUTPUT_TOLERANCE = {"f16": 2e-5, "q8_0": 2e-3}  # as in test_attention.py


def pages_of(budgets: list[int], kv_type: str, shapes: Any = SHAPES) -> int:
    _, per_page = _core.page_geometry([_core.LayerShape(*shape) for shape in shapes], kv_type)
    layers = [layer for layer, shape in enumerate(shapes) for _ in range(shape[1])]
    return sum(
        _core.pages_for(budget, per_page[layer])
        for layer, budget in zip(layers, budgets, strict=True)
    )


def freeze_settings(recall: int = 0, limit: int = 0, **more: Any) -> _core.FreezeSettings:
    kv_type = more.pop("kv_type", "as stored")
    return _core.FreezeSettings(kv_type, limit, recall, **more)


def store_of(
    rules: Rules, freezing: _core.FreezeSettings | None, shapes: Any = SHAPES
) -> _core.HeadwiseStore:
    layers = [_core.LayerShape(*shape) for shape in shapes]
    return _core.HeadwiseStore(
        layers,
        rules.kv_type,
        importance_of(rules),
        n_sinks=N_SINKS,
        recent_window=RECENT,
        max_tokens=MAX_TOKENS,
        max_entries=MAX_ENTRIES,
        n_threads=1,
        freezing=freezing,
    )


@dataclass
class Pair:
    """A store that freezes and the oracle of each of its heads, doing the same; no recall."""

    rules: Rules
    budgets: list[int]
    seed: int = 0
    position: int = 0
    descriptor: int = -1
    store: _core.HeadwiseStore = field(init=False)
    heads: dict[tuple[int, int], FreezingHead] = field(init=False)

    def __post_init__(self) -> None:
        """Both empty, with the same budgets."""
        self.random = np.random.default_rng(self.seed)
        schedule = self.rules.schedule and _core.FreezeSchedule(*self.rules.schedule)
        self.store = store_of(
            self.rules, freeze_settings(schedule=schedule, descriptor=self.descriptor)
        )
        self.heads = {
            (layer, head): FreezingHead(self.rules, *SHAPES[layer][2:], budget=budget)
            for (layer, head), budget in zip(HEADS, self.budgets, strict=True)
        }
        self.set_budgets(self.budgets)

    def set_budgets(self, budgets: list[int]) -> None:
        self.store.set_budgets(budgets, pages_of(budgets, self.rules.kv_type), N_SINKS, RECENT)
        for key, budget in zip(HEADS, budgets, strict=True):
            self.heads[key].set_budget(budget, self.store.positions(*key))
        self.check()

    def attend(self, n_tokens: int) -> None:
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
        k = normal((n_tokens, n_head_kv, k_dim), np.float32)
        v = normal((n_tokens, n_head_kv, v_dim), np.float32)
        options = Options(k_dim**-0.5)
        output = self.store.attend(layer, q, k, v, options.scale, position=self.position)
        group = n_head // n_head_kv
        for head in range(n_head_kv):
            heads = slice(head * group, (head + 1) * group)
            oracle = self.heads[layer, head]
            expected = oracle.read(q[:, heads], k[:, head], v[:, head], self.position, options)
            atol = OUTPUT_TOLERANCE[self.rules.kv_type]
            np.testing.assert_allclose(output[:, heads], expected.outputs, rtol=0, atol=atol)
            oracle.settle(n_tokens, self.store.positions(layer, head))

    def truncate(self, position: int) -> None:
        self.position = min(position, self.position)
        self.store.truncate(self.position)
        for oracle in self.heads.values():
            oracle.truncate(self.position)
        self.check()

    def freeze_all(self) -> None:
        self.store.freeze_all(self.position - 1)
        for oracle in self.heads.values():
            oracle.freeze_all(self.position - 1)
        self.check()

    def restore(self, frozen_before: int, due_within: int, *, forget: bool) -> None:
        now = self.position - 1
        asked = {"frozen_after": now - frozen_before, "due_after": now + due_within}
        n = self.store.restore(now, **asked, forget=forget)
        assert n == sum(
            oracle.restore(now, self.store.positions(*key), **asked, forget=forget)
            for key, oracle in self.heads.items()
        )
        self.check()

    def check(self) -> None:
        """Everything that holds after every operation."""
        for key, oracle in self.heads.items():
            np.testing.assert_array_equal(self.store.positions(*key), oracle.positions)
            frozen = self.store.frozen_positions(*key)
            np.testing.assert_array_equal(frozen, sorted(oracle.frozen))
            both = [*oracle.positions, *frozen]
            assert sorted(both) == list(range(self.position))  # nothing lost, nothing twice
            assert len(oracle.positions) <= oracle.budget == self.store.budget(*key)
            _, importance, k, v = self.store.rows(*key)
            np.testing.assert_array_equal(k, oracle.k.astype(np.float32))
            np.testing.assert_array_equal(v, oracle.v.astype(np.float32))
            if self.rules.observes:
                tolerance = self.rules.tolerance
                np.testing.assert_allclose(importance, oracle.importance, tolerance, tolerance)
        assert self.store.frozen == sum(len(oracle.frozen) for oracle in self.heads.values())
        assert self.store.evicted == 0
        assert self.store.used_bytes <= self.store.budget_bytes
        assert self.store.cold_failure is None


budget_lists = st.lists(st.integers(FLOOR, 120), min_size=len(HEADS), max_size=len(HEADS))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("attend"), st.integers(1, MAX_TOKENS)),
        st.tuples(st.just("decode"), st.integers(1, 20)),
        st.tuples(st.just("set_budgets"), budget_lists),
        st.tuples(st.just("truncate"), st.floats(0.0, 1.0)),
        st.tuples(st.just("freeze_all")),
        st.tuples(st.just("restore"), st.integers(0, 80), st.integers(-1, 4), st.booleans()),
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
        case ("set_budgets", budgets):
            pair.set_budgets(budgets)
        case ("truncate", fraction):
            pair.truncate(round(fraction * pair.position))
        case ("freeze_all",):
            pair.freeze_all()
        case ("restore", frozen_before, due_within, forget):
            pair.restore(frozen_before, due_within, forget=forget)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("score", ["streaming", "mass", "attention"])
@pytest.mark.parametrize("where", ["ram", "disk"])
@settings(max_examples=40, deadline=None)
@given(
    budgets=budget_lists,
    todo=operations,
    decay=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_the_budget_does_not_hold_is_frozen_as_it_was(
    where: str,
    score: str,
    kv_type: str,
    budgets: list[int],
    todo: list[tuple[Any, ...]],
    decay: float,
    seed: int,
) -> None:
    rules = Rules(score, kv_type, N_SINKS, RECENT, decay=decay)
    with tempfile.TemporaryFile() as file:
        pair = Pair(rules, budgets, seed, descriptor=file.fileno() if where == "disk" else -1)
        for operation in todo:
            perform(pair, operation)


@pytest.mark.parametrize("score", ["mass", "attention", "products"])
@settings(max_examples=60, deadline=None)
@given(
    budgets=budget_lists,
    todo=operations,
    window=st.sampled_from([1, 8, 30]),
    threshold=st.sampled_from([0.3, 0.7, 1.0, 1e6]),
    rate=st.sampled_from([0.5, 1.0, 2.0]),
    history=st.sampled_from([0, 5, 40]),
    observation_window=st.sampled_from([5, 64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_schedule_freezes_and_restores_as_the_document_says(
    score: str,
    budgets: list[int],
    todo: list[tuple[Any, ...]],
    window: int,
    threshold: float,
    rate: float,
    history: int,
    observation_window: int,
    seed: int,
) -> None:
    rules = Rules(score, "f16", N_SINKS, RECENT, decay=0.9, observation_window=observation_window)
    rules.schedule = Schedule(window, threshold, rate, history)
    pair = Pair(rules, budgets, seed)
    try:
        for operation in todo:
            perform(pair, operation)
    except Undecided:
        return  # what came before was checked


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_the_schedule_by_hand(kv_type: str) -> None:
    """Everything outside of the window is detected in every step that sees it.

    The 4th detection freezes for one step, the 16th for two. Frozen at t for one step: out of the
    attention of t + 1, and back for t + 2.
    """
    rules = Rules("products", kv_type, N_SINKS, RECENT, schedule=Schedule(8, 1e9, 2.0, 0))
    pair = Pair(rules, [120] * len(HEADS))
    away: dict[int, list[int]] = {}
    for _ in range(60):
        pair.attend(1)
        for position in pair.store.frozen_positions(0, 0):
            away.setdefault(int(position), []).append(pair.position - 1)
    assert not set(away) & set(range(N_SINKS))
    first = N_SINKS
    # Its first detection is at first + 8; while it is frozen, there is none.
    start, times, detections = first + 8, [], 0
    step = start
    while step < 60:
        detections += 1
        steps = int(np.sqrt(detections) / 2.0)
        times += list(range(step, min(step + steps, 60)))
        step += max(steps, 0) + 1 if steps else 1
    assert away[first] == times
    assert len(times) > 10


# --- recall ---------------------------------------------------------------------------------------

ONE = ((2, 1, 32, 32),)


def store_with_a_needle(
    n_read: int, budget: int, needle: int, freezing: _core.FreezeSettings
) -> tuple[_core.HeadwiseStore, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A head that has read `n_read` tokens and frozen the needle; its K and V."""
    random = np.random.default_rng(7)
    k = random.standard_normal((n_read, 1, 32), np.float32) * np.float32(0.3)
    v = random.standard_normal((n_read, 1, 32), np.float32)
    k[needle, 0] = 0.0
    k[needle, 0, 3] = 8.0
    store = store_of(Rules("streaming"), freezing, ONE)
    store.set_budgets([budget], pages_of([budget], "f16", ONE), N_SINKS, RECENT)
    q = np.zeros((MAX_TOKENS, 2, 32), np.float32)
    q[..., 3] = -1.0  # anything but the needle
    for first in range(0, n_read, MAX_TOKENS):
        rows = slice(first, min(first + MAX_TOKENS, n_read))
        n = rows.stop - rows.start
        store.attend(0, q[:n], k[rows], v[rows], 1.0, position=first)
    assert needle in store.frozen_positions(0, 0)
    return store, k, v


@pytest.mark.parametrize("n_tokens", [1, 2, 20])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("needle", [5, 60, 190])
def test_what_a_query_looks_for_is_there_in_the_same_step(
    n_tokens: int, softcap: float, where: str, needle: int
) -> None:
    """By hand: the queries point at one frozen key. The head is not full: nothing is evicted."""
    with tempfile.TemporaryFile() as file:
        descriptor = file.fileno() if where == "disk" else -1
        freezing = freeze_settings(recall=1, descriptor=descriptor)
        store, k, v = store_with_a_needle(240, 80, needle, freezing)
        store.set_budgets([140], pages_of([140], "f16", ONE), N_SINKS, RECENT)
        q = np.zeros((n_tokens, 2, 32), np.float32)
        q[..., 3] = 4.0
        more_k, more_v = np.full((2, n_tokens, 1, 32), 0.1, np.float32)
        output = store.attend(0, q, more_k, more_v, 1.0, softcap=softcap, position=240)
        active = store.positions(0, 0)
        assert needle in active
        assert needle not in store.frozen_positions(0, 0)
        assert store.recalled_total >= 1
        assert len(active) <= 140
        k, v = np.concatenate([k, more_k]), np.concatenate([v, more_v])
        rows = (q, stored(k[active, 0], "f16"), stored(v[active, 0], "f16"), active)
        expected = attend_kv_head(*rows, 240, Options(1.0, softcap)).outputs
        np.testing.assert_allclose(output, expected, rtol=0, atol=2e-5)
        assert sorted([*active, *store.frozen_positions(0, 0)]) == list(range(240 + n_tokens))


@pytest.mark.parametrize("n_tokens", [1, 20])
@pytest.mark.parametrize(
    ("needle", "slope", "found"), [(60, 0.05, True), (60, 0.3, False), (190, 0.3, True)]
)
def test_what_a_query_looks_for_counts_with_its_distance(
    n_tokens: int, needle: int, slope: float, found: bool
) -> None:
    """By hand: ALiBi takes 54 from the logit of 32 of a needle 180 positions away, or less."""
    store, k, v = store_with_a_needle(240, 80, needle, freeze_settings(recall=1))
    store.set_budgets([140], pages_of([140], "f16", ONE), N_SINKS, RECENT)
    slopes = np.array([slope, 2.0], np.float32)
    q = np.zeros((n_tokens, 2, 32), np.float32)
    q[..., 3] = 4.0
    more = np.full((n_tokens, 1, 32), 0.1, np.float32)
    output = store.attend(0, q, more, more, 1.0, position=240, slopes=slopes)
    active = store.positions(0, 0)
    assert (needle in active) == found
    k, v = np.concatenate([k, more]), np.concatenate([v, more])
    rows = (q, stored(k[active, 0], "f16"), stored(v[active, 0], "f16"), active)
    expected = attend_kv_head(*rows, 240, Options(1.0, slopes=slopes)).outputs
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("interval", [0, 4])
def test_single_tokens_look_for_frozen_entries_at_intervals(interval: int) -> None:
    store, _, _ = store_with_a_needle(240, 80, 60, freeze_settings(recall=interval))
    store.set_budgets([140], pages_of([140], "f16", ONE), N_SINKS, RECENT)
    q = np.zeros((1, 2, 32), np.float32)
    q[..., 3] = 4.0
    row = np.full((1, 1, 32), 0.1, np.float32)
    found = []
    for position in range(241, 249):
        store.attend(0, q, row, row, 1.0, position=position)
        found.append(60 in store.positions(0, 0))
    expected = [interval > 0 and position >= 244 for position in range(241, 249)]
    assert found == expected
    store, _, _ = store_with_a_needle(240, 80, 60, freeze_settings(recall=4))
    store.set_budgets([140], pages_of([140], "f16", ONE), N_SINKS, RECENT)
    store.recall_now()
    store.attend(0, q, row, row, 1.0, position=241)
    assert 60 in store.positions(0, 0)


@pytest.mark.parametrize("measure", [_core.ScoreKind.attention, _core.ScoreKind.mass])
def test_recall_leaves_alone_what_the_schedule_would_freeze_again(
    measure: _core.ScoreKind,
) -> None:
    """Every second entry gets a third of an even share: it is frozen, and stays so for its time."""
    importance = _core.ImportanceSettings(measure, decay=0.998)
    freezing = freeze_settings(recall=1, schedule=_core.FreezeSchedule(4, 1.0, 2.0, 0))
    store = _core.HeadwiseStore(
        [_core.LayerShape(1, 1, 32, 32)],
        "f16",
        importance,
        N_SINKS,
        RECENT,
        1,
        80,
        1,
        freezing=freezing,
    )
    store.set_budgets([80], pages_of([80], "f16", ((1, 1, 32, 32),)), N_SINKS, RECENT)
    query = np.zeros((1, 1, 32), np.float32)
    query[..., 0] = 1.0
    for position in range(60):
        key = query * (0.0 if position % 2 else np.log(5.0))
        store.attend(0, query, key, np.ones((1, 1, 32), np.float32), 1.0, position=position)
    assert store.frozen_total > 10
    assert store.recalled_total == 0


def test_queries_of_a_group_do_not_disturb_each_other() -> None:
    """By hand: only the first query of two would look for what the second one has enough of.

    The last page reaches beyond what a store of so few entries keeps room for.
    """
    shape = _core.LayerShape(2, 1, 32, 32)
    importance = _core.ImportanceSettings(_core.ScoreKind.streaming)
    store = _core.HeadwiseStore(
        [shape], "f16", importance, N_SINKS, RECENT, 1, 34, 1, freezing=freeze_settings(recall=1)
    )
    store.set_budgets([34], 3, N_SINKS, RECENT)
    row = np.zeros((1, 1, 32), np.float32)
    keys = np.zeros((40, 1, 1, 32), np.float32)
    keys[:, ..., 0] = 1.0  # of all, frozen ones too
    keys[:N_SINKS, ..., 0] = 10.0
    nothing = np.zeros((1, 2, 32), np.float32)
    for position in range(40):
        store.attend(0, nothing, keys[position], row, 1.0, position=position)
    assert store.count(0, 0) > 32
    before = store.recalled_total
    looking = nothing.copy()
    looking[0, :, 0] = 10.0  # both see the sinks alone
    store.attend(0, looking, row, row, 1.0, position=40)
    assert store.recalled_total == before


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("cold_type", ["as stored", "q8_0", "q4_0"])
@pytest.mark.parametrize("schedule", [None, Schedule(8, 1.0, 1.0, 0)], ids=["", "schedule"])
@pytest.mark.parametrize("where", ["ram", "disk"])
@settings(max_examples=10, deadline=None)
@given(
    budgets=budget_lists,
    todo=operations,
    pages=st.sampled_from([0, 2, 3, 5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_recall_loses_nothing_and_keeps_to_the_budget(
    where: str,
    schedule: Schedule | None,
    cold_type: str,
    kv_type: str,
    budgets: list[int],
    todo: list[tuple[Any, ...]],
    pages: int,
    seed: int,
) -> None:
    """Whatever it recalls: K and V are those of their positions, and nothing is twice.

    pages: of cold storage for each KV head; 0: no limit.
    """
    limit = pages and len(HEADS) * (
        _core.page_geometry(LAYERS, kv_type)[0]
        + (pages - 1) * _core.cold_page_bytes(LAYERS, kv_type, cold_type)
    )
    with tempfile.TemporaryFile() as file:
        descriptor = file.fileno() if where == "disk" else -1
        freezing = freeze_settings(
            recall=2,
            limit=limit,
            kv_type=cold_type,
            schedule=schedule and _core.FreezeSchedule(*schedule),
            descriptor=descriptor,
        )
        rules = Rules("attention", kv_type, decay=0.99, schedule=schedule)
        store = store_of(rules, freezing)
        Reader(store, rules, budgets, seed, exact=cold_type == "as stored", limit=limit).all(todo)


@dataclass
class Reader:
    """Reads random micro-batches whose queries look for earlier keys; checks what always holds."""

    store: _core.HeadwiseStore
    rules: Rules
    budgets: list[int]
    seed: int
    exact: bool
    limit: int
    position: int = 0

    def __post_init__(self) -> None:
        """Nothing was read yet."""
        self.random = np.random.default_rng(self.seed)
        self.k = [np.zeros((0, *shape[1:3])) for shape in SHAPES]
        self.set_budgets(self.budgets)

    def set_budgets(self, budgets: list[int]) -> None:
        pages = pages_of(budgets, self.rules.kv_type)
        self.store.set_budgets(budgets, pages, N_SINKS, RECENT)
        self.budgets = budgets

    def all(self, todo: list[tuple[Any, ...]]) -> None:
        for operation in todo:
            match operation:
                case ("attend", n_tokens):
                    self.attend(n_tokens)
                case ("decode", n_steps):
                    for _ in range(n_steps):
                        self.attend(1)
                case ("set_budgets", budgets):
                    self.set_budgets(budgets)
                case ("truncate", fraction):
                    self.position = round(fraction * self.position)
                    self.store.truncate(self.position)
                    self.k = [k[: self.position] for k in self.k]
                case ("freeze_all",):
                    self.store.freeze_all(self.position - 1)
                case ("restore", frozen_before, due_within, forget):
                    now = self.position - 1
                    frozen_after, due_after = now - frozen_before, now + due_within
                    self.store.restore(now, frozen_after, due_after, forget)
            self.check()

    def attend(self, n_tokens: int) -> None:
        n_tokens = min(n_tokens, MAX_ENTRIES - self.position)
        if n_tokens == 0:
            return
        new = set(range(self.position, self.position + n_tokens))
        before = {key: set(self.store.positions(*key).tolist()) | new for key in HEADS}
        for layer, (n_head, n_head_kv, k_dim, v_dim) in enumerate(SHAPES):
            normal = self.random.standard_normal
            k = normal((n_tokens, n_head_kv, k_dim), np.float32)
            v = normal((n_tokens, n_head_kv, v_dim), np.float32)
            self.k[layer] = np.concatenate([self.k[layer], stored(k, self.rules.kv_type)])
            wanted = self.random.integers(0, len(self.k[layer]), n_tokens)
            q = np.repeat(self.k[layer][wanted], n_head // n_head_kv, axis=1).astype(np.float32)
            output = self.store.attend(layer, q, k, v, 1.0, position=self.position)
            assert np.isfinite(output).all()
        self.position += n_tokens
        protected = {*range(N_SINKS), *range(self.position - RECENT, self.position)}
        for key, held in before.items():
            assert held & protected <= set(self.store.positions(*key).tolist())

    def check(self) -> None:
        lost = 0
        for (layer, head), budget in zip(HEADS, self.budgets, strict=True):
            active, importance, k, _ = self.store.rows(layer, head)
            frozen = self.store.frozen_positions(layer, head)
            assert len(active) <= budget
            held = [*active.tolist(), *frozen.tolist()]
            assert len(set(held)) == len(held)
            assert not held or max(held) < self.position
            lost += self.position - len(held)
            expected = self.k[layer][active, head]
            if self.exact:
                np.testing.assert_array_equal(k, expected.astype(np.float32))
            assert np.isfinite(importance).all()
            assert (importance >= 0.0).all()
        assert self.limit or lost == 0
        assert self.store.evicted >= lost  # what was dropped may be truncated later
        assert not self.limit or self.store.cold_bytes <= self.limit
        assert self.store.cold_failure is None


# --- keys that move -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_frozen_keys_turn_as_active_ones_do(where: str) -> None:
    """Frozen, rebased and restored: the same keys as rebased without freezing."""
    rope = Rope(32)
    params = [_core.RopeParams(**rope._asdict())] * len(LAYERS)
    with tempfile.TemporaryFile() as file:
        descriptor = file.fileno() if where == "disk" else -1
        stores = [
            store_of(Rules("streaming"), freezing, ONE)
            for freezing in (freeze_settings(descriptor=descriptor), None)
        ]
        random = np.random.default_rng(1)
        q, k, v = random.standard_normal((3, 100, 2, 32), np.float32)
        for store in stores:
            store.set_budgets([200], pages_of([200], "f16", ONE), N_SINKS, RECENT)
            for first in range(0, 100, 20):
                rows = slice(first, first + 20)
                store.attend(0, q[rows], k[rows, :1], v[rows, :1], 0.2, position=first)
        stores[0].freeze_all(99)
        for store in stores:
            store.rebase(params[:1], N_SINKS, 0, 30)
        assert stores[0].restore(99) == 100
        for ours, theirs in zip(stores[0].rows(0, 0), stores[1].rows(0, 0), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        positions = np.arange(100)
        by = rope_positions(positions, N_SINKS, 30) - positions
        expected = rotated(stored(k[:, 0], "f16"), by, rope)
        np.testing.assert_allclose(stores[0].rows(0, 0)[2], expected, rtol=0, atol=2e-3)


# --- what cannot be -------------------------------------------------------------------------------


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="as stored, or in q8_0 or q4_0"):
        freeze_settings(kv_type="f32")
    with pytest.raises(ValueError, match="16 bytes"):
        freeze_settings(nonce=b"short")
    for cold_type in ("as stored", "q8_0", "q4_0"):
        page_bytes = _core.cold_page_bytes(LAYERS, "f16", cold_type)
        least = len(HEADS) * (page_bytes + _core.page_geometry(LAYERS, "f16")[0])
        with pytest.raises(ValueError, match=f"2 pages of every KV head, {least} bytes"):
            store_of(Rules("mass"), freeze_settings(limit=least - 1, kv_type=cold_type))
        store_of(Rules("mass"), freeze_settings(limit=least, kv_type=cold_type))


def test_narrower_pages_take_fewer_bytes() -> None:
    sizes = [
        _core.cold_page_bytes(LAYERS, "f16", cold_type)
        for cold_type in ("as stored", "q8_0", "q4_0")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


def test_no_room_changes_nothing() -> None:
    with tempfile.TemporaryFile() as file:
        store = store_of(Rules("streaming"), freeze_settings(descriptor=file.fileno()), ONE)
        store.set_budgets([20], pages_of([20], "f16", ONE), N_SINKS, RECENT)
    # The descriptor is closed: nothing can be allocated.
    rows = np.ones((30, 2, 32), np.float32)
    with pytest.raises(_core.ColdStorageError):
        store.attend(0, rows, rows[:, :1], rows[:, :1], 1.0)
    assert (store.entries, store.frozen, store.evicted) == (0, 0, 0)
    store.stop_freezing()
    store.attend(0, rows, rows[:, :1], rows[:, :1], 1.0)
    assert (store.entries, store.evicted) == (20, 10)
