"""Run a headwise store with cold storage and the numpy oracle side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from entropykv import _core
from tests.support import stores
from tests.support.attention_layers import assert_near, assert_same
from tests.support.reference import FreezingHead, Rules, stored
from tests.support.stores import N_SINKS, RECENT, WithOracle, pages_of

MAX_TOKENS = 40
MAX_ENTRIES = 300
FLOOR = N_SINKS + RECENT
SHAPES = ((4, 2, 32, 32), (2, 1, 20, 40))  # Pages of these shapes hold 16 entries, and more.
LAYERS = [_core.LayerShape(*shape) for shape in SHAPES]
HEADS = [(layer, head) for layer, shape in enumerate(SHAPES) for head in range(shape[1])]
KV_TYPES = ("f16", "q8_0", "q8_0/iq4_nl")


def freeze_settings(recall: int = 0, limit: int = 0, **more: Any) -> _core.FreezeSettings:
    kv_type = more.pop("kv_type", "as stored")
    return _core.FreezeSettings(kv_type, limit, recall, **more)


def store_of(
    rules: Rules, freezing: _core.FreezeSettings | None, shapes: Any = SHAPES
) -> _core.HeadwiseStore:
    layers = [_core.LayerShape(*shape) for shape in shapes]
    return stores.store_of(rules, layers, MAX_TOKENS, MAX_ENTRIES, freezing=freezing)


@dataclass
class Pair(WithOracle):
    """Hold a store that freezes without recall, and an oracle for each of its heads."""

    shapes = SHAPES
    max_entries = MAX_ENTRIES
    rules: Rules
    budgets: list[int]
    seed: int = 0
    position: int = 0
    descriptor: int = -1
    store: _core.HeadwiseStore = field(init=False)
    heads: dict[tuple[int, int], FreezingHead] = field(init=False)

    def __post_init__(self) -> None:
        """Start with an empty store and empty oracles, which have equal budgets."""
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
        self.store.set_budgets(
            budgets, pages_of(budgets, self.rules.kv_type, SHAPES), N_SINKS, RECENT
        )
        for key, budget in zip(HEADS, budgets, strict=True):
            self.heads[key].set_budget(budget, self.store.positions(*key))
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
        """Compare the store with its oracles; called after every operation."""
        for key, oracle in self.heads.items():
            assert_same(self.store.positions(*key), oracle.positions)
            frozen = self.store.frozen_positions(*key)
            assert_same(frozen, sorted(oracle.frozen))
            both = [*oracle.positions, *frozen]
            # No entry is lost, and none exists twice.
            assert sorted(both) == list(range(self.position))
            assert len(oracle.positions) <= oracle.budget == self.store.budget(*key)
            _, importance, k, v = self.store.rows(*key)
            assert_same(k, oracle.k.astype(np.float32))
            assert_same(v, oracle.v.astype(np.float32))
            if self.rules.observes:
                tolerance = self.rules.tolerance
                assert_near(importance, oracle.importance, tolerance, tolerance)
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


def perform(pair: Pair | Reader, operation: tuple[Any, ...]) -> None:
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


ONE = ((2, 1, 32, 32),)


@dataclass
class Reader:
    """Read random micro-batches whose queries attend to earlier keys, and check the invariants."""

    store: _core.HeadwiseStore
    rules: Rules
    budgets: list[int]
    seed: int
    exact: bool
    limit: int
    position: int = 0

    def __post_init__(self) -> None:
        """Start before any token is read."""
        self.random = np.random.default_rng(self.seed)
        self.k = [np.zeros((0, *shape[1:3])) for shape in SHAPES]
        self.set_budgets(self.budgets)

    def set_budgets(self, budgets: list[int]) -> None:
        pages = pages_of(budgets, self.rules.kv_type, SHAPES)
        self.store.set_budgets(budgets, pages, N_SINKS, RECENT)
        self.budgets = budgets

    def all(self, todo: list[tuple[Any, ...]]) -> None:
        for operation in todo:
            perform(self, operation)
            self.check()

    def truncate(self, position: int) -> None:
        self.position = position
        self.store.truncate(position)
        self.k = [k[:position] for k in self.k]

    def freeze_all(self) -> None:
        self.store.freeze_all(self.position - 1)

    def restore(self, frozen_before: int, due_within: int, *, forget: bool) -> None:
        now = self.position - 1
        self.store.restore(now, now - frozen_before, now + due_within, forget)

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
            output = self.store.attend_alone(layer, q, k, v, 1.0, position=self.position)
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
                assert_same(k, expected.astype(np.float32))
            assert np.isfinite(importance).all()
            assert (importance >= 0.0).all()
        assert self.limit or lost == 0
        # Entries that were dropped before a rollback still count.
        assert self.store.evicted >= lost
        assert not self.limit or self.store.cold_bytes <= self.limit
        assert self.store.cold_failure is None
