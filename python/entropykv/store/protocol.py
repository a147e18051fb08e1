"""Define what a session needs of a store, whichever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import EntropyKVError, FreezeError, PoolError, UnsupportedModelError
from entropykv.llamacpp.batch import SEQUENCE, BatchPart, Embedded, MicroBatch
from entropykv.llamacpp.positions import RopeRange
from entropykv.settings.options import Budget
from entropykv.settings.recovery import Rung

Shares = npt.NDArray[np.uint8]
CacheLook = Callable[[int, int, int], tuple[Shares, Shares, Shares]]
"""Inspections at what a store holds when it is called: see Session.cache_map() for its
arguments."""


@dataclass(frozen=True)
class StoreState:
    """Hold what a store needs to be saved."""

    entries: list[list[int]]
    """Number of entries, as [layer][KV head]."""
    evicted: int
    section_bytes: list[int]
    sections: Iterator[bytes]
    recalls_now: bool = False
    """Whether the next token looks for frozen entries, as it does after thaw()."""


@dataclass(frozen=True)
class SavedState:
    """Hold the state of a store when it was saved, for check_state() and load_state()."""

    position: int
    """Position of the next token."""
    entries: list[list[int]]
    """Number of entries, as [layer][KV head]."""
    evicted: int
    shift: int
    """How far positions of the text are before what RoPE sees, see Store.shift."""
    sections: Sequence[bytearray]
    """The sections, as StoreState has them; load_state() may change them."""
    recalls_now: bool
    """As StoreState has it."""


class DamagedState(Exception):  # noqa: N818  (it is caught where the file's name is known)
    """Raised for a saved state that no store wrote; the text names what cannot be."""


class StateDoesNotFit(Exception):  # noqa: N818
    """Raised for a sound state that this store cannot take in; the text says the way out."""


class Store(ABC):
    """Keep K and V under a budget, in one llama_context.

    Abstract methods are what every store does; the others have a body for stores that need nothing
    there.
    """

    name: str
    context: Any
    """The llama_context to decode with; resize() may put another in its place."""
    hook: _core.GraphHook | _core.WeightHook
    """What changes the context's graphs, and can time their nodes."""
    n_kv_heads: int
    """How many KV heads all layers have together."""
    bytes_full_per_token: int
    """Bytes of K and V of one token for all KV heads, in f16."""

    rope: RopeRange
    """Positions that RoPE may see."""
    rope_obstacle: str
    """Why the session cannot go on beyond those positions; empty if it can."""
    rebases: int
    """How often stored keys were moved to other positions."""
    sequence: int = SEQUENCE
    """llama.cpp's number of the store's sequence."""
    masked_by_llama: bool = False
    """True where llama.cpp's own attention says which tokens see each other."""

    @property
    @abstractmethod
    def shift(self) -> int:
        """Return how far positions of the text are before what RoPE sees; loading sets it."""

    @shift.setter
    @abstractmethod
    def shift(self, shift: int) -> None: ...

    def rope_position(self, position: int) -> int:
        """Return where RoPE sees a position of the text."""
        return _core.rope_position(position, self.rope.n_sinks, self.shift)

    def whole_before(self, position: int, n_tokens: int) -> int:  # noqa: ARG002
        """Return how many of the next tokens to read at once, from `position` on.

        Fewer than `n_tokens` where budgets should follow what the text has shown before it is
        evicted.
        """
        return n_tokens

    def begin_step(self) -> None:
        """Begin a micro-batch, before the stores of all its sequences make room for it."""
        return  # a store that is alone in its context need not tell it

    def end_step(self) -> None:
        """End the micro-batch after llama_decode, before the stores bring themselves in order."""
        return

    @abstractmethod
    def before(
        self, n_tokens: int, position: int, n_echo: int = 0, *, embedded: Embedded | None = None
    ) -> None:
        """Make room for a micro-batch, below the positions that RoPE may see.

        `n_echo` more tokens follow, of which nothing is kept; `n_tokens` may be 0 then. `embedded`:
        what is read in the place of the tokens; UnsupportedModelError where that cannot be.
        """

    @abstractmethod
    def after(self, n_tokens: int, position: int) -> None:
        """Bring the store in order after llama_decode; raises where the graph was not as served."""

    def share_again(self) -> None:
        """Share the budget by what echoes have shown of text that was read before."""
        return  # heads of equal budgets keep them

    def check(self) -> None:
        """Raise what went wrong beside a micro-batch that was read well: FreezeError."""
        return  # only cold storage can fail so

    def thaw(self, rung: Rung, window: int, position: int) -> int:  # noqa: ARG002
        """Restore frozen entries, see Session.thaw(); returns how many, 0 without cold storage."""
        return 0

    @abstractmethod
    def resize(self, budget: Budget) -> None:
        """Apply a new budget: a larger one holds at once, a smaller one evicts."""

    def expect(self, n_tokens: int) -> None:  # noqa: ARG002
        """Plan for a text of so many tokens: one that the bytes hold is kept whole."""
        return  # a store whose budget is the same for every text has no other plan

    @property
    @abstractmethod
    def sure_entries(self) -> int:
        """Return how many tokens every KV head keeps for sure; n_ctx where none is evicted."""

    @property
    @abstractmethod
    def whole_entries(self) -> int:
        """Return how long a text may get before its budgets evict anything; n_ctx: they do not."""

    @property
    @abstractmethod
    def recent_window(self) -> int:
        """Return how many of the newest entries every KV head keeps."""

    @abstractmethod
    def truncate(self, position: int) -> None:
        """Drop entries at and beyond a position.

        Raises ContextError, and nothing has changed, where that would leave other entries than are
        needed to go on.
        """

    def can_return_to(self, position: int) -> bool:  # noqa: ARG002
        """Tell whether truncate() to an earlier position leaves what was there then.

        Eviction since is not counted, nor is position 0, where nothing was held.
        """
        return True

    @abstractmethod
    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending."""

    @abstractmethod
    def cache_map(self) -> CacheLook:
        """Return a function that looks at what is held: see Session.cache_map()."""

    @abstractmethod
    def budgets(self) -> list[tuple[int, ...]]:
        """Return the budgets in entries, as [layer][KV head]."""

    @property
    @abstractmethod
    def evicted(self) -> int:
        """Return how many entries of all KV heads were evicted so far."""

    @abstractmethod
    def counters(self) -> dict[str, Any]:
        """Return the store's figures for SessionStats; of frozen entries only where it has any."""

    @abstractmethod
    def state(self) -> StoreState:
        """Return everything that decoding depends on; valid until the next change."""

    @abstractmethod
    def check_state(self, state: SavedState) -> None:
        """Raise DamagedState or StateDoesNotFit where load_state() would not go well."""

    @abstractmethod
    def load_state(self, state: SavedState) -> None:
        """Replace everything by a checked state, and evict down to the budget.

        An Exception leaves the store as it was.
        """

    def close(self) -> None:
        """Free the context."""
        if self.context:
            llama_cpp.llama_free(self.context)
            self.context = None


