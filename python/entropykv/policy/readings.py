"""Define which measurements online budgets read from a store after a micro-batch, and what they
derive from them; they change nothing in the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import numpy.typing as npt

from entropykv.policy.division import LossCurve
from entropykv.policy.plan import HeadwisePlan

Floats = npt.NDArray[np.float64]


class StoreReadings(Protocol):
    """Define how measurements of the last micro-batch are read; the headwise store of the extension
    implements it.
    """

    def row_entropies(self, layer: int) -> npt.NDArray[np.float32]:
        """Return the entropies of attention rows in bits, (n_tokens, query heads).

        Entropies are measured if OnlineBudgets.tracks_entropies is true.
        """

    def losses(self, of_held: bool = False) -> npt.NDArray[np.float64]:
        """Return losses at OnlineBudgets.knots(), a flat array [KV head of all layers][knot].

        `of_held`: without the losses from entries that were dropped before.
        """

    def count(self, layer: int, kv_head: int) -> int:
        """Return how many entries a KV head keeps."""

    def positions(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending, (n,)."""

    def importance(self, layer: int, kv_head: int) -> npt.NDArray[np.float32]:
        """Return the importance of the entries that a KV head keeps, (n,), in order of
        positions.
        """


class OnlineBudgets(ABC):
    """Record what a text shows, and derive budgets from it.

    The default methods are for budgets that need no losses.
    """

    tracks_entropies: bool
    """True if the store must measure the entropies of attention rows."""

    def expect(self, plan: HeadwisePlan) -> None:  # noqa: B027
        """Prepare to measure for a plan, whose budget will be shared from now on."""

    def knots(self, growth: float) -> list[int]:  # noqa: ARG002
        """Return the numbers of entries beyond the floor at which the store must measure losses;
        may be empty.

        It is called before every micro-batch after which budgets change. `growth`: by what factor
        the part of the text beyond the floor will grow until all of it is read, 1 or more.
        """
        return []

    @abstractmethod
    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:
        """Record what an observed micro-batch of n_tokens has shown: see is_observed().
        `budgets_change`: the budget will be shared by it: see changes_budgets().
        """

    def observe_again(self) -> None:  # noqa: B027
        """Record what an echo has shown of text that was observed before."""

    @abstractmethod
    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Return the budget of every KV head in entries, in the order of layers; None before
        anything was observed.
        """

    def loss_curve(self, plan: HeadwisePlan) -> LossCurve | None:  # noqa: ARG002
        """Return what the text loses with fewer pages; the same object until it changes.

        Returns None if that is not known.
        """
        return None

    @abstractmethod
    def forget(self) -> None:
        """Forget all records, because another text begins."""

    @abstractmethod
    def state(self) -> Floats:
        """Return everything that was recorded, for session files, (n,)."""

    @abstractmethod
    def problem(self, state: Floats) -> str | None:
        """Return words for what makes a state invalid; None if it is valid."""

    @abstractmethod
    def load(self, state: Floats) -> None:
        """Load a valid state."""
