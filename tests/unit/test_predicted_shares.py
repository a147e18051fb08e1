"""A score has two parts: attention received from queries, and the share that later queries are
expected to give.

The first part decays; the second one stays, and an echo can only raise it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entropykv import _core
from tests.support.predicted_layers import LAYERS, N_SINKS, ROPES, SHARE_RTOL, PredictedLayer
from tests.support.reference import LEAST_SHARE, SHARE_ROUNDING, Rope

each_kernel = pytest.mark.parametrize("kernel", _core.available_kernels())
each_type = pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
MEASURES: dict[str, dict[str, Any]] = {
    "predicted": {},
    "mass": {"expected_lookups": 0.5},
    "attention": {"expected_lookups": 3.0},
}
each_measure = pytest.mark.parametrize("measure", MEASURES)
GIVEN_RTOL = 2e-3
"""The relative tolerance of attention received, which each micro-batch rounds to 12 bits."""


def layer_of(measure: str, *more: Any, **named: Any) -> PredictedLayer:
    return PredictedLayer(*more, measure=measure, **MEASURES[measure], **named)


@each_kernel
@each_type
@each_measure
@pytest.mark.parametrize(
    "layer", [{}, LAYERS["readers"], LAYERS["window"]], ids=["", "readers", "window"]
)
def test_an_echo_raises_shares_and_gives_nothing(
    kernel: str, kv_type: str, measure: str, layer: dict[str, Any]
) -> None:
    store = layer_of(measure, kernel, kv_type, **layer)
    weights = store.weights(bias=-5.0)
    store.core.set_predictor(0, weights)
    for n_text, n_echo in [(70, 90), (50, 0), (100, 120), (2, 40), (1, 0), (1, 33), (0, 60)]:
        store.read(n_text, n_echo)
    atol = {"f16": 2e-5, "q8_0": 1e-4}[kv_type]
    raised = 0
    for head in range(2):
        kept = store.core.positions(0, head)
        given, looked_up = (rows[kept] for rows in store.told_by_queries(head))
        predicted = store.expected(head, weights)[kept]
        expected = np.maximum(predicted, looked_up)
        np.testing.assert_allclose(store.shares(head), expected, rtol=SHARE_RTOL, atol=atol)
        raised += int((looked_up > 2 * predicted).sum())
        assert (predicted > 2 * looked_up).any()
        if measure == "predicted":
            np.testing.assert_array_equal(store.core.importance(0, head), store.shares(head))
        else:
            assert given.max() > 1e-3
            np.testing.assert_allclose(store.given(head), given, rtol=GIVEN_RTOL, atol=2 * atol)
    assert raised > 10


@each_measure
def test_an_echo_needs_no_predictor(measure: str) -> None:
    store = layer_of(measure)
    store.read(60, 80)
    for head in range(2):
        _, looked_up = store.told_by_queries(head)
        shares = store.shares(head)
        np.testing.assert_allclose(shares, np.maximum(looked_up, LEAST_SHARE), SHARE_RTOL, 2e-5)
        assert shares.max() > 0.01


@pytest.mark.parametrize("layer", [{}, LAYERS["readers"]], ids=["", "readers"])
def test_an_echo_of_one_token_tells_nothing(layer: dict[str, Any]) -> None:
    store = layer_of("mass", **layer)
    store.read(60, 80)
    shares, scores = store.shares(0), store.core.importance(0, 0)
    for _ in range(3):
        store.read(0, 1)
    np.testing.assert_array_equal(store.shares(0), shares)
    np.testing.assert_array_equal(store.core.importance(0, 0), scores)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_an_echo_alone_leaves_what_queries_gave(decay: float) -> None:
    store = layer_of("mass", decay=decay)
    store.read(120)
    given = store.given(0)
    assert given.max() > 1e-3
    store.read(0, 90)
    np.testing.assert_allclose(store.given(0), given, rtol=1e-5, atol=1e-7)


def test_what_queries_gave_decays_and_shares_stay() -> None:
    store = layer_of("attention", decay=0.8)
    store.core.set_predictor(0, store.weights())
    store.read(60, 70)
    shares, given = store.shares(0), store.given(0)
    for n_tokens in (20, 1, 1, 1, 1, 30):
        store.read(n_tokens)
    expected, _ = store.told_by_queries(0)
    np.testing.assert_array_equal(store.shares(0)[:60], shares)
    np.testing.assert_allclose(store.given(0), expected, rtol=GIVEN_RTOL, atol=2e-5)
    # These queries attend only to their own keys, so that only the decay changes the values.
    alone = layer_of("attention", decay=0.8)
    alone.read(60)
    alone.core.rebase([_core.RopeParams(**alone.rope._asdict())], N_SINKS, 0, 0)
    before, far = alone.given(0), np.full((20, 2, 64), 0.0, np.float32)
    queries, far[:] = np.full((20, 4, 64), 3.0, np.float32), 3.0
    alone.core.attend_alone(0, queries, far, far, 1.0, position=60)
    np.testing.assert_allclose(alone.given(0)[:60], before * 0.8**20, rtol=GIVEN_RTOL, atol=1e-6)
    assert given.max() > 0.0


def test_losses_and_evictions_go_by_both_parts() -> None:
    """An entry to which only queries of the text attended is kept, and so is one to which only an
    echo did.
    """
    store = layer_of("attention", budget=N_SINKS + 4 + 3)
    k = np.zeros((140, 2, 64), np.float32)
    q = np.zeros((140, 4, 64), np.float32)
    k[20, :, 0], q[70, :, 0] = 30.0, 30.0  # A query of the text attends to this key.
    k[25, :, 1], q[110, :, 1] = 30.0, 30.0  # A query of the echo attends to this key.
    store.core.attend_alone(0, q, k, k, 1.0, n_echo=60)
    for head in range(2):
        kept = set(store.core.positions(0, head).tolist())
        assert {20, 25, 76, 77, 78, 79} | set(range(N_SINKS)) <= kept


@each_measure
def test_saving_keeps_both_parts(measure: str) -> None:
    store = read_layer(measure)
    states = [bytearray(store.core.save_head(0, head)) for head in range(2)]
    loaded = layer_of(measure)
    loaded.core.begin_load([110, 110], states, [600, 600])
    for head, state in enumerate(states):
        assert loaded.core.state_problem(0, 110, state, 110) == ""
        loaded.core.load_head(0, head, 110, state)
    check_same(loaded, store)


@each_measure
def test_forks_keep_both_parts_and_change_their_own_alone(measure: str) -> None:
    pool = _core.SequencePool([_core.LayerShape(4, 2, 64, 64)], "f16", 256, 2)
    pool.set_pages(400)
    store, fork = read_layer(measure, pool=pool), layer_of(measure, pool=pool)
    shares, scores = store.shares(0), store.core.importance(0, 0)
    fork.core.fork_from(store.core.checkpoint(), ends=False)
    check_same(fork, store)
    fork.k, fork.v, fork.random = store.k, store.v, np.random.default_rng(8)
    fork.read(0, 60)
    fork.read(40)
    assert (fork.shares(0)[:110] > shares).any()
    np.testing.assert_array_equal(store.shares(0), shares)
    np.testing.assert_array_equal(store.core.importance(0, 0), scores)


@each_measure
def test_freezing_keeps_shares_while_what_queries_gave_decays(measure: str) -> None:
    store = read_layer(measure, freezing=_core.FreezeSettings("q8_0", 0, 0))
    shares, given = store.shares(0), store.given(0)
    store.core.freeze_all(109)
    assert store.core.count(0, 0) == 0
    store.core.restore(300)
    np.testing.assert_array_equal(store.shares(0), shares)
    if measure != "predicted":
        assert given.max() > 1e-3
        now = store.given(0)
        assert (now <= given + 1e-6).all()
        np.testing.assert_allclose(now[given > 1e-4], given[given > 1e-4] * 0.9**191, atol=1e-6)


def read_layer(measure: str, **named: Any) -> PredictedLayer:
    """Return a layer that has read 110 tokens, some of them with an echo."""
    store = layer_of(measure, **named)
    store.core.set_predictor(0, store.weights())
    store.read(50, 60)
    store.read(60)
    return store


def check_same(one: PredictedLayer, other: PredictedLayer) -> None:
    for head in range(2):
        np.testing.assert_array_equal(one.shares(head), other.shares(head))
        scores = one.core.importance(0, head)
        np.testing.assert_array_equal(scores, other.core.importance(0, head))
        assert len(set(scores)) > 20


@each_kernel
@pytest.mark.parametrize("kv_type", ["f16"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("layer", [{}, LAYERS["latent"], LAYERS["odd"]], ids=["", "latent", "odd"])
def test_what_is_stored_is_predicted_as_at_reading(
    kernel: str, kv_type: str, rope: Rope, layer: dict[str, Any]
) -> None:
    early = PredictedLayer(kernel, kv_type, rope, **layer)
    late = PredictedLayer(kernel, kv_type, rope, **layer)
    weights = early.weights()
    late.random = np.random.default_rng(11)
    early.random = np.random.default_rng(11)
    early.core.set_predictor(0, weights)
    for store in (early, late):
        store.read(70)
        store.read(30)
    assert set(late.shares(0)) == {LEAST_SHARE}
    late.core.set_predictor(0, weights)
    late.core.predict_stored(100, 0)
    for head in range(2):
        np.testing.assert_allclose(late.shares(head), early.shares(head), rtol=2e-2)
        np.testing.assert_allclose(late.shares(head), late.expected(head, weights), rtol=2e-2)


@pytest.mark.parametrize("shift", [0, 25])
def test_stored_entries_are_predicted_where_rope_has_seen_them(shift: int) -> None:
    """Stored entries are predicted at the positions that RoPE gives them.

    When keys are rotated, sinks keep their positions, and the oldest other entries move next to
    them.
    """
    store = layer_of("mass")
    weights = store.weights()
    store.read(80)
    given = store.given(0)
    store.core.rebase([_core.RopeParams(**store.rope._asdict())], N_SINKS, 0, shift)
    store.core.set_predictor(0, weights)
    store.core.predict_stored(80, shift)
    for head in range(2):
        expected = store.expected(head, weights)
        np.testing.assert_allclose(store.shares(head), expected, rtol=2e-2)
    np.testing.assert_allclose(store.given(0), given, rtol=1e-5, atol=1e-6)
    if shift > 0:  # At another position, the prediction would be different.
        store.core.predict_stored(80, 0)
        assert (store.shares(head) > 1.1 * expected).any()


def test_larger_shares_of_an_echo_stay_when_stored_entries_are_predicted() -> None:
    store = PredictedLayer()
    store.read(60, 80)
    shown = store.shares(0)
    weights = store.weights(bias=-4.0)
    store.core.predict_stored(60, 0)  # Without a predictor, nothing changes.
    np.testing.assert_array_equal(store.shares(0), shown)
    store.core.set_predictor(0, weights)
    store.core.predict_stored(60, 0)
    predicted = store.expected(0, weights)
    expected = np.maximum(shown, predicted)
    np.testing.assert_allclose(store.shares(0), expected, rtol=2e-2)
    assert (shown > 2 * predicted).any()
    assert (predicted > 2 * shown).any()


def test_a_fork_predicts_for_itself() -> None:
    pool = _core.SequencePool([_core.LayerShape(4, 2, 64, 64)], "f16", 256, 2)
    pool.set_pages(400)
    store, fork = (PredictedLayer(pool=pool) for _ in range(2))
    store.read(90)
    fork.core.fork_from(store.core.checkpoint(), ends=False)
    weights = store.weights()
    fork.core.set_predictor(0, weights)
    fork.core.predict_stored(90, 0)
    np.testing.assert_allclose(fork.shares(1), store.expected(1, weights), rtol=2e-2)
    assert set(store.shares(1)) == {LEAST_SHARE}
    store.core.predict_stored(90, 0)
    check_same(fork, store)


@pytest.mark.parametrize(
    ("n_positions", "shift"), [(79, 0), (0, 0), (-1, 0), (2**30 + 1, 0), (80, -1), (80, 2**30 + 1)]
)
def test_another_text_than_the_stored_one_is_refused(n_positions: int, shift: int) -> None:
    store = PredictedLayer()
    store.read(80)
    store.core.set_predictor(0, store.weights())
    with pytest.raises(ValueError, match=r"beyond the positions of the text|go from 0 to 2\^30"):
        store.core.predict_stored(n_positions, shift)
    assert set(store.shares(0)) == {LEAST_SHARE}


def test_shares_are_rounded_by_no_more_than_is_said() -> None:
    store = PredictedLayer(rope=ROPES["none"])
    weights = np.zeros((2, store.core.predictor_features(0)), np.float32)
    for log in np.linspace(-13.0, 0.0, 27):
        weights[:, -1] = log
        store.core.set_predictor(0, weights)
        store.read(1)
    logs = np.linspace(-13.0, 0.0, 27)
    np.testing.assert_allclose(store.shares(0), np.exp(logs), rtol=SHARE_ROUNDING + 1e-6)


def test_a_smaller_limit_of_frozen_entries_drops_those_of_small_scores() -> None:
    """A smaller limit of cold storage drops frozen entries with small scores.

    The first half has large predicted shares; the second half only received a little attention.
    """
    store = layer_of("mass", freezing=_core.FreezeSettings("q8_0", 0, 0))
    weights = np.zeros((2, store.core.predictor_features(0)), np.float32)
    k, q = np.zeros((240, 2, 64), np.float32), np.ones((240, 4, 64), np.float32)
    for half, log in enumerate((-0.1, -12.0)):
        weights[:, -1], k[:, :, 0] = log, 8.0 * half
        store.core.set_predictor(0, weights)
        store.core.attend_alone(0, q, k, k, 1.0, position=240 * half)
    store.core.freeze_all(479)
    states = [bytearray(store.core.save_head(0, head)) for head in range(2)]
    limit = store.core.cold_bytes * 6 // 10
    loaded = layer_of("mass", freezing=_core.FreezeSettings("q8_0", limit, 0))
    loaded.core.begin_load([0, 0], states, [600, 600])
    for head, state in enumerate(states):
        assert loaded.core.state_problem(0, 0, state, 480) == ""
        loaded.core.load_head(0, head, 0, state)
    loaded.core.restore(500)
    for head in range(2):
        kept = loaded.core.positions(0, head)
        assert 100 < len(kept) < 400
        assert (kept < 240).mean() > 0.8
