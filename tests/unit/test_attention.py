"""Attention over pages equals the numpy oracle: every kernel, every kind of layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entropykv import _core
from tests.support.attention_layers import KERNELS, KV_TYPES, MAX_TOKENS, Layer
from tests.support.reference import (
    F16_LARGEST,
    LEVELS,
    Options,
    round_f16,
    round_iq4_nl,
    round_q8_0,
    turned_blocks,
)

WINDOWS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 1},
    {"window": 50},
    {"window": 50, "chunked": True},
)


each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_type = pytest.mark.parametrize("kv_type", KV_TYPES)


@each_kernel
@each_type
@pytest.mark.parametrize(
    "dims",
    [
        *((dim, dim) for dim in (16, 20, 64, 80, 96, 128, 256)),
        *((64, 128), (128, 64), (20, 36), (192, 128), (48, 16)),
    ],
    ids=lambda dims: f"{dims[0]}x{dims[1]}",
)
def test_head_sizes(kernel: str, kv_type: str, dims: tuple[int, int]) -> None:
    Layer(kernel, kv_type, k_dim=dims[0], v_dim=dims[1]).check([70, 1, 5])


@each_kernel
@each_type
@pytest.mark.parametrize("group", [1, 4, 16, 128])
@pytest.mark.parametrize(
    "dims", [(80, 64), (576, 512), (48, 16), (33, 20)], ids=lambda dims: f"{dims[0]}x{dims[1]}"
)
def test_v_that_is_a_part_of_k(
    kernel: str, kv_type: str, group: int, dims: tuple[int, int]
) -> None:
    layer = Layer(
        kernel, kv_type, n_head_kv=1, group=group, k_dim=dims[0], v_dim=dims[1], latent=True
    )
    layer.check([20, 1, 5] if group == 128 else [70, 1, 5, 40, 1])


def test_v_cannot_be_more_than_the_k_that_it_is_a_part_of() -> None:
    with pytest.raises(ValueError, match="V cannot be more values than the K"):
        Layer(KERNELS[0], "f16", k_dim=64, v_dim=80, latent=True)


@each_kernel
@each_type
@pytest.mark.parametrize("n_readers", [2, 3])
@pytest.mark.parametrize("group", [1, 3, 12])
@pytest.mark.parametrize("window", WINDOWS[::2], ids=str)
def test_layers_that_attend_to_the_same_entries(
    kernel: str, kv_type: str, n_readers: int, group: int, window: dict[str, Any]
) -> None:
    """Layers that share K and V see every entry, and what they give to an entry adds up."""
    layer = Layer(kernel, kv_type, group=group, readers=n_readers, slack=2.0, **window)
    layer.check([70, 1, 5, 1, 1, 1, 130])


@pytest.mark.parametrize("reader", [-1, 2])
def test_readers_that_a_layer_does_not_have_are_refused(reader: int) -> None:
    layer = Layer(KERNELS[0], "f16", readers=2)
    with pytest.raises(ValueError, match="a reader that the layer does not have"):
        layer.store.attend_alone(0, layer.normal(3, 4, 64), None, None, 0.125, reader=reader)


@each_kernel
@each_type
@pytest.mark.parametrize("n_head_kv", [1, 2])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 11, 12, 16])
def test_query_heads_share_a_kv_head(kernel: str, kv_type: str, n_head_kv: int, group: int) -> None:
    Layer(kernel, kv_type, n_head_kv=n_head_kv, group=group, k_dim=32, v_dim=32).check([65, 1, 2])


@each_kernel
@each_type
@pytest.mark.parametrize(
    "batches",
    [
        *([n] for n in (1, 2, 7, 63, 64, 65, 200)),
        [1] * 70,
        [130, 7, 1, 1, 33, 1],
        [1, 200, 2, 64, 65, 1, 63],
        [MAX_TOKENS] * 4 + [1, 2, 1, 150, 1],  # Beyond 1024 entries, decode is split differently.
    ],
    ids=lambda batches: "_".join(map(str, batches[:7])),
)
def test_micro_batches(kernel: str, kv_type: str, batches: list[int]) -> None:
    Layer(kernel, kv_type, n_head_kv=1, group=3, k_dim=32, v_dim=32).check(batches)


@each_kernel
@each_type
@pytest.mark.parametrize("group", [3, 12])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_kinds_of_layers(
    kernel: str, kv_type: str, group: int, sinks: bool, window: dict[str, Any], softcap: float
) -> None:
    layer = Layer(kernel, kv_type, group=group, k_dim=32, v_dim=32, **window)
    logits = layer.normal(2 * group) * 3 if sinks else None
    layer.check([130, 1, 9, 1], softcap=softcap, sinks=logits)


@each_kernel
@each_type
@pytest.mark.parametrize("group", [1, 3, 12])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_logits_that_fall_with_the_distance(
    kernel: str, kv_type: str, group: int, softcap: float
) -> None:
    layer = Layer(kernel, kv_type, group=group, k_dim=32, v_dim=32)
    slopes = _core.alibi_slopes(2 * group, 8.0)
    layer.check([130, 1, 9, 1], softcap=softcap, slopes=slopes)


@pytest.mark.parametrize("n_head", [1, 2, 6, 8, 12, 71])
def test_slopes_are_those_of_alibi(n_head: int) -> None:
    """Slopes are powers of 2^(-8/n), where n is the largest power of two up to the number of heads;
    further heads take every second slope of 2n heads.
    """
    power = 2 ** int(np.log2(n_head))
    whole = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * power, 2))
    expected = np.concatenate([whole, between])[:n_head]
    np.testing.assert_allclose(_core.alibi_slopes(n_head, 8.0), expected, rtol=1e-5)


@each_kernel
@pytest.mark.parametrize("window", [0, 300])
def test_a_long_layer_of_many_heads_is_not_split_by_entries(kernel: str, window: int) -> None:
    layer = Layer(kernel, "f16", n_head_kv=4, k_dim=32, v_dim=32, window=window)
    layer.check([200, 200, 200, 3, 1, 1])


@each_kernel
@each_type
@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("observation_window", [1, 16, 40])
def test_importance_of_an_observation_window(
    kernel: str, kv_type: str, decay: float, observation_window: int
) -> None:
    layer = Layer(kernel, kv_type, decay=decay, observation_window=observation_window, group=3)
    layer.check([100, 17, 1, 1, 5, 70])
    assert (layer.importance > 0.0).any()


@each_kernel
@each_type
@pytest.mark.parametrize("measure", ["attention", "products"])
@pytest.mark.parametrize("window", [WINDOWS[0], *WINDOWS[2:]], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_importance_by_other_measures(
    kernel: str, kv_type: str, measure: str, window: dict[str, Any], softcap: float
) -> None:
    """By other measures, too, an entry gets nothing from queries that do not see it; |q.k| is taken
    after the soft cap.
    """
    layer = Layer(
        kernel, kv_type, measure=measure, decay=0.99, observation_window=80, group=3, **window
    )
    layer.importance_rtol = 1e-5 if kv_type == "f16" else 2e-3
    layer.check([100, 17, 1, 1, 1, 1, 5, 70, 1], softcap=softcap)
    assert (layer.importance > 0.0).any()


@each_kernel
@each_type
@pytest.mark.parametrize("sinks", [False, True])
def test_entropy_of_equal_logits_is_the_logarithm_of_what_is_seen(
    kernel: str, kv_type: str, sinks: bool
) -> None:
    layer = Layer(kernel, kv_type, query_size=0.0)
    zeros = np.zeros(4, np.float32) if sinks else None
    for n_before, n_tokens in ((0, 1), (1, 100), (101, 1)):
        layer.check([n_tokens], sinks=zeros)
        seen = n_before + 1 + np.arange(n_tokens) + sinks
        bits = np.log2(seen).mean()
        np.testing.assert_allclose(layer.store.entropies(0), [bits] * 4, rtol=0, atol=2e-5)


@each_kernel
@each_type
@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_large_logits(kernel: str, kv_type: str, softcap: float) -> None:
    """Logits far beyond what e^x can represent give finite results; softmax nearly selects a single
    entry.
    """
    # Float32 logits of 1000 have an error of 1e-4, and so have weights if two logits are close. A
    # query rounded to 16-bit integers (q8_0) changes them by another 1e-2, keys rounded to 8 bits
    # by several.
    atol, rtol = (2e-3, 1e-5) if kv_type == "f16" else (2e-2, 1e-2)
    layer = Layer(kernel, kv_type, query_size=300.0, slack=5.0, importance_rtol=rtol)
    logits = layer.normal(4) * 500
    for options in (Options(64**-0.5, softcap), Options(64**-0.5, softcap, sinks=logits)):
        for n_tokens in (70, 1, 5, 1):
            output, expected = layer.read(n_tokens, options=options)
            np.testing.assert_allclose(output, expected, rtol=0, atol=atol)


@each_kernel
@each_type
@pytest.mark.parametrize("size", [1e6, 1e30, np.inf])
def test_huge_keys_and_values_are_stored_finite(kernel: str, kv_type: str, size: float) -> None:
    """Huge keys and values are stored as finite numbers, because an infinity would turn later rows
    into NaN.
    """
    largest = F16_LARGEST if kv_type == "f16" else min(size, F16_LARGEST * 127)
    layer = Layer(kernel, kv_type, n_head_kv=1, group=1, k_dim=32, v_dim=32)
    ones = np.ones((2, 1, 32), np.float32)
    signs = np.array([1.0, -1.0], np.float32)[:, None, None]
    output = layer.store.attend_alone(0, ones, ones * signs * size, ones * signs * size, 32**-0.5)
    if kv_type == "q8_0/iq4_nl":
        # A zero of a rotated block is off by 1/127 of its scale, and the scale limits the sum.
        assert np.isfinite(output).all()
        most = F16_LARGEST * 127 / 32**0.5
        np.testing.assert_allclose(output.mean(), min(size, most), rtol=1e-2)
    else:
        np.testing.assert_allclose(output, np.full((2, 1, 32), largest), rtol=1e-3)
    later = layer.store.attend_alone(0, -ones[:1], ones[:1], ones[:1], 32**-0.5, position=2)
    assert np.isfinite(later).all()
    if kv_type != "q8_0/iq4_nl":
        np.testing.assert_allclose(later, np.full((1, 1, 32), -largest), rtol=1e-3)


@each_type
@pytest.mark.parametrize("batches", [[1] * 9, [90, 1, 6]])
def test_kernels_agree(kv_type: str, batches: list[int]) -> None:
    outputs = {}
    for kernel in KERNELS:
        layer = Layer(kernel, kv_type, k_dim=80, v_dim=48)
        outputs[kernel] = np.concatenate([layer.read(n)[0] for n in batches])
    for kernel in KERNELS[1:]:
        # Integer weights of q8_0 are rounded from floats whose last bits differ.
        atol = 1e-5 if kv_type == "f16" else 1e-4
        np.testing.assert_allclose(outputs[kernel], outputs[KERNELS[0]], rtol=0, atol=atol)


def test_rounding_of_the_oracle() -> None:
    """The oracle itself rounds f16 and q8_0 as ggml does."""
    values = np.array([1.0, 1.0 + 2**-11, 1.0 + 3 * 2**-11, 1e6, -1e30, 2**-25, 2**-24])
    np.testing.assert_array_equal(
        round_f16(values), [1.0, 1.0, 1.0 + 2**-9, 65504.0, -65504.0, 0.0, 2**-24]
    )
    row = np.zeros((1, 64))
    # With a scale of 1, halves are rounded away from zero.
    row[0, :5] = [127.0, 0.5, -0.5, 1.49, -2.5]
    row[0, 32] = 63.5  # This block has a scale of a half.
    row[0, 33] = 0.26
    rounded = round_q8_0(row)
    np.testing.assert_array_equal(rounded[0, :5], [127.0, 1.0, -1.0, 1.0, -3.0])
    np.testing.assert_array_equal(rounded[0, 32:34], [63.5, 0.5])
    np.testing.assert_array_equal(round_q8_0(np.zeros((2, 40))), np.zeros((2, 40)))


def test_rounding_of_the_oracle_to_levels() -> None:
    """The oracle stores a block whose rotated values are levels without an error, and others with
    an error of 6 to 9 %.
    """
    random = np.random.default_rng(1)
    codes = random.integers(0, 16, (50, 2, 32))
    codes[:, :, 7] = 0  # The scale is found from the lowest level.
    turned = LEVELS[codes] * np.float32(2.0**-6) * random.choice([-1, 1], (50, 2, 1))
    rows = turned_blocks(turned.reshape(50, 64))
    np.testing.assert_allclose(round_iq4_nl(rows), rows, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(round_iq4_nl(np.zeros((2, 40))), np.zeros((2, 40)))
    normal = random.normal(size=(200, 104))
    off = np.sqrt(((round_iq4_nl(normal) - normal) ** 2).mean())
    assert 0.06 < off < 0.09


@pytest.mark.parametrize("wrong", ["heads", "k_dim", "tokens", "dimensions", "v_dim"])
def test_rows_of_another_shape_are_refused(wrong: str) -> None:
    layer = Layer(KERNELS[0], "f16")
    q, k, v = layer.normal(3, 4, 64), layer.normal(3, 2, 64), layer.normal(3, 2, 64)
    bad = {
        "heads": (layer.normal(3, 2, 64), k, v),
        "k_dim": (q, layer.normal(3, 2, 63), v),
        "tokens": (q, layer.normal(2, 2, 64), v),
        "dimensions": (q, k, layer.normal(3, 128)),
        "v_dim": (q, k, layer.normal(3, 2, 65)),
    }
    with pytest.raises(ValueError, match=r"\[n_tokens\]\[heads\]\[dim\]"):
        layer.store.attend_alone(0, *bad[wrong], 0.125)
    assert layer.store.entries == 0


def test_a_kernel_or_type_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernels named mmx"):
        Layer("mmx", "f16")
    with pytest.raises(ValueError, match="kv_type must be f16 or q8_0 or q8_0/iq4_nl, not q4_0"):
        Layer(KERNELS[0], "q4_0")
