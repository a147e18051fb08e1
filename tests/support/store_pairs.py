"""Run a headwise store and the numpy oracle side by side, with random operations on both."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from entropykv import _core
from tests.support.reference import SHARE_ROUNDING, ReferenceHead, Rules
from tests.support.stores import (
    HEADS,
    LAYERS,
    MAX_ENTRIES,
    MAX_TOKENS,
    N_SINKS,
    RECENT,
    SHAPES,
    WithOracle,
    importance_of,
    pages_of,
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
        """Start with both empty, and with equal budgets."""
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
        """Set weights that give shares of 1e-6 to 1 and some larger ones; equal for the heads of a
        layer.
        """
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
        """Check everything that must hold after every operation."""
        for key, oracle in self.heads.items():
            np.testing.assert_array_equal(self.store.positions(*key), oracle.positions)
            assert len(oracle.positions) <= oracle.budget == self.store.budget(*key)
            if self.rules.observes or self.rules.predicts:
                expected = self.rules.score_of(oracle.importance, oracle.shares)
                rtol = self.rules.tolerance
                # Shares are small: a mass of 1e-4 is already little.
                atol = min(rtol, 1e-4) if self.rules.observes else 1e-7
                atol = rtol if self.rules.score == "products" else atol
                np.testing.assert_allclose(self.store.importance(*key), expected, rtol, atol)
            if self.rules.predicts:
                shares = self.store.predicted_shares(*key)
                np.testing.assert_allclose(shares, oracle.shares, 1.1 * SHARE_ROUNDING)
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
