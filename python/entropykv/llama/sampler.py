"""Sample from the logits of one sequence, where several share a context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import _internals as internals

_KIND = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class SamplerOfSequence:
    """Be the chain of samplers that llama_cpp.Llama uses, but do not read the context's logits."""

    def __init__(
        self,
        chain: internals.LlamaSampler,
        logits_at: Callable[[int], npt.NDArray[np.float32]],
    ) -> None:
        """Take a chain; `logits_at` returns the logits of a row: -1 is the last one."""
        self._chain = chain
        self._logits_at = logits_at
        self._data = np.zeros(0, _KIND)
        """Used again for every token: it is larger than what an allocator keeps at hand."""

    def sample(self, _: Any, row: int = -1) -> int:
        """Choose a token by the logits of a row, and tell the chain."""
        logits = self._logits_at(row)
        if self._data.size != logits.size:
            self._data = np.zeros(logits.size, _KIND)
            self._ids = np.arange(logits.size, dtype=np.int32)
        data = self._data
        data["id"] = self._ids  # samplers sort them
        data["logit"] = logits
        data["p"] = 0.0
        pointer = data.ctypes.data_as(llama_cpp.llama_token_data_p)
        array = llama_cpp.llama_token_data_array(pointer, data.size, -1, False)
        llama_cpp.llama_sampler_apply(self._chain.sampler, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        llama_cpp.llama_sampler_accept(self._chain.sampler, token)
        return token

    def close(self) -> None:
        """Free the chain."""
        self._chain.close()  # type: ignore[no-untyped-call]
