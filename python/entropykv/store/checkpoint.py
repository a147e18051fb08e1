"""What a sequence held at a moment, to go on from there without reading or copying it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from entropykv import _core


@dataclass(frozen=True)
class StoreCheckpoint:
    """Pages that a headwise store shares, and what decoding needs besides."""

    core: _core.Checkpoint
    shift: int
    """See Store.shift."""
    whole_from: int
    """Windows of layers hold all that is seen from this position on."""
    seen: npt.NDArray[np.float64] | None
    """What online budgets follow."""
    recurrent: bytes
    """The state of recurrent layers, as llama.cpp writes it; empty where there are none."""
    n_bytes: int
    """Bytes besides the pages."""

    def copy(self) -> StoreCheckpoint:
        """Return another one of the same pages."""
        return replace(self, core=self.core.copy())

    def drop(self) -> None:
        """Give the pages back."""
        self.core.drop()
