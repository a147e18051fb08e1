"""Make headwise stores without a model, and read the same in them and in the numpy oracle."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from entropykv import _core
from tests.support.attention_layers import OUTPUT_TOLERANCE, assert_near
from tests.support.reference import Options, Rules

MAX_TOKENS = 96
MAX_ENTRIES = 400
N_SINKS = 3
RECENT = 6
# The three layers have entries of different sizes, so that their pages hold 16 entries and more.
SHAPES = ((4, 2, 32, 32), (2, 1, 48, 64), (3, 3, 16, 20))
LAYERS = [_core.LayerShape(*shape) for shape in SHAPES]
HEADS = [(layer, head) for layer, shape in enumerate(SHAPES) for head in range(shape[1])]


def pages_of(
    budgets: list[int], kv_type: str, shapes: tuple[tuple[int, int, int, int], ...] = SHAPES
) -> int:
    _, per_page = _core.page_geometry([_core.LayerShape(*shape) for shape in shapes], kv_type)
    layers = [layer for layer, shape in enumerate(shapes) for _ in range(shape[1])]
    return sum(
        _core.pages_for(budget, per_page[layer])
        for layer, budget in zip(layers, budgets, strict=True)
    )


def importance_of(rules: Rules) -> _core.ImportanceSettings:
    return _core.ImportanceSettings(
        getattr(_core.ScoreKind, rules.score),
        decay=rules.decay,
        observation_window=rules.observation_window,
        by_values=rules.by_values,
        expected_lookups=rules.expected_lookups,
    )


def store_of(
    rules: Rules,
    layers: Any,
    max_tokens: int = MAX_TOKENS,
    max_entries: int = MAX_ENTRIES,
    **more: Any,
) -> _core.HeadwiseStore:
    """Make a store of one thread that follows the rules."""
    return _core.HeadwiseStore(
        layers,
        rules.kv_type,
        importance_of(rules),
        n_sinks=N_SINKS,
        recent_window=rules.recent_window,
        max_tokens=max_tokens,
        max_entries=max_entries,
        n_threads=1,
        **more,
    )


class WithOracle:
    """Read the same micro-batches in a store and in the oracle of each of its heads."""

    shapes: ClassVar[tuple[tuple[int, int, int, int], ...]] = SHAPES
    max_entries: ClassVar[int] = MAX_ENTRIES
    rules: Rules
    random: np.random.Generator
    position: int
    store: _core.HeadwiseStore
    heads: dict[tuple[int, int], Any]

    def attend(self, n_tokens: int) -> None:
        """Read a random micro-batch in all layers, and compare the outputs: they show whether each
        entry has its own K and V.
        """
        n_tokens = min(n_tokens, self.max_entries - self.position)
        if n_tokens == 0:
            return
        for layer in range(len(self.shapes)):
            self.attend_layer(layer, n_tokens)
        self.position += n_tokens
        self.check()

    def attend_layer(self, layer: int, n_tokens: int) -> None:
        n_head, n_head_kv, k_dim, v_dim = self.shapes[layer]
        normal = self.random.standard_normal
        q = normal((n_tokens, n_head, k_dim), np.float32) * 2
        k = normal((n_tokens, n_head_kv, k_dim), np.float32)
        v = normal((n_tokens, n_head_kv, v_dim), np.float32)
        window, chunked = self.window(layer)
        options = Options(k_dim**-0.5, window=window, chunked=chunked)
        output = self.store.attend_alone(layer, q, k, v, options.scale, position=self.position)
        group = n_head // n_head_kv
        for head in range(n_head_kv):
            heads = slice(head * group, (head + 1) * group)
            oracle = self.heads[layer, head]
            expected = oracle.read(q[:, heads], k[:, head], v[:, head], self.position, options)
            atol = OUTPUT_TOLERANCE[self.rules.kv_type]
            assert_near(output[:, heads], expected.outputs, rtol=0, atol=atol)
            oracle.settle(n_tokens, self.store.positions(layer, head))

    def window(self, layer: int) -> tuple[int, bool]:  # noqa: ARG002
        """Return the window of a layer (0: none), and whether it is chunked."""
        return 0, False

    def truncate(self, position: int) -> None:
        self.position = min(position, self.position)
        self.store.truncate(self.position)
        for oracle in self.heads.values():
            oracle.truncate(self.position)
        self.check()

    def check(self) -> None:
        """Compare the store with its oracles; called after every operation."""
        raise NotImplementedError