@dataclass
class Part:
    """Hold tokens of one sequence in a micro-batch, and what came of them."""

    store: Store
    tokens: Sequence[int]
    position: int
    n_rows: int
    """How many of the last tokens get logits."""
    echo: Sequence[int] = ()
    """Tokens that follow, of which nothing is kept: their queries rank the entries."""
    embedded: Embedded | None = None
    """Embeddings that are read in the place of the tokens, without an echo."""
    lag: int = 0
    """How far RoPE's position is behind that of the text, by images before."""
    logits: npt.NDArray[np.float32] | None = field(default=None, init=False)
    """Logits, (n_rows, n_vocab); None for n_rows 0."""
    error: BaseException | None = field(default=None, init=False)
    untouched: bool = field(default=True, init=False)
    """True while the store is still what it was, although there is an error."""

    @property
    def is_single(self) -> bool:
        """Tell whether it is one token, as those that are written."""
        return len(self.tokens) + len(self.echo) == 1 and self.embedded is None

    def result(self) -> npt.NDArray[np.float32] | None:
        """Return the logits, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.logits


def decode_parts(parts: Sequence[Part], batch: MicroBatch, model_name: str) -> None:
    """Decode one micro-batch, whose parts are of sequences in one context; single tokens first.

    What goes wrong becomes the error of those parts that it concerns.
    """
    first = parts[0].store
    first.begin_step()
    ready = [part for part in parts if _made_room(part, model_name)]
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
            part.store.after(len(part.tokens), part.position)
            part.logits = logits
    except Exception as error:
        for part in ready:
            part.error = _as_ours(error, model_name)


def _made_room(part: Part, model_name: str) -> bool:
    try:
        part.store.before(len(part.tokens), part.position, len(part.echo), embedded=part.embedded)
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
    """Turn what the extension says of a graph that is not as it needs it into a typed error."""
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
    """Decode one micro-batch of one sequence; returns logits as MicroBatch.decode does.

    Raises UnsupportedModelError where the graph is not what the store must change.
    """
    part = Part(store, tokens, position, n_rows, echo)
    decode_parts([part], batch, model_name)
    return part.result()
