"""Decode one micro-batch, whose tokens may belong to several sequences of one context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from entropykv.llamacpp.batch import BatchPart, Embedded, MicroBatch
from entropykv.store.protocol import Logits, Store, TokensToRead


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
        the decode; errors are kept for result().
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
        rows = batch.decode_parts(
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
    """Convert an error of the extension to a typed one, which tells an unexpected graph from a step
    that could not be computed.
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

    Raises UnsupportedModelError if the graph is not as the store expects, StepError if it could not
    be computed, and the errors of Store.before().
    """
    part = Part(store, tokens, position, n_rows, echo)
    decode_parts([part], batch, model_name)
    return part.result()
