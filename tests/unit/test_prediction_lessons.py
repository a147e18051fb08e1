"""Lessons are sums of products of features and of the attention that echoes gave to entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entropykv import _core
from tests.support.predicted_layers import LAYERS, N_SINKS, PredictedLayer
from tests.support.reference import Rope, lesson_sums

each_kernel = pytest.mark.parametrize("kernel", _core.available_kernels())
TOLERANCE = {"f16": 1e-3, "q8_0": 2e-2}  # The logarithms of small shares may differ by this much.
each_type = pytest.mark.parametrize("kv_type", ["f16", "q8_0"])


@each_kernel
@each_type
@pytest.mark.parametrize(
    "layer",
    # The layer with a window has entries outside it, which get no attention.
    [{}, LAYERS["latent"], LAYERS["odd"], LAYERS["window"]],
    ids=["", "latent", "odd", "window"],
)
def test_lessons_are_sums_of_products_of_what_the_echo_looked_up(
    kernel: str, kv_type: str, layer: dict[str, Any]
) -> None:
    rope = Rope(24, offset=40, freq_base=500.0)
    store = PredictedLayer(kernel, kv_type, rope, **layer)
    store.core.collect_lessons(on=True)
    store.read(30)  # This text has no echo, and so gives no lessons.
    first = len(store.k)
    store.read(90, 120)
    count, sums = store.core.lessons(0)
    assert count == 90
    for head in range(2):
        positions, _, k, v = store.core.rows(0, head)
        told = store.told(k, v, positions)[first:]
        looked_up = store.told_by_queries(head)[1][first:]
        np.testing.assert_allclose(
            sums[head], lesson_sums(told, looked_up), rtol=TOLERANCE[kv_type], atol=1e-2
        )
    np.testing.assert_array_equal(sums, np.swapaxes(sums, 1, 2))


@each_type
@pytest.mark.parametrize("shift", [0, 25])
def test_lessons_of_stored_text_are_those_of_text_that_is_read(kv_type: str, shift: int) -> None:
    """An echo of stored text gives the lessons of text that is just read, at any RoPE position of
    the keys.
    """
    store = PredictedLayer(kv_type=kv_type)
    store.core.collect_lessons(on=True)
    store.read(40)
    store.read(60, 80)
    _, read = store.core.lessons(0)
    store.core.clear_lessons()
    if shift > 0:
        store.core.rebase([_core.RopeParams(**store.rope._asdict())], N_SINKS, 0, shift)
    store.core.teach_stored(40, 100, shift)
    count, stored = store.core.lessons(0)
    assert count == 60
    np.testing.assert_allclose(stored, read, rtol=TOLERANCE[kv_type], atol=0.5)
    store.core.teach_stored(0, 3, shift)
    assert store.core.lessons(0)[0] == 60  # Sinks give no lessons.
    store.core.teach_stored(100, 90, shift)
    assert store.core.lessons(0)[0] == 60


def test_stored_text_teaches_nothing_where_lessons_are_not_collected() -> None:
    store = PredictedLayer()
    store.read(40)
    with pytest.raises(ValueError, match="lessons are not collected"):
        store.core.teach_stored(0, 40, 0)
    store.core.collect_lessons(on=True)
    for bounds in ((0, 2**30 + 1, 0), (0, 40, -1)):
        with pytest.raises(ValueError, match=r"go from 0 to 2\^30"):
            store.core.teach_stored(*bounds)


def test_lessons_leave_sinks_out_and_do_not_ask_what_is_kept() -> None:
    whole, small = PredictedLayer(), PredictedLayer(budget=30)
    for store in (whole, small):
        store.core.collect_lessons(on=True)
        for _ in range(3):
            store.read(50, 60)
    counts = [store.core.lessons(0)[0] for store in (whole, small)]
    assert counts == [150 - N_SINKS] * 2
    assert small.core.count(0, 0) == 30


def test_lessons_begin_anew_and_give_their_memory_back() -> None:
    store = PredictedLayer()
    with pytest.raises(ValueError, match="lessons were not collected"):
        store.core.lessons(0)
    before = store.core.scratch_bytes
    store.core.collect_lessons(on=True)
    n = store.core.predictor_features(0) + 1
    assert store.core.scratch_bytes - before >= 2 * n * (n + 1) // 2 * 8
    store.read(40, 40)
    store.core.collect_lessons(on=False)
    store.read(40, 40)
    assert store.core.lessons(0)[0] == 40 - N_SINKS
    store.core.clear_lessons()
    with pytest.raises(ValueError, match="lessons were not collected"):
        store.core.lessons(0)
    store.core.collect_lessons(on=True)
    store.read(20, 20)
    store.core.clear_lessons()
    assert store.core.lessons(0)[0] == 0


@pytest.mark.parametrize("measure", ["reconstruct", "mass", "attention"])
def test_lessons_are_of_stores_that_predict(measure: str) -> None:
    with pytest.raises(ValueError, match="use the measure predicted"):
        PredictedLayer(measure=measure).core.collect_lessons(on=True)
    store = PredictedLayer(measure="mass", expected_lookups=0.5)
    store.core.collect_lessons(on=True)
    store.read(40, 50)
    assert store.core.lessons(0)[0] == 40 - N_SINKS


def test_lessons_are_the_same_whether_there_is_a_predictor() -> None:
    plain, predicting = PredictedLayer(), PredictedLayer()
    predicting.core.set_predictor(0, predicting.weights(bias=-1.0))
    predicting.random = np.random.default_rng(11)
    for store in (plain, predicting):
        store.core.collect_lessons(on=True)
        store.read(60, 70)
    np.testing.assert_array_equal(predicting.core.lessons(0)[1], plain.core.lessons(0)[1])


def test_lessons_of_a_pool_are_one() -> None:
    shape = _core.LayerShape(4, 2, 64, 64)
    pool = _core.SequencePool([shape], "f16", 256, 2)
    pool.set_pages(400)
    first, second = (PredictedLayer(pool=pool) for _ in range(2))
    second.random = np.random.default_rng(3)
    alone = PredictedLayer()
    before, of_store = pool.scratch_bytes, first.core.scratch_bytes
    for store in (first, alone):
        store.core.collect_lessons(on=True)
    n = first.core.predictor_features(0) + 1
    assert pool.scratch_bytes - before >= 2 * n * (n + 1) // 2 * 8
    assert first.core.scratch_bytes - of_store < pool.scratch_bytes - before
    first.read(50, 60)
    alone.read(50, 60)
    second.read(70, 80)
    alone.random, alone.k, alone.v = np.random.default_rng(3), alone.k[:0], alone.v[:0]
    alone.core.truncate(0)
    alone.read(70, 80)
    for store in (first, second):
        count, sums = store.core.lessons(0)
        assert count == 120 - 2 * N_SINKS
        np.testing.assert_allclose(sums, alone.core.lessons(0)[1], rtol=1e-6)
    second.core.collect_lessons(on=False)  # The setting applies to all stores of the pool.
    first.read(40, 40)
    assert first.core.lessons(0)[0] == 120 - 2 * N_SINKS
    second.core.clear_lessons()
    assert pool.scratch_bytes < before + 2 * n * (n + 1) // 2 * 8
    assert first.core.scratch_bytes > 0
    with pytest.raises(ValueError, match="lessons were not collected"):
        first.core.lessons(0)
