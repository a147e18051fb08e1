"""One micro-batch of one sequence for llama_decode, and the logits it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv.errors import EntropyKVError

SEQUENCE = 0


class MicroBatch:
    """A llama_batch of up to n_ubatch tokens, used again and again."""

    def __init__(self, n_ubatch: int, n_vocab: int) -> None:
        """Allocate it."""
        self._batch = llama_cpp.llama_batch_init(n_ubatch, 0, 1)
        self._n_vocab = n_vocab
        for i in range(n_ubatch):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = SEQUENCE

    def decode(
        self, context: Any, tokens: Sequence[int], position: int, *, n_rows: int
    ) -> npt.NDArray[np.float32] | None:
        """Decode tokens at `position`; logits of the last `n_rows` of them, (n_rows, n_vocab).

        None for n_rows 0. Raises EntropyKVError where llama.cpp fails.
        """
        batch, n_tokens = self._batch, len(tokens)
        batch.n_tokens = n_tokens
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position + i
            batch.logits[i] = i >= n_tokens - n_rows
        code = llama_cpp.llama_decode(context, batch)
        if code != 0:
            raise EntropyKVError(f"llama.cpp could not decode (code {code}); call reset() first")
        if n_rows == 0:
            return None
        pointer: Any = llama_cpp.llama_get_logits(context)
        rows = np.ctypeslib.as_array(pointer, shape=(n_rows * self._n_vocab,))
        return rows.reshape(n_rows, self._n_vocab).copy()

    def close(self) -> None:
        """Free it."""
        llama_cpp.llama_batch_free(self._batch)
