"""Keep what a sequence held at a moment, to go on from there without reading or copying it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from entropykv import _core


@dataclass(frozen=True)
class StoreCheckpoint:
    """Hold pages that a headwise store shares, and what decoding needs besides."""

    core: _core.Checkpoint
    shift: int
    """How far positions of the text are before what RoPE sees, see Store.shift."""
    whole_from: int
    """From this position on, layers with a window hold all that they see."""
    seen: npt.NDArray[np.float64] | None
    """What budgets that follow the text have seen of it; None where none do."""
    recurrent: bytes
    """The state of recurrent layers, as llama.cpp writes it; empty where there are none."""
    n_bytes: int
    """Bytes that are held besides the pages."""
    n_pages: int
    """How many pages are held, those that others hold as well included."""

    def copy(self) -> StoreCheckpoint:
        """Return another checkpoint, which holds the same pages on its own."""
        return replace(self, core=self.core.copy())

    def drop(self) -> None:
        """Give the pages back."""
        self.core.drop()
