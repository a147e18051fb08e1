"""Hold what a store has kept, as plain values: for a file, for swapped out sequences, and in shared
pages; and tell to which positions a store can be rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import ContextError
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.recurrent import RecurrentState, cannot_go_back

Section = bytearray | memoryview
"""The bytes of a section of a saved state, which may be changed."""
LOST = (
    "the file of a saved session or document was changed while its entries were in use, so that "
    "they are lost; load it again, and replace such files instead of writing to them"
)
"""The message of the error for entries that are lost with a mapped file."""


@dataclass(frozen=True)
class StoreState:
    """Hold the parts of a store's state, for a file or for swapped out sequences."""

    entries: list[list[int]]
    """Number of entries, as [layer][KV head]."""
    evicted: int
    section_bytes: list[int]
    sections: Iterator[bytes]
    recalls_now: bool = False
    """True if the next token searches frozen entries, as after thaw()."""
    whole_from: int = 0
    """The position from which on layers with a window hold everything that they see."""


@dataclass(frozen=True)
class SavedState:
    """Hold the saved state of a store, for check_state() and load_state()."""

    position: int
    """The position of the next token."""
    entries: list[list[int]]
    """Number of entries, as [layer][KV head]."""
    evicted: int
    shift: int
    """How far positions of the text are ahead of those that RoPE sees, see Store.shift."""
    sections: Sequence[Section]
    """The sections, as in StoreState; load_state() may change or discard their bytes."""
    recalls_now: bool
    """True if the next token searches frozen entries, as after thaw()."""
    whole_from: int
    """The position from which on layers with a window hold everything that they see."""
    file: _core.MappedFile | None = None
    """The mapped file that the sections are memory of; None if they have memory of their own."""


class DamagedState(Exception):  # noqa: N818  (it is caught where the file's name is known)
    """Raised for a saved state that no store can have written; its message names what is
    impossible.
    """


class StateDoesNotFit(Exception):  # noqa: N818
    """Raised for a valid state that the store cannot load; its message says what to do."""


@dataclass(frozen=True)
class StoreCheckpoint:
    """Hold a checkpoint of a headwise store: pages that it shares with the store, and the other
    state that decoding needs.
    """

    core: _core.Checkpoint
    shift: int
    """How far positions of the text are ahead of those that RoPE sees, see Store.shift."""
    whole_from: int
    """The position from which on layers with a window hold everything that they see."""
    seen: npt.NDArray[np.float64] | None
    """What budgets that follow the text have measured; None if there are none."""
    recurrent: bytes
    """The state of recurrent layers in llama.cpp's format; empty without such layers."""
    n_bytes: int
    """The bytes that the checkpoint holds besides the pages."""
    n_pages: int
    """How many pages the checkpoint holds, including pages that it shares."""

    def copy(self) -> StoreCheckpoint:
        """Return another checkpoint that owns the same pages."""
        return replace(self, core=self.core.copy())

    @property
    def is_lost(self) -> bool:
        """Tell whether entries are lost, because someone has changed the file that their pages are
        mapped from.
        """
        return self.core.is_lost

    def drop(self) -> None:
        """Give the pages back to the pool; the checkpoint cannot be used any more."""
        self.core.drop()


class RollbackRange:
    """Tell to which positions layers with windows can be rolled back."""

    def __init__(
        self,
        model: Model,
        core: _core.HeadwiseStore | _core.DeviceStore,
        recurrent: RecurrentState | None,
    ) -> None:
        """Start with an empty store. `recurrent`: the state of recurrent layers, which can never be
        rolled back; None without such layers.
        """
        self._model = model
        self._core = core
        self._recurrent = recurrent
        self._loaded = 0

    @property
    def whole_from(self) -> int:
        """Return the first position from which on windows are complete, so that the store can be
        rolled back to it.
        """
        return max(self._loaded, self._core.windows_whole_from)

    def begin_from(self, whole_from: int) -> None:
        """Record from which position on the windows of a loaded text are complete; this may be
        called before the text is loaded.
        """
        self._loaded = whole_from

    def leads_to(self, position: int) -> bool:
        """Tell whether the store holds everything that it held when the text ended at
        `position`.
        """
        return self._recurrent is None and position >= self.whole_from

    def check(self, position: int) -> None:
        """Raise ContextError if the store cannot be rolled back to a position: see leads_to().
        Position 0 is always possible.
        """
        if position == 0:
            return
        if self._recurrent is not None:
            raise cannot_go_back(self._model, position)
        if not self.leads_to(position):
            raise ContextError(
                f"{self._model.name}: cannot go back to position {position}: layers with a sliding "
                f"window are sure to hold what they see only from position {self.whole_from} on; "
                "call reset() and read the text again"
            )

    def note_truncated(self, position: int) -> None:
        """Record that everything from a position on was dropped."""
        self._loaded = min(self._loaded, position)
