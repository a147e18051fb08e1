"""Save and restore the state of recurrent layers, which llama.cpp owns and cannot roll back.

The memory of a hybrid model has cells of its attention layers and one state for the recurrent ones.
Clearing it would clear both; removing all positions but the last one keeps the state.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

from entropykv.errors import ContextError
from entropykv.llamacpp.context import SEQUENCE
from entropykv.llamacpp.model import Model, captured_log

WHY = "it has recurrent layers"


def is_recurrent(model: Model) -> bool:
    """Tell whether some or all layers carry a state from token to token."""
    handle = model.handle
    return bool(
        llama_cpp.llama_model_is_recurrent(handle) or llama_cpp.llama_model_is_hybrid(handle)
    )


def cannot_go_back(model: Model, position: int) -> ContextError:
    """Return the error for a truncate() to a position other than 0."""
    return ContextError(
        f"{model.name}: cannot go back to position {position}: {WHY}, whose state is that of the "
        "last token; call reset() and read the text again"
    )


class RecurrentState:
    """Save and replace the recurrent state that a hybrid model has for a sequence."""

    def __init__(self, context: Any) -> None:
        """Use a context, which must live as long as this object."""
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self.sequence = SEQUENCE

    def forget_cells(self) -> None:
        """Free all cells of the attention layers but the last; raises RuntimeError if that
        fails.
        """
        last = llama_cpp.llama_memory_seq_pos_max(self._memory, self.sequence)
        if last > 0 and not llama_cpp.llama_memory_seq_rm(self._memory, self.sequence, 0, last):
            raise RuntimeError("llama.cpp does not free the cells of its attention layers")

    def forget(self) -> None:
        """Free the state and all cells, so that another text can begin."""
        llama_cpp.llama_memory_seq_rm(self._memory, self.sequence, -1, -1)

    def save(self) -> bytes:
        """Return the state in llama.cpp's format; raises RuntimeError if llama.cpp does not give
        it.
        """
        flags = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        size = llama_cpp.llama_state_seq_get_size_ext(self._context, self.sequence, flags)
        state = (ctypes.c_uint8 * size)()
        if (
            llama_cpp.llama_state_seq_get_data_ext(self._context, state, size, self.sequence, flags)
            != size
        ):
            raise RuntimeError("llama.cpp does not give the state of its recurrent layers")
        return bytes(state)

    def replace(self, state: bytes | bytearray | memoryview) -> bytes:
        """Load another state, and return the current one.

        Raises RuntimeError if llama.cpp refuses it; then nothing has changed.
        """
        former = self.save()
        if not self._load(state):
            self._load(former)
            raise RuntimeError("llama.cpp does not take the state of its recurrent layers")
        return former

    def _load(self, state: bytes | bytearray | memoryview) -> bool:
        self.forget()
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        flags = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        # Suppress llama.cpp's log: replace() raises an error that says what matters to a user.
        with captured_log():
            n_read = llama_cpp.llama_state_seq_set_data_ext(
                self._context, data, len(state), self.sequence, flags
            )
        return bool(n_read == len(state))
