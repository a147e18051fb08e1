"""Heads of a layer can choose together, and layers get budgets by their entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv.policy.online import changes_budgets
from entropykv.policy.policy import POLICIES
from entropykv.policy.sources.kim_jung import LAYER_RANGE, LayerEntropies, layer_weights
from tests.support import reference
from tests.support.online_layers import Layers, plan_for
from tests.support.reference import Rules
from tests.support.stores import HEADS, LAYERS, MAX_ENTRIES, MAX_TOKENS, N_SINKS, RECENT, SHAPES

budgets_of_layers = st.lists(st.integers(2 * (N_SINKS + 1), 150), min_size=3, max_size=3)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("attend"), st.integers(1, MAX_TOKENS)),
        st.tuples(st.just("decode"), st.integers(1, 20)),
        st.tuples(st.just("resize"), budgets_of_layers),
        st.tuples(st.just("truncate"), st.floats(0.0, 1.0)),
        st.tuples(st.just("reload"), st.just(0)),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("measure", ["attention", "mass", "products"])
@settings(max_examples=25)
@given(
    budgets=budgets_of_layers,
    todo=steps,
    decay=st.sampled_from([0.0, 0.99, 1.0]),
    recent=st.sampled_from([RECENT, MAX_ENTRIES]),
    shared=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_heads_of_a_layer_choose_together(
    measure: str,
    kv_type: str,
    budgets: list[int],
    todo: list[tuple[str, Any]],
    decay: float,
    recent: int,
    shared: bool,
    seed: int,
) -> None:
    """KV heads of a layer keep the same entries, chosen by the sum of the scores of all heads."""
    rules = Rules(measure, kv_type, N_SINKS, recent, decay=decay, own_windows=True)
    rules.observation_window = 128
    layers = Layers(rules, budgets, shared=shared, seed=seed)
    for action, value in [("attend", 60), *todo]:
        match action:
            case "attend":
                layers.attend(value)
            case "decode":
                for _ in range(value):
                    layers.attend(1)
            case "resize":
                layers.set_budgets(value)
            case "truncate":
                layers.truncate(round(value * layers.position))
            case "reload":
                layers.reload()
        layers.check()


@given(st.lists(st.floats(0.01, 15.0), min_size=2, max_size=40))
def test_layer_weights_are_the_shares_of_the_document(bits: list[float]) -> None:
    entropies = np.array(bits)
    for limits in (None, LAYER_RANGE) if entropies.min() < entropies.max() else (None,):
        weights = np.array(layer_weights(entropies, in_range=limits is not None))
        expected = reference.layer_shares(entropies, 1000.0, limits)
        np.testing.assert_allclose(1000.0 * weights / weights.sum(), expected, rtol=1e-9)


def test_layer_weights_by_hand() -> None:
    assert layer_weights(np.array([1.0, 2.0, 5.0]), in_range=False) == [1, 2, 5]
    assert layer_weights(np.array([1.0, 2.0, 5.0]), in_range=True) == [8, 38, 128]
    for in_range in (False, True):
        assert len(set(layer_weights(np.full(3, 2.0), in_range=in_range))) == 1
        assert len(set(layer_weights(np.zeros(3), in_range=in_range))) == 1


@pytest.mark.parametrize("policy", ["layer", "layer-range"])
def test_layers_share_by_the_mean_entropy_of_the_prompt(policy: str) -> None:
    plan = plan_for(policy, 100)
    layers = Layers(
        Rules("attention", recent_window=MAX_ENTRIES, decay=1.0, own_windows=True),
        [400] * 3,
        shared=True,
    )
    layers.quiet = 1
    layers.store.track_entropy(True)
    online = LayerEntropies(layers.store, LAYERS, MAX_ENTRIES, POLICIES[policy].rule)
    assert online.budgets(plan) is None
    observed: list[Any] = [[] for _ in LAYERS]
    for n_tokens in (96, 40, 7, 1, 64):  # Micro-batches that are too short do not count.
        before = layers.position
        layers.attend(n_tokens)
        if changes_budgets(n_tokens, before, MAX_TOKENS):
            online.observe(n_tokens, budgets_change=True)
            for layer in range(len(LAYERS)):
                observed[layer].append(layers.store.row_entropies(layer))
    means = np.array([np.concatenate(rows).mean() for rows in observed])
    seen, followed = np.split(online.state(), 2)
    np.testing.assert_array_equal(seen, followed)
    rows, *sums = seen
    assert rows == 200
    np.testing.assert_allclose(np.array(sums) / rows, means, rtol=1e-6)
    shares = online.budgets(plan)
    assert shares is not None
    pages = [*plan.entries_per_page]
    reference.check_shares(shares, 100, MAX_ENTRIES, plan.floor_entries, pages)
    budgets = dict(zip(HEADS, shares, strict=True))
    for layer, shape in enumerate(SHAPES):
        assert len({budgets[layer, head] for head in range(shape[1])}) == 1
    by_layer = [budgets[layer, 0] for layer in range(3)]
    assert means.argmax() == 1
    assert by_layer[1] > max(by_layer[0], by_layer[2])
    twin = LayerEntropies(Layers(Rules("mass"), [40] * 3).store, LAYERS, 400, POLICIES[policy].rule)
    layers.attend(1)
    online.observe(1, budgets_change=False)
    assert online.budgets(plan) == shares  # The new state does not change the budgets yet.
    twin.load(online.state())
    assert twin.budgets(plan) == shares
    np.testing.assert_array_equal(twin.state(), online.state())
    online.forget()
    assert online.budgets(plan) is None
