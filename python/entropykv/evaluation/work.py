"""Weights and attention apart: what of a model's time goes where, and how fast each is.

llama.cpp computes every node of its graphs by itself for this, and times it, whoever computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from entropykv.model.geometry import ModelGeometry

WORKS = ("weights", "attention", "rest")
"""Products of weights; what writes K and V and attends to them; norms, rotations and all else."""


class Hook(Protocol):
    """What can time the nodes of a context: _core.StockHook or _core.GraphHook."""

    def measure_work(self, on: bool) -> None:
        """Begin to time, or end it."""

    @property
    def work(self) -> dict[str, tuple[float, float, float]]:
        """Seconds, operations and bytes of every kind of work."""


@dataclass(frozen=True)
class WorkFigures:
    """One kind of work of one contestant: `phase` is prompt or decode, `work` one of WORKS.

    `ratio`: stock's seconds to these. `operations` and `bytes` a second: of weights as they are
    read, of attention those of a full cache's rows (prompt) and of the cache in use (decode); 0
    where nobody can tell.
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
    """What attention had to do: operations of a prompt, bytes of a step; 0: not known."""

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
    """Return what causal attention of a prompt computes: two operations a value and visible token.

    Sliding windows are not considered: the rows of a model that has some are shorter.
    """
    values = sum(geometry.heads_per_layer) * (geometry.head_dim_k + geometry.head_dim_v)
    return 2 * values * n_tokens * (n_tokens + 1) / 2
