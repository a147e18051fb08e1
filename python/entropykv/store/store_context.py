"""Define the interface of contexts, which decode micro-batches for one store or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import llama_cpp

from entropykv import _core
from entropykv.settings.options import Budget


class PoolFigures(Protocol):
    """Tell the bytes that all stores of a pool take together."""

    @property
    def budget_bytes(self) -> int:
        """Return the bytes that the entries of all sequences can never exceed."""

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the entries of all sequences."""

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes of entries that there were."""

    @property
    def staging_bytes(self) -> int:
        """Return the bytes outside the budget that entries of a micro-batch take."""

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of working memory that all sequences share."""


class Places(PoolFigures, Protocol):
    """Give every store of a pool a place of the same size."""

    def resize(self, budget: Budget) -> None:
        """Give all stores their equal part of another budget, or leave all as they were.

        Raises BudgetError if there is no memory for it.
        """


class StoreContext(ABC):
    """Hold a llama_context, and the hook that changes its graphs.

    `pages` and `places` say what its stores share in a pool: at most one of them is there.
    """

    handle: Any = None
    """The llama_context; None before it is made, and after close()."""
    hook: _core.GraphHook | _core.WeightHook
    """Changes the context's graphs, and can time their nodes."""
    layers: Sequence[_core.LayerShape] = ()
    """The model's attention layers, where the graph was probed for them."""
    recurrent: bool = False
    """True if its stores save, besides their entries, a state that llama.cpp has of each sequence,
    and that cannot be rolled back.
    """
    reads_together: bool = True
    """False where a step reads either single tokens of sequences, or a piece of a prompt."""
    masked_by_llama: bool = False
    """True where llama.cpp's own attention says which tokens see each other."""
    let_help: Callable[[int], None] | None = None
    """Lets so many threads help with products: see GraphHook.help(). None where numbers depend on
    how many threads attend.
    """
    pages: _core.SequencePool | None = None
    """The pages that its stores share; None if they share none."""
    places: Places | None = None
    """The places of its stores; None if they have none."""

    @property
    def on_host(self) -> str | None:
        """Return which layers attend in main memory although they are on a device, and why; None if
        none does.
        """
        return None

    @property
    def pool(self) -> PoolFigures | None:
        """Return the figures of what its stores share; None for a session alone."""
        return self.pages or self.places

    def begin_step(self) -> None:
        """Begin a micro-batch, before the stores of all its sequences make room for it."""
        return  # A context of a single store may leave this to its store.

    @abstractmethod
    def end_step(self) -> None:
        """End the micro-batch after llama_decode, before the stores' after() is called.

        Raises RuntimeError if the graph was not as expected.
        """

    def close(self) -> None:
        """Free the context."""
        if self.handle:
            llama_cpp.llama_free(self.handle)
            self.handle = None
