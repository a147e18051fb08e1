"""Compute attention of a micro-batch over entries: outputs, entropies, and what entries receive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.reference.values import Bools, Floats, Ints


class Attention(NamedTuple):
    """Hold outputs [n][heads][v_dim], entropies in bits [n][heads], and what entries receive."""

    outputs: Floats
    entropies: Floats
    observed: Floats
    """What entries receive: for a KV head [n][T], summed over its query heads; for a layer
    [n_head_kv][n][T].
    """


NEIGHBOURHOOD = 32  # Queries nearer to an entry than this many positions do not score it.
SCORING_INTERVAL = 4
WINDOW_MARGIN = 32  # This many entries outside a sliding window stay if there is room.


@dataclass(frozen=True)
class Options:
    """Hold the constants of a layer's attention."""

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: npt.NDArray[Any] | None = None
    """The logit of the attention sink of each query head, [n_head]; None: there are none."""
    chunked: bool = False
    """True if windows begin at multiples of their size."""
    slopes: npt.NDArray[Any] | None = None
    """The slope per position (ALiBi) of each query head, [n_head]; None: there is no ALiBi."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of HeadwiseStore.attend_alone(); the window belongs to the layer."""
        names = ("scale", "softcap", "sinks", "slopes")
        return {name: getattr(self, name) for name in names}

    def of_heads(self, heads: slice) -> Options:
        """Return the options with the sinks and slopes of only these query heads."""
        sinks = None if self.sinks is None else self.sinks[heads]
        slopes = None if self.slopes is None else self.slopes[heads]
        return replace(self, sinks=sinks, slopes=slopes)


def oldest_seen(query_position: int, window: int, chunked: bool) -> int:
    """Return the first position that a query sees; a window of 0 sees everything."""
    if window == 0:
        return 0
    return query_position // window * window if chunked else query_position - window + 1


def visible(query_positions: Ints, positions: Ints, options: Options) -> Bools:
    """Return whether queries see entries, [n][T]: not later ones, nor those outside a window."""
    window = (options.window, options.chunked)
    oldest = np.array([oldest_seen(int(query), *window) for query in query_positions])
    seen = positions[None, :] <= query_positions[:, None]
    return seen & (positions[None, :] >= oldest[:, None])


def biased(logits: Floats, queries: Ints, positions: Ints, options: Options) -> Floats:
    """Apply ALiBi if there are slopes: logits [n][group][T] fall linearly with the distance."""
    if options.slopes is None:
        return logits
    distance = queries[:, None, None] - positions[None, None, :]
    biased: Floats = logits - options.slopes.astype(np.float64)[None, :, None] * distance
    return biased


def given(measure: str, weights: Floats, logits: Floats) -> Floats:
    """Return what each query gives to each entry by a measure; nothing to those it cannot see."""
    return {
        "mass": weights**2,
        "attention": weights,
        "products": np.where(np.isfinite(logits), np.abs(logits), 0.0),
    }[measure]


def attend_kv_head(
    q: npt.NDArray[Any],
    k: Floats,
    v: Floats,
    positions: Ints,
    first_query: int,
    options: Options,
    measure: str = "mass",
    neighbourhood: int = NEIGHBOURHOOD,
) -> Attention:
    """Compute attention of one KV head.

    q is [n][group][k_dim] at positions from first_query on, k [T][k_dim], v [T][v_dim].
    """
    logits = np.einsum("ngd,td->ngt", q.astype(np.float64), k) * options.scale
    if options.softcap > 0.0:
        logits = options.softcap * np.tanh(logits / options.softcap)
    logits = biased(logits, first_query + np.arange(len(q)), positions, options)
    seen = visible(first_query + np.arange(len(q)), positions, options)
    logits = np.where(seen[:, None, :], logits, -np.inf)
    if options.sinks is not None:
        column = np.broadcast_to(options.sinks.astype(np.float64)[None, :, None], (*q.shape[:2], 1))
        logits = np.concatenate([logits, column], axis=2)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    entropies = -np.where(weights > 0.0, weights * np.log2(np.maximum(weights, 1e-300)), 0.0)
    weights_of_entries = weights[:, :, : len(k)]
    outputs = np.einsum("ngt,td->ngd", weights_of_entries, v)
    distance = first_query + np.arange(len(q))[:, None] - positions[None, :]
    observed = given(measure, weights_of_entries, logits[:, :, : len(k)])
    observed = np.where(distance[:, None, :] >= neighbourhood, observed, 0.0)
    return Attention(outputs, entropies.sum(axis=2), observed.sum(axis=1))


def attend_layer(
    q: npt.NDArray[Any],
    k: Floats,
    v: Floats,
    first_query: int,
    options: Options,
    measure: str = "mass",
) -> Attention:
    """Compute attention of one layer with entries 0 to T-1: q [n][n_head][k_dim], k
    [T][n_head_kv][k_dim].
    """
    group = q.shape[1] // k.shape[1]
    parts = []
    for head in range(k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        of_heads = options.of_heads(heads)
        positions = np.arange(len(k))
        rows = (q[:, heads], k[:, head], v[:, head])
        parts.append(attend_kv_head(*rows, positions, first_query, of_heads, measure))
    return Attention(
        np.concatenate([part.outputs for part in parts], axis=1),
        np.concatenate([part.entropies for part in parts], axis=1),
        np.stack([part.observed for part in parts]),
    )
