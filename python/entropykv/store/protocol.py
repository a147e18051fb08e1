"""Define the interface of all stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import (
    EntropyKVError,
    FreezeError,
    PoolError,
    SessionFileError,
    UnsupportedModelError,
)
from entropykv.llamacpp.batch import SEQUENCE, BatchPart, Embedded, MicroBatch
from entropykv.llamacpp.positions import RopeRange
from entropykv.settings.options import Budget
from entropykv.settings.recovery import Rung

if TYPE_CHECKING:
    from entropykv.store.headwise_state import StoreCheckpoint
    from entropykv.store.rollback_range import RollbackRange

Logits = npt.NDArray[np.float32]
Shares = npt.NDArray[np.uint8]
Section = bytearray | memoryview
"""The bytes of a section of a saved state, which may be changed."""
CacheMapFunction = Callable[[int, int, int], tuple[Shares, Shares, Shares]]
"""Shows what a store holds when it is called: see Session.cache_map() for its arguments."""


@dataclass(frozen=True)
class StoreState:
    """Hold the parts of a store's state, for a file or for swapped out sequences."""

    entries: list[list[int]]
    """Number of entries, as [layer][KV head]."""
    evicted: int
    section_bytes: list[int]
    sections: Iterator[bytes]
    recalls_now: bool = False
    """True if the next token searches frozen entries, as after thaw()."""
    whole_from: int = 0
    """The position from which on layers with a window hold everything that they see."""


@dataclass(frozen=True)
class SavedState:
    """Hold the saved state of a store, for check_state() and load_state()."""

    position: int
    """The position of the next token."""
    entries: list[list[int]]
    """Number of entries, as [layer][KV head]."""
    evicted: int
    shift: int
    """How far positions of the text are ahead of those that RoPE sees, see Store.shift."""
    sections: Sequence[Section]
    """The sections, as in StoreState; load_state() may change or discard their bytes."""
    recalls_now: bool
    """As in StoreState."""
    whole_from: int | None
    """As in StoreState; None: a file of an earlier version does not say it."""
    file: _core.MappedFile | None = None
    """The file that the sections are mapped from; None if they are in memory of their own."""


class DamagedState(Exception):  # noqa: N818  (it is caught where the file's name is known)
    """Raised for a saved state that no store has written; the text names the impossible value."""


class StateDoesNotFit(Exception):  # noqa: N818
    """Raised for a valid state that this store cannot load; the text says what to do."""


