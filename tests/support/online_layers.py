"""Run a store whose budgets follow the text, and compare it with the numpy oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entropykv import _core
from entropykv.policy.plan import HeadwisePlan, plan_headwise
from entropykv.policy.policy import POLICIES
from entropykv.settings.options import Budget
from tests.support.reference import Options, ReferenceHead, Rules
from tests.support.stores import (
    HEADS,
    LAYERS,
    MAX_ENTRIES,
    N_SINKS,
    SHAPES,
    pages_of,
    store_of,
)


@dataclass
class Layers:
    """Hold a store and the oracle of its heads; if `shared`, heads of a layer choose together."""

    rules: Rules
    budgets: list[int]
    """The budget of each KV head, by layer."""
    shared: bool = False
    knots: tuple[int, ...] = ()
    quiet: int = -1
    """The layer whose queries attend to all entries equally, or -1."""
    seed: int = 0
    position: int = 0
    store: _core.HeadwiseStore = field(init=False)
    heads: dict[tuple[int, int], ReferenceHead] = field(init=False)
    losses: list[Any] = field(default_factory=list)
    """The losses of the last micro-batch, as the oracle computes them."""
    losses_of_held: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with an empty store and empty oracles."""
        self.random = np.random.default_rng(self.seed)
        self.store = self.new_store()
        self.heads = {
            (layer, head): ReferenceHead(self.rules, *SHAPES[layer][2:], budget=MAX_ENTRIES)
            for layer, head in HEADS
        }
        self.set_budgets(self.budgets)

    def new_store(self) -> _core.HeadwiseStore:
        store = store_of(
            self.rules,
            LAYERS,
            own_windows=self.rules.own_windows,
            counts_dropped=True,
            shared_choice=self.shared,
        )
        store.measure_losses(self.knots)
        return store

    def set_budgets(self, budgets: list[int]) -> None:
        self.budgets = budgets
        self.apply_budgets()
        for (layer, head), oracle in self.heads.items():
            oracle.set_budget(budgets[layer], self.store.positions(layer, head))

    def apply_budgets(self) -> None:
        of_heads = [self.budgets[layer] for layer, _ in HEADS]
        pages = pages_of(of_heads, self.rules.kv_type)
        self.store.set_budgets(of_heads, pages, N_SINKS, self.rules.recent_window)

    def attend(self, n_tokens: int) -> None:
        n_tokens = min(n_tokens, MAX_ENTRIES - self.position)
        if n_tokens == 0:
            return
        self.losses, self.losses_of_held = [], []
        for layer in range(len(SHAPES)):
            self.attend_layer(layer, n_tokens)
        self.position += n_tokens

    def attend_layer(self, layer: int, n: int) -> None:
        n_head, n_head_kv, k_dim, v_dim = SHAPES[layer]
        q, k, v = (
            self.random.standard_normal((n, heads, dim), np.float32)
            for heads, dim in ((n_head, k_dim), (n_head_kv, k_dim), (n_head_kv, v_dim))
        )
        v *= 1 + np.arange(n_head_kv, dtype=np.float32)[:, None] * 2
        options = Options((0.02 if layer == self.quiet else 2) * k_dim**-0.5)
        self.store.attend_alone(layer, q, k, v, options.scale, position=self.position)
        group = n_head // n_head_kv
        oracles = [self.heads[layer, head] for head in range(n_head_kv)]
        results = [
            oracle.attend(
                q[:, i * group : (i + 1) * group], k[:, i], v[:, i], self.position, options
            )
            for i, oracle in enumerate(oracles)
        ]
        together = np.sum([result.observed for result in results], axis=0) if self.shared else None
        for head, (oracle, result) in enumerate(zip(oracles, results, strict=True)):
            oracle.give(result.observed if together is None else together, self.position)
            self.losses.append(oracle.losses(self.knots, result.outputs))
            of_held = oracle.losses(self.knots, result.outputs, of_held=True)
            self.losses_of_held.append(of_held)
            oracle.settle(n, self.store.positions(layer, head))

    def truncate(self, position: int) -> None:
        self.position = min(position, self.position)
        self.store.truncate(self.position)
        for oracle in self.heads.values():
            oracle.truncate(self.position)

    def reload(self) -> None:
        """Continue in a new store that loads the state of this one."""
        states = [bytearray(self.store.save_head(*key)) for key in HEADS]
        counts = [self.store.count(*key) for key in HEADS]
        evicted = self.store.evicted
        self.store = self.new_store()
        self.apply_budgets()
        budgets = [self.store.budget(*key) for key in HEADS]
        self.store.begin_load(counts, states, budgets)
        self.store.evicted = evicted
        for (layer, head), count, state in zip(HEADS, counts, states, strict=True):
            self.store.load_head(layer, head, count, state)

    def check(self) -> None:
        for layer, shape in enumerate(SHAPES):
            kept = [self.store.positions(layer, head).tolist() for head in range(shape[1])]
            for head, positions in enumerate(kept):
                assert positions == self.heads[layer, head].positions.tolist()
                if self.shared:
                    assert positions == kept[0]


def plan_for(policy: str, budget: float | str, n_ctx: int = MAX_ENTRIES) -> HeadwisePlan:
    return plan_headwise(
        Budget.parse(budget), LAYERS, n_ctx, "f16", POLICIES[policy], None, N_SINKS, None
    )
