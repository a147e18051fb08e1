"""Keys with large biases are stored without them, which changes nothing but their precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv import _core
from tests.support import reference
from tests.support.attention_layers import KERNELS, Layer

Array = npt.NDArray[np.float32]

ROPES = st.builds(
    reference.Rope,
    n_dims=st.sampled_from([0, 8, 16]),
    offset=st.sampled_from([0, 4]),
    neox=st.booleans(),
    n_ctx_orig=st.just(2048),
    freq_base=st.sampled_from([100.0, 10000.0, 1e6]),
    freq_scale=st.sampled_from([1.0, 0.25]),
    ext_factor=st.sampled_from([0.0, 1.0]),
    beta_fast=st.just(32.0),
    beta_slow=st.just(1.0),
    freq_factors=st.just(()),
)


@given(rope=ROPES, seed=st.integers(0, 1 << 16), magnitude=st.sampled_from([1.0, 1.2]))
@settings(max_examples=60)
def test_centres_and_units_are_those_of_the_oracle(
    rope: reference.Rope, seed: int, magnitude: float
) -> None:
    random = np.random.default_rng(seed)
    bias = random.standard_normal(20) * random.choice([0.1, 1.0, 200.0], 20)
    spread = random.uniform(0.1, 2.0, 20)
    params = _core.RopeParams(**rope._asdict())
    centre, unit = _core.key_centre(bias.tolist(), spread.tolist(), params, magnitude)
    expected = reference.key_centre(bias, spread, rope, magnitude)
    np.testing.assert_allclose(centre, expected.centre, rtol=1e-4, atol=1e-4 * abs(bias).max())
    np.testing.assert_allclose(unit, expected.unit, rtol=1e-3)


@pytest.mark.parametrize(
    ("bias", "spread", "rope"),
    [
        ([1.0, 2.0], [1.0], _core.RopeParams(0)),
        ([1.0, 2.0], [1.0, 1.0], _core.RopeParams(4)),
        ([1.0, float("nan")], [1.0, 1.0], _core.RopeParams(2)),
        ([1.0, 2.0], [1.0, float("inf")], _core.RopeParams(2)),
    ],
)
def test_impossible_biases_are_refused(
    bias: list[float], spread: list[float], rope: _core.RopeParams
) -> None:
    with pytest.raises(ValueError, match="a bias of keys"):
        _core.key_centre(bias, spread, rope)


def biases(n_heads: int, k_dim: int) -> Array:
    """Return biases [n_heads][k_dim]: large in a few channels, which differ between KV heads."""
    bias = np.random.default_rng(7).standard_normal((n_heads, k_dim)).astype(np.float32)
    for head in range(n_heads):
        bias[head, [1 + head, k_dim // 2 + head]] = 150.0, -90.0
    return bias


def centres(bias: Array) -> Array:
    units = np.random.default_rng(8).uniform(0.5, 4.0, bias.shape).astype(np.float32)
    return np.stack([bias * np.float32(0.95), units], axis=1)


def centred(kernel: str, kv_type: str = "q8_0", *, is_centred: bool = True, **shape: Any) -> Layer:
    bias = biases(shape.get("n_head_kv", 2), shape.get("k_dim", 64))
    of = centres(bias) if is_centred else None
    # Queries are multiplied by the channels' units before they are rounded: errors are larger.
    return Layer(kernel, kv_type, key_bias=bias, key_centres=of, slack=8.0, **shape)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("k_dim", [16, 36, 64, 128])
@pytest.mark.parametrize("group", [1, 5])
def test_attention_is_that_over_the_keys_as_they_were(kernel: str, k_dim: int, group: int) -> None:
    layer = centred(kernel, k_dim=k_dim, group=group, query_size=0.3)
    layer.check([70, 1, 5, 40, 1, 1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_slopes_and_windows(kernel: str) -> None:
    """With sinks, slopes and windows, attention is that over whole keys: logits of sinks, which are
    no keys, count beside logits with the biases.
    """
    sinks = np.array([30.0, -20.0, 3.0, 0.0], np.float32)
    slopes = np.array([0.5, 0.1, 0.0, 0.02], np.float32)
    centred(kernel, window=50, query_size=0.1).check([70, 1, 5], sinks=sinks, slopes=slopes)


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_biases_cost_no_precision(kernel: str) -> None:
    """Large biases cost q8_0 no precision in other channels, if keys are stored without them."""
    errors = {}
    for is_centred in (True, False):
        layer = centred(kernel, is_centred=is_centred, query_size=1.0)
        exact = Layer(kernel, "f16", key_bias=biases(2, 64), query_size=1.0)
        output, _ = layer.read(200)
        expected, _ = exact.read(200)
        errors[is_centred] = float(np.sqrt(np.mean((output - expected) ** 2)))
    assert errors[True] < 0.02
    assert errors[False] > 4 * errors[True]


def store_of(of: Array | None, measure: str, **settings_: Any) -> _core.HeadwiseStore:
    store = _core.HeadwiseStore(
        [_core.LayerShape(4, 2, 32, 32)],
        "f16",
        _core.ImportanceSettings(getattr(_core.ScoreKind, measure), **settings_),
        n_sinks=3,
        recent_window=6,
        max_tokens=96,
        max_entries=400,
        n_threads=1,
        ropes=[_core.RopeParams(32, neox=True, freq_base=1e6)],
        key_centres=() if of is None else [of],
    )
    store.set_budgets([40, 40], 6, 3, 6)
    return store


@pytest.mark.parametrize("measure", ["mass", "attention"])
def test_who_stays_does_not_depend_on_centres(measure: str) -> None:
    random = np.random.default_rng(2)
    bias = biases(2, 32) / 30
    kept = []
    texts = [
        [random.standard_normal((n, heads, 32), dtype=np.float32) for heads in (4, 2, 2)]
        for n in (90, 60, 1, 1, 30)
    ]
    for of in (None, centres(bias)):
        store = store_of(of, measure, by_values=True)
        position = 0
        for q, k, v in texts:
            store.attend_alone(0, q, k + bias, v, 32**-0.5, position=position)
            position += len(q)
        kept.append([store.positions(0, head) for head in range(2)])
    for ours, theirs in zip(*kept, strict=True):
        assert len(ours) == len(theirs)
        assert len(set(ours.tolist()) & set(theirs.tolist())) >= len(ours) - 1


def test_rows_are_keys_as_they_were_also_at_other_positions() -> None:
    random = np.random.default_rng(3)
    bias = biases(2, 32)
    store = store_of(centres(bias), "mass")
    k = random.standard_normal((30, 2, 32), dtype=np.float32) + bias
    q = random.standard_normal((30, 4, 32), dtype=np.float32)
    store.attend_alone(0, q, k, k, 0.1)
    rope = reference.Rope(32, neox=True, freq_base=1e6)
    for shift in (0, 7):
        if shift:
            store.rebase([_core.RopeParams(**rope._asdict())], 3, 0, shift)
        at = reference.rope_positions(np.arange(30), 3, shift)
        for head in range(2):
            positions, _, rows, _ = store.rows(0, head)
            assert positions.tolist() == list(range(30))
            expected = reference.rotated(k[:, head], at - np.arange(30), rope)
            np.testing.assert_allclose(rows, expected, rtol=2e-3, atol=0.1)


@pytest.mark.parametrize(
    ("of", "measure"),
    [
        (np.ones((1, 2, 32), np.float32), "mass"),
        (np.ones((2, 2, 31), np.float32), "mass"),
        (np.zeros((2, 2, 32), np.float32), "mass"),
        (np.ones((2, 2, 32), np.float32), "products"),
        (np.ones((2, 3, 32), np.float32), "mass"),
    ],
)
def test_centres_that_do_not_fit_are_refused(of: Array, measure: str) -> None:
    with pytest.raises(ValueError, match="key centres"):
        store_of(of, measure)


def test_oracle_subtracts_the_mean_of_the_rotated_bias() -> None:
    # Four positions make a whole turn.
    rope = reference.Rope(2, freq_base=1.0, freq_scale=np.pi / 2)
    of = reference.key_centre(np.array([3.0, 4.0, 9.0]), np.zeros(3), rope, 1.0)
    np.testing.assert_allclose(of.centre, [0.0, 0.0, 9.0], atol=1e-9)
    np.testing.assert_allclose(of.unit[:2], (25 / 2) ** (0.75 / 2))
    np.testing.assert_allclose(of.unit[2], (25 / 2) ** (0.75 / 2) / 256**0.75)
