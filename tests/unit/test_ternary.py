"""Packed ternary weights equal those of independent packers and of gguf's dequantisers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv.convert import ternary
from tests.support.hf_files import pack_hf
from tests.support.i2s_files import pack_i2s

Int8s = npt.NDArray[np.int8]


def random_ternary(rows: int, columns: int, seed: int = 0) -> Int8s:
    return np.random.default_rng(seed).integers(-1, 2, (rows, columns)).astype(np.int8)


# In 8 x 48 and 4 x 160, blocks of 128 and of 64 contain parts of several rows.
@pytest.mark.parametrize("shape", [(4, 32), (8, 48), (4, 160), (16, 256), (128, 33), (4, 3 * 128)])
@pytest.mark.parametrize("layout", ternary.I2S_LAYOUTS)
def test_i2s_unpacks_what_the_fork_packs(layout: str, shape: tuple[int, int]) -> None:
    values = random_ternary(*shape)
    codes = pack_i2s(values, 1.0, layout)[: values.size // 4]
    assert np.array_equal(ternary.unpack_i2s(codes, shape, layout), values)


def test_i2s_bytes_by_hand() -> None:
    """Element 0 is in the highest two bits of byte 0, and code 3 reads as 0."""
    codes = np.full(32, 0b01_01_01_01, dtype=np.uint8)
    codes[0] = 0b10_00_01_11
    values = ternary.unpack_i2s(codes, (1, 128), "x86")[0]
    assert values[[0, 32, 64, 96]].tolist() == [1, -1, 0, 0]
    assert np.count_nonzero(values) == 2
    values = ternary.unpack_i2s(codes, (1, 128), "arm64")[0]
    assert values[[0, 16, 32, 48]].tolist() == [1, -1, 0, 0]
    values = ternary.unpack_i2s(codes, (4, 32), "rows4")
    assert values[:, 0].tolist() == [1, -1, 0, 0]


def test_every_byte_of_i2s() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = ternary.unpack_i2s(codes, (4, 256), "rows4")
    meaning = {0: -1, 1: 0, 2: 1, 3: 0}
    for byte in range(256):
        assert values[:, byte].tolist() == [meaning[byte >> shift & 3] for shift in (6, 4, 2, 0)]


@pytest.mark.parametrize("layout", ternary.I2S_LAYOUTS)
def test_multiples(layout: str) -> None:
    assert ternary.i2s_multiple(layout) == {"x86": 128, "arm64": 64, "rows4": 4}[layout]


@settings(max_examples=50)
@given(rows=st.integers(1, 9), columns=st.integers(1, 40), seed=st.integers(0, 99))
def test_hf_unpacks_quarters_of_the_rows(rows: int, columns: int, seed: int) -> None:
    values = random_ternary(4 * rows, columns, seed)
    packed = pack_hf(values)
    for quarter in range(4):
        part = values[quarter * rows : (quarter + 1) * rows]
        assert np.array_equal(ternary.unpack_hf(packed, quarter), part)


def test_hf_threes_are_seen() -> None:
    packed = np.array([[0b10_11_00_01]], dtype=np.uint8)
    found = [ternary.is_ternary(ternary.unpack_hf(packed, quarter)) for quarter in range(4)]
    assert found == [True, True, False, True]


@settings(max_examples=50)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 3), seed=st.integers(0, 99))
def test_packed_weights_are_exact(rows: int, blocks: int, seed: int) -> None:
    values = random_ternary(rows, 256 * blocks, seed)
    packed = ternary.pack_tq2_0(values)
    assert np.array_equal(dequantize(packed, GGMLQuantizationType.TQ2_0), values)
    values = random_ternary(rows, 32 * blocks, seed)
    packed = ternary.pack_q4_0(values)
    assert np.array_equal(dequantize(packed, GGMLQuantizationType.Q4_0), values)


def test_absmean() -> None:
    weights = np.array([[0.1, -3.0, 0.9, 0.0], [-0.2, 1.2, -1.4, 1.2]], dtype=np.float32)
    values = ternary.quantize_absmean(weights, ternary.absmean_inverse(np.float32(1.0)))
    assert values.tolist() == [[0, -1, 1, 0], [0, 1, -1, 1]]
    inverse = ternary.absmean_inverse(np.float32(0.0))
    assert inverse == pytest.approx(1e5)
    assert not ternary.quantize_absmean(np.zeros((2, 2), dtype=np.float32), inverse).any()


@pytest.mark.parametrize("layout", ternary.I2S_LAYOUTS)
@pytest.mark.parametrize("columns", [32, 48, 96, 160, 256])
def test_rows_of_whole_blocks_unpack_alone(layout: str, columns: int) -> None:
    step = ternary.i2s_row_step(columns, layout)
    values = random_ternary(3 * step + (4 if layout == "rows4" else step), columns)
    codes = pack_i2s(values, 1.0, layout)
    for first in range(0, len(values), step):
        part = values[first : first + step]
        start = first * columns // 4
        unpacked = ternary.unpack_i2s(codes[start : start + part.size // 4], part.shape, layout)
        assert np.array_equal(unpacked, part)
