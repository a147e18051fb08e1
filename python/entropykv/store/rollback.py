"""Know which positions a headwise store can go back to."""

from __future__ import annotations

from collections.abc import Sequence

from entropykv import _core
from entropykv.errors import ContextError
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.recurrent import RecurrentState, cannot_go_back


class RollbackRange:
    """Say from which position on layers with windows still hold all that queries would see."""

    def __init__(
        self,
        model: Model,
        core: _core.HeadwiseStore,
        layers: Sequence[_core.LayerShape],
        recurrent: RecurrentState | None,
    ) -> None:
        """Begin with a store that holds nothing; `recurrent`: states never go back."""
        self._model = model
        self._core = core
        self._windowed = any(shape.window for shape in layers)
        self._recurrent = recurrent
        self._loaded = 0

    @property
    def whole_from(self) -> int:
        """Return the first position whose window is whole."""
        return max(self._loaded, self._core.windows_whole_from)

    def await_state(self, position: int) -> None:
        """Know that a state which ends at `position` has nothing of what has left its windows."""
        self._loaded = position if self._windowed else 0

    def begin_from(self, whole_from: int) -> None:
        """Begin with what a checkpoint could go back to."""
        self._loaded = whole_from

    def leads_to(self, position: int) -> bool:
        """Tell whether the store holds all that it held when the text ended at `position`."""
        return self._recurrent is None and position >= self.whole_from

    def check(self, position: int) -> None:
        """Raise ContextError where it does not, unless all of the text is dropped."""
        if position == 0:
            return
        if self._recurrent is not None:
            raise cannot_go_back(self._model, position)
        if not self.leads_to(position):
            raise ContextError(
                f"{self._model.name}: cannot go back to position {position}: layers with a sliding "
                f"window have dropped what they would see from there, but not from position "
                f"{self.whole_from} on; call reset() and read the text again"
            )

    def note_truncated(self, position: int) -> None:
        """Know that everything at and beyond a position was dropped."""
        self._loaded = min(self._loaded, position)
