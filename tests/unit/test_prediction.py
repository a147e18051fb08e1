"""Scores are predicted from keys and values, and sums are collected to fit a predictor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entropykv import _core
from entropykv.errors import SettingsError
from entropykv.policy.policy import Importance
from tests.support.predicted_layers import LAYERS, N_SINKS, ROPES, SHARE_RTOL, PredictedLayer
from tests.support.reference import LEAST_SHARE, SHARE_ROUNDING, Rope

KERNELS = _core.available_kernels()
each_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_type = pytest.mark.parametrize("kv_type", ["f16", "q8_0"])


@each_kernel
@each_type
@each_rope
def test_a_score_is_what_the_linear_function_says(kernel: str, kv_type: str, rope: Rope) -> None:
    store = PredictedLayer(kernel, kv_type, rope)
    weights = store.weights()
    store.core.set_predictor(0, weights)
    for n_text in (37, 1, 60, 1, 90):
        store.read(n_text)
    for head in range(2):
        scores = store.core.importance(0, head)
        expected = store.expected(head, weights)
        assert expected.max() > 100 * expected.min()
        np.testing.assert_allclose(scores, expected, rtol=SHARE_RTOL)


@each_kernel
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_layers_of_other_shapes_are_predicted_by_what_they_have(
    kernel: str, layer: dict[str, Any]
) -> None:
    store = PredictedLayer(kernel, rope=Rope(24, offset=40, freq_base=500.0), **layer)
    k_dim, v_dim = layer.get("dims", (64, 64))
    latent = layer.get("latent", False)
    n = k_dim + 12 + 1 + 1 if latent else k_dim + v_dim + 12 + 2 + 1
    assert store.core.predictor_features(0) == n
    weights = store.weights()
    store.core.set_predictor(0, weights)
    for n_tokens in (50, 1, 30):
        store.read(n_tokens)
    for head in range(2):
        kept = store.core.positions(0, head)
        expected = store.expected(head, weights)[kept]
        np.testing.assert_allclose(store.core.importance(0, head), expected, rtol=SHARE_RTOL)


@pytest.mark.parametrize("by_values", [False, True])
def test_the_largest_predictions_are_kept_and_do_not_fade(by_values: bool) -> None:
    store = PredictedLayer(budget=N_SINKS + 4 + 33, by_values=by_values)
    weights = store.weights()
    store.core.set_predictor(0, weights)
    for n_tokens in (100, 1, 60, 80):
        store.read(n_tokens)
    for head in range(2):
        positions = store.core.positions(0, head)
        scores = store.expected(head, weights)
        np.testing.assert_allclose(
            store.core.importance(0, head), scores[positions], rtol=SHARE_RTOL
        )
        if by_values:
            scores = scores * np.linalg.norm(store.v[:, head], axis=1)
        best = np.sort(scores[N_SINKS:-4])[::-1][:33]
        # The last eviction made room for its own micro-batch only. Among scores that are equal up
        # to rounding, any entry may be kept.
        surely = np.flatnonzero(scores > best[-1] * (1 + 2 * SHARE_RTOL))
        surely = surely[(surely >= N_SINKS) & (surely < len(scores) - 4)]
        assert len(surely) >= 20
        assert set(surely) <= set(positions.tolist())


def test_scores_are_shares_whatever_is_predicted() -> None:
    store = PredictedLayer()
    weights = np.zeros((2, store.core.predictor_features(0)), np.float32)
    weights[0, -1], weights[1, -1] = 50.0, -50.0
    store.core.set_predictor(0, weights)
    store.read(20)
    assert set(store.core.importance(0, 0)) == {1.0}
    np.testing.assert_allclose(store.core.importance(0, 1), 1e-6, rtol=SHARE_ROUNDING)


def test_what_is_no_number_gets_the_least_score() -> None:
    store = PredictedLayer()
    store.core.set_predictor(0, store.weights())
    rows = np.ones((4, 2, 64), np.float32)
    rows[1, 0, 5], rows[2, 0, 7] = np.nan, np.inf
    store.core.attend_alone(0, np.ones((4, 4, 64), np.float32), rows, np.ones_like(rows), 1.0)
    scores = store.core.importance(0, 0)
    assert np.isfinite(scores).all()
    assert scores[1] == pytest.approx(1e-6, rel=SHARE_ROUNDING)
    assert (scores >= LEAST_SHARE).all()
    assert (scores <= 1.0).all()


def test_without_weights_all_entries_are_worth_the_same() -> None:
    store = PredictedLayer()
    assert not store.core.is_predicted
    store.read(30)
    assert set(store.core.importance(0, 0)) == {LEAST_SHARE}
    store.core.set_predictor(0, store.weights())
    assert store.core.is_predicted
    store.core.set_predictor(0, np.zeros((0, 0), np.float32))
    assert not store.core.is_predicted


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights[:1],
        lambda weights: weights[:, 1:],
        lambda weights: weights.reshape(-1),
        lambda weights: weights * np.float32(np.nan),
        lambda weights: weights * np.float32(np.inf),
    ],
)
def test_impossible_weights_are_refused_and_change_nothing(change: Any) -> None:
    store, other = PredictedLayer(), PredictedLayer()
    weights = store.weights()
    store.core.set_predictor(0, weights)
    other.core.set_predictor(0, weights)
    with pytest.raises(ValueError, match="a predictor's weights must be"):
        store.core.set_predictor(0, change(weights))
    store.random, other.random = np.random.default_rng(1), np.random.default_rng(1)
    store.read(30)
    other.read(30)
    np.testing.assert_array_equal(store.core.importance(0, 0), other.core.importance(0, 0))


@pytest.mark.parametrize("rope", [Rope(66), Rope(3)])
def test_rope_that_does_not_fit_is_refused(rope: Rope) -> None:
    store = PredictedLayer(rope=rope)
    store.read(20)
    assert store.core.count(0, 0) == 20
    for refused in (
        lambda: store.core.predictor_features(0),
        lambda: store.core.set_predictor(0, np.zeros((2, 131), np.float32)),
        lambda: store.core.collect_lessons(on=True),
    ):
        with pytest.raises(ValueError, match="do not fit the keys"):
            refused()
    store.read(20, 20)
    assert store.core.count(0, 0) == 40


def test_stores_of_a_pool_share_one_predictor() -> None:
    shape = _core.LayerShape(4, 2, 64, 64)
    pool = _core.SequencePool([shape], "f16", 256, 2)
    pool.set_pages(400)
    before = pool.scratch_bytes
    first, second = (PredictedLayer(rope=ROPES["none"], pool=pool) for _ in range(2))
    weights = first.weights()
    first.core.set_predictor(0, weights)
    assert pool.scratch_bytes - before >= weights.nbytes
    assert second.core.is_predicted
    second.read(40)
    scores = second.expected(0, weights)
    np.testing.assert_allclose(second.core.importance(0, 0), scores, rtol=SHARE_RTOL)
    first.core.fork_from(second.core.checkpoint(), ends=False)
    np.testing.assert_array_equal(first.core.importance(0, 0), second.core.importance(0, 0))


def test_shares_are_of_stores_that_predict() -> None:
    store = PredictedLayer(measure="mass")
    with pytest.raises(ValueError, match="predicts no shares: use the measure predicted"):
        store.core.predicted_shares(0, 0)
    for layer, head in [(0, 2), (0, -1), (1, 0)]:
        with pytest.raises((IndexError, ValueError)):
            PredictedLayer().core.predicted_shares(layer, head)


def test_scores_survive_turning_on_of_keys() -> None:
    store = PredictedLayer()
    store.core.set_predictor(0, store.weights())
    store.read(80)
    scores = store.core.importance(0, 1)
    ropes = [_core.RopeParams(**store.rope._asdict())]
    store.core.rebase(ropes, N_SINKS, 0, 20)
    np.testing.assert_array_equal(store.core.importance(0, 1), scores)


def test_losses_are_sums_of_what_is_not_kept() -> None:
    store = PredictedLayer(budget=60, counts_dropped=True)
    weights = store.weights()
    store.core.set_predictor(0, weights)
    knots = [0, 10, 40, 100]
    store.core.measure_losses(knots)
    for n_tokens in (80, 80, 1, 60):
        store.read(n_tokens)
    losses = store.core.losses().reshape(2, -1)
    for head in range(2):
        scores = np.sort(store.expected(head, weights)[N_SINKS:-4])[::-1]
        expected = [scores[knot:].sum() for knot in knots]
        # The store knows dropped scores only by octaves.
        np.testing.assert_allclose(losses[head], expected, rtol=0.1)


def test_predictions_take_no_echoes() -> None:
    """An echo is refused beside predictions, be they the only measure or added to another."""
    assert str(Importance.parse("predicted+values")) == "predicted+values"
    assert Importance.parse("predicted").predicts
    with pytest.raises(SettingsError, match=r"predicted .*takes no modifier echo"):
        Importance.parse("predicted+echo")
    with pytest.raises(SettingsError, match=r"predicts what a repetition would give, .*; use echo"):
        Importance.parse("mass+echo+predicted")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mass+predicted", "mass+predicted"),
        ("mass+predicted+values", "mass+values+predicted"),
        ("attention+predicted+values", "attention+values+predicted"),
    ],
)
def test_predictions_are_added_to_what_queries_gave(text: str, name: str) -> None:
    importance = Importance.parse(text)
    assert str(importance) == name
    assert importance.predicts
    # Choices for whole layers need `of_observed` or `repeats`, freeze schedules the former.
    assert not importance.of_observed
    assert not importance.repeats
    assert not Importance.parse("mass+values").predicts
    shape = _core.LayerShape(4, 2, 64, 64)
    store = _core.HeadwiseStore([shape], "f16", importance.settings(), 4, 4, 16, 64, 1)
    store.set_budgets([64] * 2, 8, 4, 4)
    rows = np.ones((9, 2, 64), np.float32)
    store.attend_alone(0, np.ones((9, 4, 64), np.float32), rows, rows, 1.0)
    assert store.predicted_shares(0, 0).shape == (9,)


@pytest.mark.parametrize("measure", ["products", "reconstruct"])
def test_predictions_are_not_added_to_what_is_no_sum_of_shares(measure: str) -> None:
    with pytest.raises(SettingsError, match=f"{measure} adds up no shares.*use it with mass or at"):
        Importance.parse(f"{measure}+predicted")
    settings = _core.ImportanceSettings(getattr(_core.ScoreKind, measure), expected_lookups=1.0)
    with pytest.raises(ValueError, match="go with the measures mass and attention"):
        _core.HeadwiseStore([_core.LayerShape(4, 2, 64, 64)], "f16", settings, 4, 4, 16, 64, 1)


@pytest.mark.parametrize("lookups", [-1.0, float("nan"), float("inf")])
def test_impossible_lookups_are_refused(lookups: float) -> None:
    settings = _core.ImportanceSettings(_core.ScoreKind.mass, expected_lookups=lookups)
    with pytest.raises(ValueError, match="expected_lookups must be 0 or a positive number"):
        _core.HeadwiseStore([_core.LayerShape(4, 2, 64, 64)], "f16", settings, 4, 4, 16, 64, 1)
