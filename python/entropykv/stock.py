"""Stock llama.cpp at the level of a Session: the yardstick of bench and of the benchmarks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.batch import MicroBatch
from entropykv.config import Settings
from entropykv.model import Model
from entropykv.store import context_parameters, let_hook_change, relu2_layers


class StockSession:
    """llama.cpp's own context: full f16 cache, flash attention on or off.

    A squared-ReLU model gets its gates changed here, too: nothing else about it is stock.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int,
        n_threads: int,
        n_ubatch: int = 512,
        flash: bool = True,
    ) -> None:
        """Load the model and make a context of n_ctx cells; errors as those of Session."""
        settings = Settings(n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=n_threads)
        self._model = Model(path, n_gpu_layers=0, verbose=False)
        self._context: Any = None
        try:
            parameters = context_parameters(self._model, settings, n_ubatch, n_ctx)
            parameters.flash_attn_type = (
                llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
                if flash
                else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
            layers = relu2_layers(self._model, settings)
            if layers:
                self._gates = _core.GateHook(layers)
                let_hook_change(parameters, self._gates)
            self._context = self._model.new_context(parameters)
        except BaseException:
            self._model.close()
            raise
        self._n_ubatch = n_ubatch
        self._batch = MicroBatch(n_ubatch, self._model.n_vocab)
        self.position = 0

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text, without BOS."""
        return self._model.tokenize(text, add_bos=False, special=True)

    def decode(self, tokens: Sequence[int], all_logits: bool = False) -> npt.NDArray[np.float32]:
        """Logits as Session.decode returns them."""
        rows = []
        for first in range(0, len(tokens), self._n_ubatch):
            part = tokens[first : first + self._n_ubatch]
            last = first + len(part) == len(tokens)
            logits = self._batch.decode(
                self._context, part, self.position, n_rows=len(part) if all_logits else int(last)
            )
            self.position += len(part)
            if logits is not None:
                rows.append(logits)
        return np.concatenate(rows)

    def reset(self) -> None:
        """Forget every token."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        self.position = 0

    def close(self) -> None:
        """Free the context and the model."""
        self._batch.close()
        llama_cpp.llama_free(self._context)
        self._model.close()
