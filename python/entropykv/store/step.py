"""Decode one micro-batch, whose tokens may belong to several sequences of one context: the stores
make room, llama_decode computes (MicroBatch), and the stores are brought in order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import (
    EntropyKVError,
    FreezeError,
    PoolError,
    SessionFileError,
    StepError,
    UnsupportedModelError,
)
from entropykv.llamacpp.context import SEQUENCE
from entropykv.store.protocol import Embedded, Logits, Store, TokensToRead


@dataclass
class Part:
    """Hold tokens of one sequence in a micro-batch, and their result."""

    store: Store
    tokens: Sequence[int]
    position: int
    n_rows: int
    """For how many of the last tokens logits are computed."""
    echo: Sequence[int] = ()
    """The tokens of an echo that follow, whose queries score the entries, and of which nothing is
    kept.
    """
    embedded: Embedded | None = None
    """Embeddings that are read instead of tokens, without an echo."""
    lag: int = 0
    """By how much RoPE's position is less than the text position, because of earlier images."""
    recalls: bool = True
    """Whether frozen entries may be recalled if several tokens are read; for a single token, this
    happens at intervals.
    """
    n_drafts: int = 0
    """How many of the tokens, the last ones, are drafts; all tokens get logits then."""
    verify: Callable[[Logits], int] | None = None
    """A function that returns how many drafts are right, by the logits of all tokens, and must not
    raise.
    """
    n_right: int = field(default=0, init=False)
    """How many of the drafts were right, and stay as text."""
    logits: npt.NDArray[np.float32] | None = field(default=None, init=False)
    """The logits, (n_rows, n_vocab); None for n_rows 0."""
    error: BaseException | None = field(default=None, init=False)
    untouched: bool = field(default=True, init=False)
    """True if an error has left the store unchanged; the value means something only after
    an error.
    """

    @property
    def is_single(self) -> bool:
        """Tell whether the part is a single token, with or without drafts, as when a session
        writes.
        """
        return len(self.tokens) - self.n_drafts + len(self.echo) == 1 and self.embedded is None

    @property
    def n_read(self) -> int:
        """Return how many tokens of the text were read: all but wrong drafts."""
        return len(self.tokens) - self.n_drafts + self.n_right

    @property
    def rope_position(self) -> int:
        """Return the position at which RoPE sees the first token of the part."""
        store = self.store
        return store.facts.rope.seen(self.position, store.shift) - self.lag

    def reading(self) -> TokensToRead:
        """Return what the store has to make room for."""
        return TokensToRead(
            len(self.tokens),
            self.position,
            len(self.echo),
            self.n_drafts,
            self.embedded,
            self.recalls,
        )

    def limit_drafts(self, *, alone: bool) -> None:
        """Leave out drafts that the store could not undo, and all drafts where a step cannot read
        several tokens beside single tokens of other sequences; `alone`: the micro-batch has no
        other parts.
        """
        if self.n_drafts:
            drafts = self.store.drafts
            possible = drafts is not None and (alone or self.store.context.reads_together)
            most = drafts.most_drafts(self.position, self.n_drafts) if drafts and possible else 0
            self.tokens = self.tokens[: len(self.tokens) - self.n_drafts + most]
            self.n_drafts, self.n_rows = most, 1 + most

    def settle(self, logits: Logits | None) -> None:
        """Take the logits, (n_rows, n_vocab), undo wrong drafts, and bring the store in order after
        the decode; an impossible result of `verify` and a SessionFileError are kept for result().
        """
        drafts = self.store.drafts
        if self.n_drafts and drafts and self.verify is not None and logits is not None:
            self.n_right, self.error = self._verified(self.verify(logits))
            drafts.settle(self.n_right)
        try:
            self.store.after(self.n_read)
        except SessionFileError as error:  # The error concerns only the pages of this part.
            self.error = error
            return
        self.logits = logits

    def _verified(self, n_right: int) -> tuple[int, EntropyKVError | None]:
        """Return how many drafts are right, and None, or 0 and the error for an impossible
        number.
        """
        if 0 <= n_right <= self.n_drafts:
            return n_right, None
        return 0, EntropyKVError(
            f"verify returned {n_right}, and {self.n_drafts} drafts were read; return a number "
            f"from 0 to {self.n_drafts}, and call reset() before this session goes on"
        )

    def result(self) -> npt.NDArray[np.float32] | None:
        """Return the logits, (n_rows, n_vocab), or None for n_rows 0; raises the error that was
        kept.
        """
        if self.error is not None:
            raise self.error
        return self.logits


