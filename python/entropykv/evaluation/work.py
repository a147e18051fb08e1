"""Measure how much of a model's time goes into weights and into attention, and how fast each is.

For this, llama.cpp computes and times every node of its graphs separately, also those that
entropykv computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from entropykv.model.geometry import ModelGeometry

WORKS = ("weights", "attention", "rest")
"""The kinds of work: products of weights; storing K and V, and attending to them; norms, rotations
and all other nodes.
"""


@dataclass(frozen=True)
class WorkFigures:
    """Hold the figures of one kind of work of one contestant: `phase` is prompt or decode, `work`
    one of WORKS.

    `ratio`: stock's seconds divided by these. `operations` and `bytes` are per second: for weights,
    as they are read; for attention, those of a full cache's rows (prompt) and of the entries in use
    (decode); 0 if unknown.
    """

    phase: str
    work: str
    seconds: float
    share: float
    ratio: float
    operations_per_second: float = 0.0
    bytes_per_second: float = 0.0


@dataclass(frozen=True)
class AttentionLoad:
    """Hold the work of attention: operations of a prompt, and bytes of a step; 0 if unknown."""

    operations: float = 0.0
    bytes: float = 0.0


Times = Mapping[str, tuple[float, float, float]]


def works_of(phase: str, times: Times, stock: Times, load: AttentionLoad) -> list[WorkFigures]:
    """Return the figures of every kind of work that took time."""
    total = sum(seconds for seconds, _, _ in times.values())
    found = []
    for work in WORKS:
        seconds, operations, n_bytes = times[work]
        if work == "attention":
            operations, n_bytes = load.operations, load.bytes
        if seconds > 0:
            found.append(
                WorkFigures(
                    phase=phase,
                    work=work,
                    seconds=seconds,
                    share=seconds / total,
                    ratio=stock[work][0] / seconds,
                    operations_per_second=operations / seconds,
                    bytes_per_second=n_bytes / seconds,
                )
            )
    return found


def full_attention_operations(geometry: ModelGeometry, n_tokens: int) -> float:
    """Return how many operations causal attention of a prompt takes: two per value and visible
    token.

    Sliding windows are ignored, so that the result is too large for a model that has some.
    """
    values = sum(geometry.heads_per_layer) * (geometry.head_dim_k + geometry.head_dim_v)
    return 2 * values * n_tokens * (n_tokens + 1) / 2
