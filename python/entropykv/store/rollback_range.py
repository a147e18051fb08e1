"""Tell to which positions a store can be rolled back."""

from __future__ import annotations

from entropykv import _core
from entropykv.errors import ContextError
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.recurrent import RecurrentState, cannot_go_back


class RollbackRange:
    """Tell to which positions layers with windows can be rolled back."""

    def __init__(
        self,
        model: Model,
        core: _core.HeadwiseStore | _core.DeviceStore,
        recurrent: RecurrentState | None,
    ) -> None:
        """Start with an empty store; `recurrent`: states can never be rolled back."""
        self._model = model
        self._core = core
        self._recurrent = recurrent
        self._loaded = 0

    @property
    def whole_from(self) -> int:
        """Return the first position whose window is complete."""
        return max(self._loaded, self._core.windows_whole_from)

    def begin_from(self, whole_from: int) -> None:
        """Record the range of what was loaded, or will be."""
        self._loaded = whole_from

    def leads_to(self, position: int) -> bool:
        """Tell whether the store holds everything that it held when the text ended at
        `position`.
        """
        return self._recurrent is None and position >= self.whole_from

    def check(self, position: int) -> None:
        """Raise ContextError if it does not, unless the whole text is dropped."""
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
