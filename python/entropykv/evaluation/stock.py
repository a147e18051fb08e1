"""Run stock llama.cpp with the interface of a Session: the baseline of bench and eval."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import EntropyKVError
from entropykv.llamacpp.context import SEQUENCE, context_parameters, let_hook_change, relu2_layers
from entropykv.llamacpp.model import Model
from entropykv.settings.cache_options import CacheOptions
from entropykv.store.step import MicroBatch


@dataclass(frozen=True)
class StockState:
    """Hold a sequence in llama.cpp's serialised form."""

    position: int
    data: npt.NDArray[np.uint8]


class StockSession:
    """Run a plain llama.cpp context: full f16 cache, flash attention on or off.

    A hook changes the gates of a squared-ReLU model, as in a Session; everything else is stock.
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
        """Load the model and make a context of n_ctx cells; raises the errors of Session."""
        options = CacheOptions(n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=n_threads)
        self.model = Model(path, n_gpu_layers=0, verbose=False, repack=True)
        self._context: Any = None
        try:
            parameters = context_parameters(self.model, options, n_ubatch, n_ctx)
            parameters.flash_attn_type = (
                llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
                if flash
                else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
            self.hook = _core.WeightHook(relu2_layers(self.model, options))
            let_hook_change(parameters, self.hook)
            self._context = self.model.new_context(parameters)
        except BaseException:
            self.model.close()
            raise
        self._n_ubatch = n_ubatch
        self._batch = MicroBatch(n_ubatch, self.model.n_vocab)
        self.position = 0

    def tokenize(self, text: str, add_bos: bool | None = False) -> list[int]:
        """Return the tokens of a text, without BOS by default; None adds BOS if the model
        wants it.
        """
        add = self.model.adds_bos if add_bos is None else add_bos
        return self.model.tokenize(text, add_bos=add, special=True)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without control tokens."""
        return self.model.detokenize(tokens, special=False)

    def decode(self, tokens: Sequence[int], all_logits: bool = False) -> npt.NDArray[np.float32]:
        """Read tokens, and return logits in the form of Session.decode()."""
        parts = self.read(tokens, all_logits)
        return np.concatenate([logits for logits in parts if logits is not None])

    @property
    def reader(self) -> StockSession:
        """Return the session itself, which reads as Session.reader does."""
        return self

    @property
    def files(self) -> StockSession:
        """Return the session itself, which keeps states as Session.files does."""
        return self

    def read(
        self, tokens: Sequence[int], all_logits: bool
    ) -> Iterator[npt.NDArray[np.float32] | None]:
        """Yield each micro-batch's logits in the form of Session.reader.read()."""
        for first in range(0, len(tokens), self._n_ubatch):
            part = tokens[first : first + self._n_ubatch]
            last = first + len(part) == len(tokens)
            logits = self._batch.decode(
                self._context, part, self.position, n_rows=len(part) if all_logits else int(last)
            )
            self.position += len(part)
            yield logits

    def save_state(self) -> StockState:
        """Return the current state, for load_state() of this session; raises EntropyKVError if
        llama.cpp cannot save it.
        """
        data = np.empty(llama_cpp.llama_state_seq_get_size(self._context, SEQUENCE), np.uint8)
        done = llama_cpp.llama_state_seq_get_data(
            self._context, _bytes_of(data), data.size, SEQUENCE
        )
        if done != data.size:
            raise EntropyKVError("llama.cpp could not save its state; use a shorter text")
        return StockState(self.position, data)

    def load_state(self, state: StockState) -> None:
        """Restore a state that save_state() returned; raises EntropyKVError if llama.cpp cannot
        load it, and then holds no tokens.
        """
        self.reset()
        data = state.data
        if not llama_cpp.llama_state_seq_set_data(
            self._context, _bytes_of(data), data.size, SEQUENCE
        ):
            raise EntropyKVError("llama.cpp could not load its state; use a shorter text")
        self.position = state.position

    def reset(self) -> None:
        """Forget every token."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        self.position = 0

    def close(self) -> None:
        """Free the context and the model."""
        self._batch.close()
        llama_cpp.llama_free(self._context)
        self.model.close()


def _bytes_of(data: npt.NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