class Store(ABC):
    """Keep K and V under a budget, in one llama_context.

    Every store implements the abstract methods; the others have default bodies for stores that need
    nothing there.
    """

    name: str
    file_format: str = ""
    """Whose saved states it reads and writes, by the name of a store; empty: its own."""
    key_centres: str | None = None
    """A hash of how keys are stored: see store/key_centres.py; None: as they are."""
    context: Any
    """The llama_context to decode with; resize() may replace it."""
    hook: _core.GraphHook | _core.WeightHook
    """Changes the context's graphs, and can time their nodes."""
    n_kv_heads: int
    """The number of KV heads of all layers."""
    bytes_full_per_token: int
    """Bytes of K and V of one token for all KV heads, in f16."""

    rope: RopeRange
    """The positions that RoPE may see."""
    rope_obstacle: str
    """Why the session cannot continue beyond those positions; empty if it can."""
    rebases: int
    """How often stored keys were moved to other positions."""
    sequence: int = SEQUENCE
    """llama.cpp's number of the store's sequence."""
    masked_by_llama: bool = False
    """True where llama.cpp's own attention says which tokens see each other."""

    @property
    @abstractmethod
    def shift(self) -> int:
        """Return how far positions of the text are ahead of those that RoPE sees; loading
        sets it.
        """

    @shift.setter
    @abstractmethod
    def shift(self, shift: int) -> None: ...

    def rope_position(self, position: int) -> int:
        """Return the RoPE position of a position in the text."""
        return _core.rope_position(position, self.rope.n_sinks, self.shift)

    def whole_before(self, position: int, n_tokens: int) -> int:  # noqa: ARG002
        """Return how many of the next tokens to read at once, from `position` on.

        It is fewer than `n_tokens` if budgets should follow what the text has shown before entries
        are evicted.
        """
        return n_tokens

    def begin_step(self) -> None:
        """Begin a micro-batch, before the stores of all its sequences make room for it."""
        return  # A store that is alone in its context does not need this.

    def end_step(self) -> None:
        """End the micro-batch after llama_decode, before the stores' after() is called."""
        return

    @abstractmethod
    def before(
        self,
        n_tokens: int,
        position: int,
        n_echo: int = 0,
        n_drafts: int = 0,
        *,
        embedded: Embedded | None = None,
        recalls: bool = True,
    ) -> None:
        """Make room for a micro-batch, within the positions that RoPE may see.

        `n_echo` more tokens follow, of which nothing is kept; `n_tokens` may be 0 then. The last
        `n_drafts` of the tokens are drafts, at most most_drafts(): settle() follows the decode.
        `embedded`: embeddings that are read instead of tokens; raises UnsupportedModelError if the
        store cannot read them. `recalls`: whether several tokens may recall frozen entries.
        """

    def most_drafts(self, position: int, wanted: int) -> int:  # noqa: ARG002
        """Return how many drafts may follow the next token, at `position`, at most `wanted`.

        0 where what wrong drafts change could not be undone.
        """
        return 0

    def drafts_in_place(self, position: int, wanted: int) -> int:
        """Return how many of `wanted` drafts may follow a token before keys move to other
        positions.
        """
        while wanted and self.rope.shift_for(self.shift, position, 1 + wanted) != self.shift:
            wanted -= 1
        return wanted

    def settle(self, n_right: int) -> None:
        """Undo what all drafts of the last micro-batch but the first `n_right` have changed."""
        raise NotImplementedError

    @abstractmethod
    def after(self, n_tokens: int, position: int) -> None:
        """Update the store after llama_decode; raises if the graph was not as expected."""

    def share_again(self) -> None:
        """Share the budget by what echoes have shown of text that was read before."""
        return  # Heads with equal budgets keep them.

    def check(self) -> None:
        """Raise FreezeError for an error that did not affect the reading of a micro-batch."""
        return  # Only cold storage can have such errors.

    def thaw(self, rung: Rung, window: int, position: int) -> int:  # noqa: ARG002
        """Restore frozen entries, see Session.thaw(); returns how many, 0 without cold storage."""
        return 0

    @abstractmethod
    def resize(self, budget: Budget) -> None:
        """Apply a new budget: a larger one takes effect at once, a smaller one evicts."""

    def expect(self, n_tokens: int) -> None:  # noqa: ARG002
        """Plan for a text of n_tokens: if the bytes hold it, it is kept whole."""
        return  # A store with the same budget for every text has no other plan.

    @property
    @abstractmethod
    def sure_entries(self) -> int:
        """Return how many of the newest tokens every KV head certainly keeps; n_ctx if nothing is
        evicted.
        """

    @property
    @abstractmethod
    def whole_entries(self) -> int:
        """Return the longest text whose budgets evict nothing; n_ctx: they never do."""

    @property
    @abstractmethod
    def recent_window(self) -> int:
        """Return how many of the newest entries every KV head keeps."""

    @abstractmethod
    def truncate(self, position: int) -> None:
        """Drop entries from a position on.

        Raises ContextError, and changes nothing, if entries would be missing that are needed to
        continue.
        """

    def can_return_to(self, position: int) -> bool:  # noqa: ARG002
        """Tell whether truncate() to an earlier position leaves the entries of that time.

        Evictions since then are not considered, nor is position 0, at which nothing was held.
        """
        return True

    @abstractmethod
    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending."""

    def importance(self, layer: int, kv_head: int) -> npt.NDArray[np.float32] | None:  # noqa: ARG002
        """Return the importance of the entries of entries(); None if it is not attention."""
        return None

    @abstractmethod
    def cache_map(self) -> CacheMapFunction:
        """Return a function that shows what is held: see Session.cache_map()."""

    @abstractmethod
    def budgets(self) -> list[tuple[int, ...]]:
        """Return the budgets in entries, as [layer][KV head]."""

    @property
    @abstractmethod
    def evicted(self) -> int:
        """Return how many entries of all KV heads were evicted so far."""

    @abstractmethod
    def counters(self) -> dict[str, Any]:
        """Return the store's figures for SessionStats; figures of frozen entries only if it has
        some.
        """

    @abstractmethod
    def state(self) -> StoreState:
        """Return everything that decoding depends on; valid until the next change."""

    @abstractmethod
    def check_state(self, state: SavedState) -> None:
        """Raise DamagedState or StateDoesNotFit if load_state() would fail."""

    @abstractmethod
    def load_state(self, state: SavedState) -> None:
        """Replace the content by a checked state, and evict down to the budget.

        An exception leaves the store unchanged.
        """

    def close(self) -> None:
        """Free the context."""
        if self.context:
            llama_cpp.llama_free(self.context)
            self.context = None


class PooledStore(Store):
    """A store whose sequence may share a context and its budget with others.

    Stores that keep nothing in the pool while their sequences are swapped out need nothing but the
    default bodies.
    """

    rollback: RollbackRange
    """To which positions the sequence can be rolled back."""
    copies_checkpoints: bool = False
    """True if a checkpoint is a copy of the state outside the pool, whose pages are not shared."""

    @abstractmethod
    def take_place(self, sequence: int) -> None:
        """Use this number as llama.cpp's number of the sequence, which reads from now on."""

    @abstractmethod
    def set_aside(self) -> None:
        """Drop everything, and leave the place to others of the pool."""

    @property
    @abstractmethod
    def n_entries(self) -> int:
        """Return how many entries all KV heads hold."""

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Return the bytes of a page of checkpoints."""

    @abstractmethod
    def set_evicted(self, n: int) -> None:
        """Set how many entries were evicted so far, because the text is that of another store."""

    def checkpoint(self) -> StoreCheckpoint | None:
        """Share the current pages; None if the state must be copied instead."""
        return None

    def go_on_from(self, checkpoint: StoreCheckpoint, *, ends: bool) -> bool:  # noqa: ARG002
        """Replace the content by that of a checkpoint; returns False if there is no room."""
        return False

    def state_of(self, checkpoint: StoreCheckpoint) -> StoreState:
        """Return what state() would have returned when a checkpoint was made."""
        raise NotImplementedError

    def predict_held(self, n_tokens: int) -> None:  # noqa: ARG002
        """Predict the scores of all entries that are held, for a text of n_tokens."""
        return  # A store without predictions has none to catch up with.


@dataclass
class Part:
    """Hold tokens of one sequence in a micro-batch, and their result."""

    store: Store
    tokens: Sequence[int]
    position: int
    n_rows: int
    """For how many of the last tokens logits are computed."""
    echo: Sequence[int] = ()
    """Tokens that follow, of which nothing is kept: their queries score the entries."""
    embedded: Embedded | None = None
    """Embeddings that are read instead of tokens, without an echo."""
    lag: int = 0
    """By how much RoPE's position is less than the text position, because of earlier images."""
    recalls: bool = True
    """Whether frozen entries may be recalled for several tokens."""
    n_drafts: int = 0
    """How many of the tokens, the last ones, are drafts; all tokens get logits then."""
    verify: Callable[[Logits], int] | None = None
    """Returns how many drafts are right, by the logits of all tokens; it must not raise."""
    n_right: int = field(default=0, init=False)
    """How many of the drafts were right, and are read."""
    logits: npt.NDArray[np.float32] | None = field(default=None, init=False)
    """The logits, (n_rows, n_vocab); None for n_rows 0."""
    error: BaseException | None = field(default=None, init=False)
    untouched: bool = field(default=True, init=False)
    """True if the store is still unchanged after an error."""

    @property
    def is_single(self) -> bool:
        """Tell whether it is one token, as those that are written, with its drafts."""
        return len(self.tokens) - self.n_drafts + len(self.echo) == 1 and self.embedded is None

    @property
    def n_read(self) -> int:
        """Return how many tokens of the text were read: all but wrong drafts."""
        return len(self.tokens) - self.n_drafts + self.n_right

    def limit_drafts(self) -> None:
        """Leave out the last drafts where the store could not undo so many."""
        if self.n_drafts:
            most = self.store.most_drafts(self.position, self.n_drafts)
            self.tokens = self.tokens[: len(self.tokens) - self.n_drafts + most]
            self.n_drafts, self.n_rows = most, 1 + most

    def settle(self, logits: Logits | None) -> None:
        """Take the logits, and bring the store in order after the decode."""
        if self.n_drafts and self.verify is not None and logits is not None:
            self.n_right = self.verify(logits)
            self.store.settle(self.n_right)
        try:
            self.store.after(self.n_read, self.position)
        except SessionFileError as error:  # Its pages are lost, but not those of other parts.
            self.error = error
            return
        self.logits = logits

    def result(self) -> npt.NDArray[np.float32] | None:
        """Return the logits, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.logits


def decode_parts(parts: Sequence[Part], batch: MicroBatch, model_name: str) -> None:
    """Decode one micro-batch, whose parts are of sequences in one context; single tokens come
    first.

    An error is stored in those parts that it concerns.
    """
    first = parts[0].store
    first.begin_step()
    for part in parts:
        part.limit_drafts()
    in_order = sorted(parts, key=lambda part: (not part.is_single, part.n_drafts > 0))
    ready = [part for part in in_order if _made_room(part, model_name)]
    if not ready:
        return
    try:
        rows = batch.decode_parts(
            first.context,
            [
                BatchPart(
                    part.tokens,
                    part.store.rope_position(part.position) - part.lag,
                    part.n_rows,
                    part.echo,
                    part.store.sequence,
                    part.embedded,
                    part.store.masked_by_llama,
                )
                for part in ready
            ],
        )
        first.end_step()
        for part, logits in zip(ready, rows, strict=True):
            part.settle(logits)
    except Exception as error:
        for part in ready:
            part.error = _as_ours(error, model_name)


def _made_room(part: Part, model_name: str) -> bool:
    try:
        part.store.before(
            len(part.tokens),
            part.position,
            len(part.echo),
            part.n_drafts,
            embedded=part.embedded,
            recalls=part.recalls,
        )
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
    """Convert an error of the extension about an unexpected graph to a typed error."""
    if isinstance(error, EntropyKVError) or not isinstance(error, RuntimeError):
        return error
    converted = UnsupportedModelError(f"{model_name}: {error}")
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
    """Decode one micro-batch of one sequence; returns logits as MicroBatch.decode() does.

    Raises UnsupportedModelError if the graph is not as the store expects.
    """
    part = Part(store, tokens, position, n_rows, echo)
    decode_parts([part], batch, model_name)
    return part.result()
