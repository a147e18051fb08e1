"""Define what the parts of an evaluation have in common: items, and figures measured for
each item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from entropykv.evaluation.reading import Tick
from entropykv.llamacpp.stock import StockSession
from entropykv.session.session import Session

Values = dict[str, Any]
"""The figures of one item, as JSON values."""


@dataclass(frozen=True)
class Item:
    """Hold one text to be read; a subclass says what is measured after it."""

    name: str
    digest: str
    """A hash of everything that the item's figures depend on, except the settings of the
    evaluation.
    """
    tokens: tuple[int, ...]
    """The tokens that are read inside the budget."""
    n_steps: int
    """How many tokens are read and written in total, for the progress bar."""


class EvalPart(Protocol):
    """Measure items of one kind; every figure belongs to one item, so that single items can be
    skipped.
    """

    name: str
    n_ctx: int
    """The context length of the sessions, in tokens."""
    needs_reference: bool
    """True if stock llama.cpp must have measured an item in the same run before a session can."""

    @property
    def items(self) -> Sequence[Item]:
        """Return the items in order."""

    def reference(self, stock: StockSession, item: Any, tick: Tick) -> Values:
        """Measure an item with stock llama.cpp."""

    def measure(self, session: Session, item: Any, tick: Tick) -> Values:
        """Measure an item with a session whose budget is set and that has read nothing yet."""


def kept_values(session: Session) -> Values:
    """Return the number of entries and bytes that a session keeps of what it has read."""
    stats = session.stats()
    return {
        "policy": stats.policy,
        "store": stats.store,
        "kv_bytes_budget": stats.kv_bytes_budget,
        "kv_bytes_full": stats.kv_bytes_full,
        "entries_kept": stats.entries_kept,
        "entries_full": stats.entries_full,
    }
