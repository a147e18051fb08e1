"""Estimate the time and memory of a conversion by timing a small sample on this machine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as Kind

from entropykv.convert.outputs import OutputTensor, quantized
from entropykv.convert.source import CHUNK_ELEMENTS
from entropykv.convert.ternary import pack_tq2_0, unpack_i2s

_COPIED_BYTES_PER_SECOND = 1 << 30
_CHUNK_BYTES_PER_ELEMENT = 24
"""Bytes of memory per element while its rows are converted: the floats or codes that were read, and
everything that is computed from them.
"""
_SAMPLE = (64, 1024)
_TERNARY = (Kind.TQ2_0, Kind.Q4_0)


@dataclass(frozen=True)
class Estimate:
    """Hold what a conversion needs: bytes of tensors to write, seconds, bytes of memory for
    weights.

    The vocabulary is not counted: a tokenizer.json of 128,000 tokens takes about as much memory
    again.
    """

    target_bytes: int
    seconds: float
    memory_bytes: int


def estimate(outputs: Sequence[OutputTensor]) -> Estimate:
    """Time a sample of each kind of work (some milliseconds), and extrapolate to all outputs."""
    elements: Counter[Kind] = Counter()
    n_bytes = sum(output.n_bytes for output in outputs)
    for output in outputs:
        if not output.copied:
            elements[output.kind] += math.prod(output.shape)
    seconds = n_bytes / _COPIED_BYTES_PER_SECOND
    seconds += sum(count * _seconds_per_element(kind) for kind, count in elements.items())
    return Estimate(n_bytes, seconds, _CHUNK_BYTES_PER_ELEMENT * CHUNK_ELEMENTS)


def _seconds_per_element(kind: Kind) -> float:
    random = np.random.default_rng(0)
    if kind in _TERNARY:
        codes = random.integers(0, 256, math.prod(_SAMPLE) // 4, dtype=np.uint8)
        start = time.perf_counter()
        pack_tq2_0(unpack_i2s(codes, _SAMPLE))
    else:
        values = random.standard_normal(_SAMPLE, dtype=np.float32)
        start = time.perf_counter()
        quantized("a sample", values, kind)
    return (time.perf_counter() - start) / math.prod(_SAMPLE)
