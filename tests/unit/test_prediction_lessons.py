"""Lessons for a predictor: sums of products of features and of what an echo gave to entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entropykv import _core
from tests.support.predicted_layers import LAYERS, N_SINKS, PredictedLayer
from tests.support.reference import Rope, lesson_sums

each_kernel = pytest.mark.parametrize("kernel", _core.available_kernels())
each_type = pytest.mark.parametrize("kv_type", ["f16", "q8_0"])


@each_kernel
@each_type
@pytest.mark.parametrize(
    "layer",
    [{}, LAYERS["latent"], LAYERS["odd"], LAYERS["window"]],  # what left a window got nothing
    ids=["", "latent", "odd", "window"],
)
def test_lessons_are_sums_of_products_of_what_the_echo_looked_up(
    kernel: str, kv_type: str, layer: dict[str, Any]
) -> None:
    rope = Rope(24, offset=40, freq_base=500.0)
    store = PredictedLayer(kernel, kv_type, rope, "reconstruct", **layer)
    store.core.collect_lessons(on=True)
    store.read(30)  # without an echo: of no lesson
    first = len(store.k)
    store.read(90, 120)
    count, sums = store.core.lessons(0)
    assert count == 90
    for head in range(2):
        positions, observed, k, v = store.core.rows(0, head)
        told = store.told(k, v, positions)[first:]
        np.testing.assert_allclose(
            sums[head], lesson_sums(told, observed[first:]), rtol=1e-4, atol=1e-3
        )
    np.testing.assert_array_equal(sums, np.swapaxes(sums, 1, 2))


def test_lessons_leave_sinks_out_and_do_not_ask_what_is_kept() -> None:
    whole, small = (
        PredictedLayer(measure="reconstruct"),
        PredictedLayer(measure="reconstruct", budget=30),
    )
    for store in (whole, small):
        store.core.collect_lessons(on=True)
        for _ in range(3):
            store.read(50, 60)
    counts = [store.core.lessons(0)[0] for store in (whole, small)]
    assert counts == [150 - N_SINKS] * 2
    assert small.core.count(0, 0) == 30


def test_lessons_begin_anew_and_give_their_memory_back() -> None:
    store = PredictedLayer(measure="reconstruct")
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
    with pytest.raises(ValueError, match="use the measure reconstruct"):
        PredictedLayer().core.collect_lessons(on=True)
