"""Pack and unpack ternary weights in the formats of other programs and of stock llama.cpp.

`ternary` is an int8 array of -1, 0, 1 with shape (rows, columns): one row per output, as in GGUF
and PyTorch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

I2S_LAYOUTS = ("x86", "arm64", "rows4")
"""The ways to pack I2_S codes, see unpack_i2s(); a file does not say which one it uses."""
I2S_TAIL_BYTES = 32
"""Bytes after the codes of an I2_S tensor: one F32 scale, then padding."""
TQ2_0_ROW = 256
Q4_0_ROW = 32

Ternary = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_I2S_BLOCK_BYTES = {"x86": 32, "arm64": 16}  # One byte holds four elements.
_SCALE_ONE = np.array([1.0], dtype="<f2").view(np.uint8)


def _without_threes() -> Bytes:
    """Make a lookup table for bytes of four codes, in which every code 3 is replaced by 1."""
    codes = np.arange(256, dtype=np.uint8)
    threes = codes & (codes >> 1) & 0b01010101  # Marks the low bit of every code that is 3.
    return codes - 2 * threes


_WITHOUT_THREES = _without_threes()


def i2s_multiple(layout: str) -> int:
    """Return the number that the elements of an I2_S tensor must be a multiple of, in this
    layout.
    """
    return 4 * _I2S_BLOCK_BYTES.get(layout, 1)


def i2s_row_step(columns: int, layout: str) -> int:
    """Return the smallest number of rows of this many columns that fill whole blocks."""
    if layout == "rows4":
        return 4
    block = i2s_multiple(layout)
    return block // math.gcd(block, columns)


def unpack_i2s(codes: Bytes, shape: tuple[int, int], layout: str = "x86") -> Ternary:
    """Unpack the codes of an I2_S tensor (type 36 of Microsoft's BitNet fork), without its tail.

    `codes`: rows * columns / 4 bytes; `shape`: (rows, columns), that of the result. The codes mean
    0: -1, 1: 0, 2: +1, 3: 0. x86: a block of 32 bytes holds 128 elements, element j in byte j % 32,
    highest bits first. arm64: the same with 64 elements in 16 bytes. In both layouts, blocks run
    over the flat tensor, across rows. rows4: a byte holds one column of four rows. Source:
    quantize_i2_s in the fork's ggml-bitnet-mad.cpp.
    """
    columns = shape[1]
    # The shape is (blocks, 4, n): the four pairs of bits of a byte, highest first, are n elements
    # apart.
    width = columns if layout == "rows4" else _I2S_BLOCK_BYTES[layout]
    return _unpack_pairs(_WITHOUT_THREES[codes].reshape(-1, width)).reshape(shape)


def unpack_hf(packed: Bytes, quarter: int) -> Ternary:
    """Unpack one quarter (0 to 3) of the rows of a uint8 weight of transformers' BitNet, in the
    shape of `packed`.

    Row r of a weight of 4 * n rows is in bits 2 * (r // n) of packed row r % n. Source:
    unpack_weights in transformers' integrations/bitnet.py. As there, an invalid code 3 becomes 2,
    which is_ternary() detects.
    """
    ternary: Ternary = ((packed >> np.uint8(2 * quarter)) & np.uint8(3)).view(np.int8)
    ternary -= 1
    return ternary


def _unpack_pairs(blocks: Bytes) -> Ternary:
    """Unpack the pairs of bits of `blocks`, (n, width), highest first, and subtract 1: (n, 4,
    width).
    """
    codes = np.empty((blocks.shape[0], 4, blocks.shape[1]), dtype=np.uint8)
    for index, shift in enumerate((6, 4, 2, 0)):
        np.right_shift(blocks, shift, out=codes[:, index])
    codes &= 3
    ternary = codes.view(np.int8)
    ternary -= 1
    return ternary


def is_ternary(values: npt.NDArray[Any]) -> bool:
    """Tell whether every value is -1, 0 or 1."""
    return bool(((values == 0) | (values == 1) | (values == -1)).all())


def absmean_inverse(mean: np.float32) -> np.float32:
    """Return the factor by which WeightQuant of transformers multiplies weights before it rounds
    them; `mean`: of their absolute values.
    """
    return np.float32(np.float32(1.0) / max(mean, np.float32(1e-5)))


def quantize_absmean(weights: Floats, inverse: np.float32) -> Ternary:
    """Round master weights, of any shape, to -1, 0 and 1 in F32, as WeightQuant does in
    transformers' integrations/bitnet.py.

    The scale of the result is 1 / `inverse`, see absmean_inverse().
    """
    ternary: Ternary = np.clip(np.rint(weights * inverse), -1, 1).astype(np.int8)
    return ternary


def pack_tq2_0(ternary: Ternary) -> Bytes:
    """Pack as ggml's TQ2_0 with a scale of 1; returns bytes of shape (rows, columns / 256 * 66).

    A block has 64 bytes of codes t + 1 (element j of each half in byte j % 32, lowest bits first),
    then the F16 scale.
    """
    rows, columns = ternary.shape
    codes = (ternary + np.int8(1)).view(np.uint8).reshape(-1, 2, 4, 32)
    packed = np.empty((codes.shape[0], 66), dtype=np.uint8)
    halves = packed[:, :64].reshape(-1, 2, 32)
    np.bitwise_or(codes[:, :, 0], codes[:, :, 1] << 2, out=halves)
    halves |= codes[:, :, 2] << 4
    halves |= codes[:, :, 3] << 6
    packed[:, 64:] = _SCALE_ONE
    return packed.reshape(rows, columns // TQ2_0_ROW * 66)


def pack_q4_0(ternary: Ternary) -> Bytes:
    """Pack as ggml's Q4_0 with a scale of 1, exactly; returns bytes of shape (rows, columns / 32 *
    18).

    A block has the F16 scale, then 16 bytes of codes t + 8: byte j has element j in its low half
    and element j + 16 in its high half. ggml's own quantiser is not exact here, because its scale
    is max / -8.
    """
    rows, columns = ternary.shape
    codes = (ternary + np.int8(8)).view(np.uint8).reshape(-1, 2, 16)
    packed = np.empty((codes.shape[0], 18), dtype=np.uint8)
    packed[:, :2] = _SCALE_ONE
    np.bitwise_or(codes[:, 0], codes[:, 1] << 4, out=packed[:, 2:])
    return packed.reshape(rows, columns // Q4_0_ROW * 18)