def decode_parts(parts: Sequence[Part], batch: MicroBatch, model_name: str) -> None:
    """Decode one micro-batch, whose parts are of sequences in one context; single tokens come
    first.

    An error is stored in the parts that it concerns. `model_name`: for messages.
    """
    context = parts[0].store.context
    context.begin_step()
    for part in parts:
        part.limit_drafts(alone=len(parts) == 1)
    # Parts are sorted by place, because a device attends for neighbouring places together.
    in_order = sorted(
        parts, key=lambda part: (not part.is_single, part.n_drafts > 0, part.store.sequence)
    )
    ready = [part for part in in_order if _made_room(part, model_name)]
    if not ready:
        return
    try:
        rows = batch.decode_together(
            context.handle,
            [
                BatchPart(
                    part.tokens,
                    part.rope_position,
                    part.n_rows,
                    part.echo,
                    part.store.sequence,
                    part.embedded,
                    context.masked_by_llama,
                )
                for part in ready
            ],
        )
        context.end_step()
        for part, logits in zip(ready, rows, strict=True):
            part.settle(logits)
    except Exception as error:
        for part in ready:
            part.error = _as_ours(error, model_name)


def _made_room(part: Part, model_name: str) -> bool:
    try:
        part.store.before(part.reading())
    except (FreezeError, PoolError, UnsupportedModelError) as error:
        part.error = error
    except Exception as error:
        part.untouched = False
        part.error = _as_ours(error, model_name)
    else:
        part.untouched = False
        return True
    return False


def _as_ours(error: Exception, model_name: str) -> Exception:
    """Return a RuntimeError of the extension as a typed error: UnsupportedModelError for an
    unexpected graph, else StepError; other errors unchanged.
    """
    if isinstance(error, EntropyKVError) or not isinstance(error, RuntimeError):
        return error
    converted: EntropyKVError
    if isinstance(error, _core.GraphError):
        converted = UnsupportedModelError(f"{model_name}: {error}")
    else:
        converted = StepError(
            f"a step could not be computed: {error}; call reset(), and read the text again"
        )
    converted.__cause__ = error
    return converted


def decode_inside(
    store: Store,
    batch: MicroBatch,
    tokens: Sequence[int],
    position: int,
    *,
    n_rows: int,
    model_name: str,
    echo: Sequence[int] = (),
) -> npt.NDArray[np.float32] | None:
    """Decode one micro-batch of one sequence; returns the logits of its last `n_rows` tokens,
    (n_rows, n_vocab), or None for `n_rows` 0.

    Raises UnsupportedModelError if the graph is not as the store expects, StepError if a step could
    not be computed, EntropyKVError if llama.cpp fails, and the errors of Store.before().
    """
    part = Part(store, tokens, position, n_rows, echo)
    decode_parts([part], batch, model_name)
    return part.result()


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
    ) -> Logits | None:
        """Decode tokens from RoPE position `position` on; returns the logits of the last ones,
        (n_rows, n_vocab).

        Returns None for n_rows 0. Raises EntropyKVError if llama.cpp fails.
        """
        return self.decode_together(context, [BatchPart(tokens, position, n_rows)])[0]

    def decode_together(self, context: Any, parts: Sequence[BatchPart]) -> list[Logits | None]:
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

    def _rows(self, context: Any, numbers: Sequence[int]) -> list[Logits | None]:
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
