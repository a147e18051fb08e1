"""Decode a micro-batch of one or several sequences with llama_decode, and read its logits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv.errors import EntropyKVError

SEQUENCE = 0
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Embedded:
    """Hold embeddings that are read instead of those of tokens."""

    rows: Rows
    """The embeddings, (tokens, n_embd)."""
    positions: npt.NDArray[np.int32] | None
    """The positions at which M-RoPE sees the embeddings, (4, tokens); None: consecutive positions.
    """
    sees_all: bool
    """True where the embeddings attend to each other, also to later ones."""


@dataclass(frozen=True)
class BatchPart:
    """Hold the tokens that one sequence has in a micro-batch."""

    tokens: Sequence[int]
    position: int
    """The RoPE position of the first token."""
    n_rows: int
    """For how many of the last tokens logits are computed."""
    echo: Sequence[int] = ()
    """Tokens that are read after `tokens`, without logits, so that their queries score the entries.
    """
    sequence: int = SEQUENCE
    """llama.cpp's number of the sequence."""
    embedded: Embedded | None = None
    """Embeddings that are read instead of tokens; such a part is alone in its micro-batch."""
    masked_by_llama: bool = False
    """True where llama.cpp's own mask says which tokens see each other."""


class MicroBatch:
    """Hold a llama_batch of up to `n_tokens` tokens, which every call reuses."""

    def __init__(self, n_tokens: int, n_vocab: int) -> None:
        """Allocate the batch; `n_vocab` is the length of a row of logits."""
        self._batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)
        self._n_vocab = n_vocab
        for i in range(n_tokens):
            self._batch.n_seq_id[i] = 1

    def decode(
        self, context: Any, tokens: Sequence[int], position: int, *, n_rows: int
    ) -> Rows | None:
        """Decode tokens from RoPE position `position` on; returns the logits of the last ones,
        (n_rows, n_vocab).

        Returns None for n_rows 0. Raises EntropyKVError if llama.cpp fails.
        """
        return self.decode_parts(context, [BatchPart(tokens, position, n_rows)])[0]

    def decode_parts(self, context: Any, parts: Sequence[BatchPart]) -> list[Rows | None]:
        """Decode tokens of several sequences together; returns for each part what decode() would
        return, and raises as decode() does.
        """
        batch, n = self._batch, 0
        if parts[0].embedded is not None:
            _decode_embedded(context, parts[0], parts[0].embedded)
            return self._rows(context, [parts[0].n_rows])
        for part in parts:
            n_tokens = len(part.tokens)
            for i, token in enumerate((*part.tokens, *part.echo)):
                batch.token[n] = token
                batch.pos[n] = part.position + i
                batch.seq_id[n][0] = part.sequence
                batch.logits[n] = n_tokens - part.n_rows <= i < n_tokens
                n += 1
        batch.n_tokens = n
        _decode(context, batch)
        return self._rows(context, [part.n_rows for part in parts])

    def _rows(self, context: Any, numbers: Sequence[int]) -> list[Rows | None]:
        """Return a copy of the context's logits for each part, because the next decode overwrites
        them; None for a part without logits.
        """
        n_rows = sum(numbers)
        if n_rows == 0:
            return [None] * len(numbers)
        pointer: Any = llama_cpp.llama_get_logits(context)
        flat = np.ctypeslib.as_array(pointer, shape=(n_rows * self._n_vocab,))
        rows = flat.reshape(n_rows, self._n_vocab)
        ends = np.cumsum(numbers)
        return [
            rows[end - n : end].copy() if n else None for n, end in zip(numbers, ends, strict=True)
        ]

    def close(self) -> None:
        """Free the batch."""
        llama_cpp.llama_batch_free(self._batch)


def _decode(context: Any, batch: Any) -> None:
    code = llama_cpp.llama_decode(context, batch)
    if code != 0:
        raise EntropyKVError(f"llama.cpp could not decode (code {code}); call reset() first")


def _decode_embedded(context: Any, part: BatchPart, embedded: Embedded) -> None:
    """Decode embeddings of one sequence: a batch has them or tokens, never both."""
    n = len(part.tokens)
    rows = np.ascontiguousarray(embedded.rows, np.float32)
    positions = embedded.positions
    if positions is None:
        positions = np.arange(part.position, part.position + n, dtype=np.int32)
    ids = ctypes.pointer(llama_cpp.llama_seq_id(part.sequence))
    wants_logits = [n - part.n_rows <= i for i in range(n)]
    batch = llama_cpp.llama_batch(
        n_tokens=n,
        token=None,
        embd=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        pos=positions.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
        n_seq_id=(ctypes.c_int32 * n)(*[1] * n),
        seq_id=(ctypes.POINTER(llama_cpp.llama_seq_id) * n)(*[ids] * n),
        logits=(ctypes.c_int8 * n)(*wants_logits),
    )
    sees_all = embedded.sees_all and part.masked_by_llama
    if sees_all:
        llama_cpp.llama_set_causal_attn(context, False)
    try:
        _decode(context, batch)
    finally:
        if sees_all:
            llama_cpp.llama_set_causal_attn(context, True)
