"""Rotate stored keys to other positions (RoPE)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.reference.values import Floats, Ints


class Rope(NamedTuple):
    """Hold RoPE's parameters with ggml's names; `freq_factors` divide the frequencies of pairs."""

    n_dims: int
    offset: int = 0
    neox: bool = False
    n_ctx_orig: int = 0
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    freq_factors: tuple[float, ...] = ()


def rope_frequencies(rope: Rope) -> Floats:
    """Return the angle of each pair in radians per position, as ggml's rope_yarn computes it."""
    pairs = np.arange(rope.n_dims // 2)
    own = rope.freq_base ** (-2.0 * pairs / rope.n_dims)
    if rope.freq_factors:
        own = own / np.asarray(rope.freq_factors)
    interpolated = own * rope.freq_scale
    if rope.ext_factor == 0.0:
        return interpolated

    def pair_that_turns(times: float) -> float:
        wave = rope.n_ctx_orig / (times * 2.0 * np.pi)
        return float(rope.n_dims * np.log(wave) / (2.0 * np.log(rope.freq_base)))

    low = max(0.0, np.floor(pair_that_turns(rope.beta_fast)))
    high = min(rope.n_dims - 1.0, np.ceil(pair_that_turns(rope.beta_slow)))
    ramp = 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
    mix = ramp * rope.ext_factor
    return interpolated * (1.0 - mix) + own * mix


def rope_pairs(rope: Rope) -> list[tuple[int, int]]:
    """Return the pairs of indices in a row that are rotated together."""
    pairs = np.arange(rope.n_dims // 2)
    first = rope.offset + (pairs if rope.neox else 2 * pairs)
    return [(int(i), int(i + (len(pairs) if rope.neox else 1))) for i in first]


def rotated(rows: npt.NDArray[Any], by: npt.NDArray[Any], rope: Rope) -> Floats:
    """Return rows [n][dim], rotated by `by` [n] further positions."""
    result = rows.astype(np.float64).copy()
    if rope.n_dims == 0:
        return result
    first, second = np.array(rope_pairs(rope)).T
    turned = (rows[:, first] + 1j * rows[:, second]) * np.exp(
        1j * np.outer(by, rope_frequencies(rope))
    )
    result[:, first], result[:, second] = turned.real, turned.imag
    return result


def rope_positions(positions: npt.NDArray[Any], n_sinks: int, shift: int) -> Ints:
    """Return the RoPE positions of text positions: sinks stay, the others move back by `shift`, but
    not into the sinks.
    """
    return np.where(positions < n_sinks, positions, np.maximum(positions - shift, n_sinks))
