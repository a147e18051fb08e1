"""Reorder the rows of query and key projections for llama.cpp's llama graph.

RoPE in the llama graph rotates neighbouring rows of a head: 0 with 1, 2 with 3. Hugging Face
checkpoints rotate row i with row i + d/2. Therefore the rows of a head are reordered: 0, d/2, 1,
d/2 + 1, ... llama.cpp's converter calls this permute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv.convert.source import FileTensor, Tensor, TernaryTensor
from entropykv.convert.ternary import Bytes, Ternary
from entropykv.errors import EntropyKVError


def permuted_rows(rows: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Interleave the two halves of every head; the first axis of `rows` holds whole heads."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


@dataclass(frozen=True)
class PermutedTernary(TernaryTensor):
    """Read a ternary tensor with the rows of each head in the order of the llama graph."""

    shape: tuple[int, int]
    inner: TernaryTensor
    head_dim: int

    @property
    def row_step(self) -> int:
        """Return the smallest number of rows that are whole heads and that the stored tensor can
        read alone.
        """
        return math.lcm(self.head_dim, self.inner.row_step)

    def rows(self, first: int, count: int) -> Ternary:
        """Return `count` rows without their scale, (count, columns), in the order of the llama
        graph, from row `first` on; both numbers must be multiples of row_step.
        """
        return permuted_rows(self.inner.rows(first, count), self.head_dim)

    def scale(self) -> np.float32:
        """Return the scale of the stored tensor, which does not depend on the order of rows."""
        return self.inner.scale()


@dataclass(frozen=True)
class PermutedFile(FileTensor):
    """Read a stored weight or bias with the rows of each head in the order of the llama graph."""

    head_dim: int

    def raw(self) -> Bytes:
        """Return all bytes, with the rows in the order of the llama graph."""
        rows = super().raw().reshape(self.shape[0], -1)
        return permuted_rows(rows, self.head_dim).reshape(-1)

    def raw_chunks(self) -> Iterator[Bytes]:
        """Yield all bytes at once, because query and key projections are small compared with an
        embedding.
        """
        yield self.raw().reshape(math.prod(self.shape[:-1]), -1)


def permuted(name: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Return a query or key projection (weight or bias) in the row order of the llama graph. Other
    tensors are returned unchanged, as are those of a wrong size, which check_tensors() reports.

    Raises EntropyKVError for a projection that is neither a TernaryTensor nor a FileTensor.
    """
    is_rotated = name.split(".")[2:3] in (["attn_q"], ["attn_k"]) and not name.endswith(".scale")
    if not is_rotated or tensor.shape[0] % head_dim:
        return tensor
    if isinstance(tensor, TernaryTensor):
        return PermutedTernary(tensor.shape, tensor, head_dim)
    if not isinstance(tensor, FileTensor):
        raise EntropyKVError(f"a {type(tensor).__name__} cannot be put in another order")
    return PermutedFile(tensor.path, tensor.offset, tensor.kind, tensor.shape, head_dim)
