"""What a session needs of a store, whichever it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import UnsupportedModelError
from entropykv.llamacpp.batch import MicroBatch
from entropykv.llamacpp.positions import RopeRange
from entropykv.settings.options import Budget


class Rung(IntEnum):
    """How much is restored from cold storage; each one restores more than the one before."""

    NONE = 0
    SOFT = 1
    """Restore frozen entries that would stay so for more than one further step."""
    WINDOW = 2
    """Restore all that was frozen within the last steps."""
    FULL = 3
    """Restore all frozen entries, and forget their timers."""
    REWALK = 4
    """As FULL, then generate the last tokens again."""


@dataclass(frozen=True)
class StoreState:
    """What a store holds, for it to be saved."""

    entries: list[list[int]]
    """[layer][KV head]"""
    evicted: int
    section_bytes: list[int]
    sections: Iterator[bytes]


@dataclass(frozen=True)
class SavedState:
    """What a store held when it was saved, for check_state() and load_state()."""

    position: int
    """Of the next token."""
    entries: list[list[int]]
    """[layer][KV head]"""
    evicted: int
    shift: int
    """See Store.shift."""
    sections: Sequence[bytearray]
    """As StoreState has them; load_state() may change them."""


class DamagedState(Exception):  # noqa: N818  (it is caught where the file's name is known)
    """A saved state that no store wrote; the text names what cannot be."""


class StateDoesNotFit(Exception):  # noqa: N818
    """A sound state that this store cannot take in; the text says why, and the way out."""


class Store(Protocol):
    """A KV cache under a budget, in one llama_context."""

    name: str
    context: Any
    """The llama_context to decode with; may change in resize()."""
    n_kv_heads: int
    """Of all layers."""
    bytes_full_per_token: int
    """K and V of one token for all KV heads, in f16."""

    rope: RopeRange
    """Positions that RoPE may see."""
    rope_obstacle: str
    """Why the session cannot go on beyond them; empty if it can."""
    rebases: int
    """How often stored keys were moved to other positions."""

    @property
    def shift(self) -> int:
        """How far positions of the text are before what RoPE sees; set where a state is loaded."""

    @shift.setter
    def shift(self, shift: int) -> None: ...

    def rope_position(self, position: int) -> int:
        """Where RoPE sees a position of the text."""
        return _core.rope_position(position, self.rope.n_sinks, self.shift)

    def before(self, n_tokens: int, position: int) -> None:
        """Make room for a micro-batch, below the positions that RoPE may see."""

    def after(self, n_tokens: int, position: int) -> None:
        """Bring the store in order after llama_decode; raises where the graph was not as served."""

    def check(self) -> None:
        """Raise what went wrong beside a micro-batch that was read well: FreezeError."""
        return  # without cold storage, nothing can

    def thaw(self, rung: Rung, window: int, position: int) -> int:  # noqa: ARG002
        """Restore frozen entries: see Session.thaw(). None without cold storage."""
        return 0

    def resize(self, budget: Budget) -> None:
        """Apply a new budget: grows at once, shrinks by evicting."""

    @property
    def sure_entries(self) -> int:
        """How many tokens every KV head keeps, whatever they are; n_ctx where none is evicted."""

    def truncate(self, position: int) -> None:
        """Drop entries at and beyond a position; ContextError, and nothing has changed, where that
        would leave other entries than are needed to go on.
        """

    def can_return_to(self, position: int) -> bool:  # noqa: ARG002
        """Whether truncate() to an earlier position, not 0, leaves what was there, had nothing been

        evicted meanwhile.
        """
        return True

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Positions kept, ascending."""

    def budgets(self) -> list[tuple[int, ...]]:
        """[layer][KV head] in entries."""

    @property
    def evicted(self) -> int:
        """Entries evicted so far, of all KV heads."""

    def counters(self) -> dict[str, Any]:
        """The store's part of SessionStats; of frozen entries only where it has any."""

    def state(self) -> StoreState:
        """Everything that decoding depends on; valid until the next change."""

    def check_state(self, state: SavedState) -> None:
        """Raise DamagedState or StateDoesNotFit where load_state() would not go well."""

    def load_state(self, state: SavedState) -> None:
        """Replace everything by a checked state, and evict down to the budget.

        An Exception leaves the store as it was.
        """

    def close(self) -> None:
        """Free the context."""
        if self.context:
            llama_cpp.llama_free(self.context)
            self.context = None


def decode_inside(
    store: Store,
    batch: MicroBatch,
    tokens: Sequence[int],
    position: int,
    *,
    n_rows: int,
    model_name: str,
) -> npt.NDArray[np.float32] | None:
    """Decode one micro-batch inside a store; logits as MicroBatch.decode returns them.

    Raises UnsupportedModelError where the graph is not what the store must change.
    """
    try:
        store.before(len(tokens), position)
        logits = batch.decode(store.context, tokens, store.rope_position(position), n_rows=n_rows)
        store.after(len(tokens), position)
    except RuntimeError as error:  # the extension: the graph or the cache is not as it needs it
        raise UnsupportedModelError(f"{model_name}: {error}") from error
    return logits
