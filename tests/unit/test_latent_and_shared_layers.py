"""Layers whose V is a part of K, and layers with several readers, equal the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv import _core
from tests.support.attention_layers import OUTPUT_TOLERANCE
from tests.support.reference import (
    NEIGHBOURHOOD,
    Options,
    ReferenceHead,
    Rules,
    attend_kv_head,
    losses_at,
)
from tests.support.stores import MAX_ENTRIES, N_SINKS, RECENT, store_of

MAX_TOKENS = 48
N_HEAD, N_HEAD_KV = 4, 2


@dataclass
class Layer:
    """Hold one layer with a budget, in the store and in the oracle."""

    rules: Rules
    budget: int
    latent: bool
    readers: int
    k_dim: int = 80
    v_dim: int = 64
    position: int = 0
    heads: list[ReferenceHead] = field(init=False)
    store: _core.HeadwiseStore = field(init=False)

    def __post_init__(self) -> None:
        """Start with an empty store and empty oracles."""
        self.random = np.random.default_rng(self.budget)
        shape = _core.LayerShape(
            N_HEAD, N_HEAD_KV, self.k_dim, self.v_dim, latent=self.latent, readers=self.readers
        )
        self.store = store_of(self.rules, [shape], MAX_TOKENS)
        _, (per_page,) = _core.page_geometry([shape], self.rules.kv_type)
        pages = N_HEAD_KV * _core.pages_for(self.budget, per_page)
        self.store.set_budgets([self.budget] * N_HEAD_KV, pages, N_SINKS, RECENT)
        self.heads = [
            ReferenceHead(self.rules, self.k_dim, self.v_dim, self.budget) for _ in range(N_HEAD_KV)
        ]

    def normal(self, *shape: int) -> Any:
        return self.random.standard_normal(shape, np.float32)

    def read(self, n_tokens: int) -> None:
        queries = [self.normal(n_tokens, N_HEAD, self.k_dim) * 2 for _ in range(self.readers)]
        k = self.normal(n_tokens, N_HEAD_KV, self.k_dim)
        v = k[:, :, : self.v_dim] if self.latent else self.normal(n_tokens, N_HEAD_KV, self.v_dim)
        options = Options(self.k_dim**-0.5)
        rows: list[Any] = [(k, None if self.latent else v), *[(None, None)] * (self.readers - 1)]
        outputs = [
            self.store.attend_alone(
                0, q, keys, values, options.scale, position=self.position, reader=i
            )
            for i, (q, (keys, values)) in enumerate(zip(queries, rows, strict=True))
        ]
        for number, head in enumerate(self.heads):
            group = slice(number * 2, number * 2 + 2)
            parts = [
                head.attend(queries[0][:, group], k[:, number], v[:, number], *self.at(options))
            ]
            if self.latent:  # V is rounded as a part of K, whose blocks differ from those of V.
                head.v = head.k[:, : self.v_dim]
                parts = []
            parts += [
                attend_kv_head(
                    q[:, group],
                    head.k,
                    head.v,
                    head.positions,
                    *self.at(options),
                    self.rules.score,
                    NEIGHBOURHOOD,
                )
                for q in queries[len(parts) :]
            ]
            head.give(sum(part.observed for part in parts), self.position)
            for output, part in zip(outputs, parts, strict=True):
                atol = OUTPUT_TOLERANCE[self.rules.kv_type]
                np.testing.assert_allclose(output[:, group], part.outputs, rtol=0, atol=atol)
            self.outputs = np.concatenate([part.outputs for part in parts])
            head.settle(n_tokens, self.store.positions(0, number))
            tolerance = self.rules.tolerance
            importance = self.store.importance(0, number)
            np.testing.assert_allclose(importance, head.importance, tolerance, tolerance)
        self.position += n_tokens
        assert self.store.used_bytes <= self.store.budget_bytes

    def at(self, options: Options) -> tuple[int, Options]:
        return self.position, options

    def truncate(self, position: int) -> None:
        self.position = position
        self.store.truncate(position)
        for head in self.heads:
            head.truncate(position)


@settings(max_examples=40)
@pytest.mark.parametrize(("latent", "readers"), [(True, 1), (False, 2), (True, 3)])
@given(
    kv_type=st.sampled_from(["f16", "q8_0"]),
    score=st.sampled_from(["mass", "attention", "products"]),
    by_values=st.booleans(),
    budget=st.integers(N_SINKS + RECENT + 3, 90),
    batches=st.lists(st.sampled_from([1, 1, 2, 17, 40, 48]), min_size=2, max_size=8),
    cut=st.floats(0.3, 1.0),
)
def test_what_is_kept_is_what_the_oracle_keeps(
    latent: bool,
    readers: int,
    kv_type: str,
    score: str,
    by_values: bool,
    budget: int,
    batches: list[int],
    cut: float,
) -> None:
    rules = Rules(score, kv_type, N_SINKS, RECENT, decay=0.9, by_values=by_values)
    layer = Layer(rules, budget, latent, readers)
    for n_tokens in batches:
        layer.read(n_tokens)
    layer.truncate(int(cut * layer.position))
    layer.read(20)
    layer.read(1)


@pytest.mark.parametrize(("latent", "readers"), [(True, 1), (False, 2)])
def test_losses_are_of_all_readers(latent: bool, readers: int) -> None:
    rules = Rules("mass", "f16", N_SINKS, RECENT, decay=0.9, by_values=True)
    layer = Layer(rules, MAX_ENTRIES, latent, readers)
    knots = [0, 4, 16, 40]
    layer.store.measure_losses(knots)
    layer.read(48)
    layer.read(40)
    head = layer.heads[-1]
    free = (head.positions >= N_SINKS) & (head.positions <= layer.position - 1 - RECENT)
    expected = losses_at(head.scores()[free], knots) / (layer.outputs**2).sum()
    actual = np.asarray(layer.store.losses()).reshape(N_HEAD_KV, len(knots))[-1]
    np.testing.assert_allclose(actual, expected, rtol=1e-3)


def test_v_that_is_a_part_of_k_takes_no_bytes() -> None:
    """V as a part of K takes no bytes: an MLA entry is 576 values, a position, an importance."""
    for kv_type, value_bytes in (("f16", 2.0), ("q8_0", 34 / 32)):
        latent = _core.LayerShape(16, 1, 576, 512, latent=True)
        page_bytes, (per_page,) = _core.page_geometry([latent], kv_type)
        assert page_bytes == per_page * (576 * value_bytes + 8)
        assert latent.entry_values == 576
