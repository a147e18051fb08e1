"""What the parts of an evaluation have in common: items, and figures measured for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from entropykv.evaluation.reading import Tick
from entropykv.llamacpp.stock import StockSession
from entropykv.session.session import Session

Values = dict[str, Any]
"""Figures of one item, as JSON holds them."""


@dataclass(frozen=True)
class Item:
    """One text to be read, and what is done after it."""

    name: str
    digest: str
    """Of all that its figures depend on, besides the settings of the evaluation."""
    tokens: tuple[int, ...]
    """What is read inside the budget."""
    n_steps: int
    """Tokens that are read or written in all, for the progress."""


class Part(Protocol):
    """Items of one kind. Every figure is of one item alone, so that items can be left out."""

    name: str
    n_ctx: int
    """Of the sessions."""
    needs_reference: bool
    """Whether measuring an item needs that stock has measured it in the same run."""

    @property
    def items(self) -> Sequence[Item]:
        """In order."""

    def reference(self, stock: StockSession, item: Any, tick: Tick) -> Values:
        """Measure an item with stock llama.cpp."""

    def measure(self, session: Session, item: Any, tick: Tick) -> Values:
        """Measure an item with a session whose budget is set and that has read nothing."""


def kept_values(session: Session) -> Values:
    """What a session holds of what it has read."""
    stats = session.stats()
    return {
        "policy": stats.policy,
        "store": stats.store,
        "kv_bytes_budget": stats.kv_bytes_budget,
        "kv_bytes_full": stats.kv_bytes_full,
        "entries_kept": stats.entries_kept,
        "entries_full": stats.entries_full,
    }
