"""Define what a session needs of a store, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import EntropyKVError, FreezeError, PoolError, UnsupportedModelError
from entropykv.llamacpp.batch import SEQUENCE, BatchPart, MicroBatch
from entropykv.llamacpp.positions import RopeRange
from entropykv.settings.options import Budget
from entropykv.settings.recovery import Rung

Shares = npt.NDArray[np.uint8]
CacheLook = Callable[[int, int, int], tuple[Shares, Shares, Shares]]
"""See Session.cache_map()."""


@dataclass(frozen=True)
class StoreState:
    """State of a store, for it to be saved."""

    entries: list[list[int]]
    """[layer][KV head]"""
    evicted: int
    section_bytes: list[int]
    sections: Iterator[bytes]


@dataclass(frozen=True)
class SavedState:
    """State of a store when it was saved, for check_state() and load_state()."""

    position: int
    """Of the next token."""
    entries: list[list[int]]
    """[layer][KV head]"""
    evicted: int
    shift: int
    """See Store.shift."""
    sections: Sequence[bytearray]
    """As StoreState has them; load_state() may change them."""


class DamagedState(Exception):  # noqa: N818  (it is caught where the file's name is known)
    """A saved state that no store wrote; the text names what cannot be."""


class StateDoesNotFit(Exception):  # noqa: N818
    """A sound state that this store cannot take in; the text says why, and the way out."""


class Store(Protocol):
    """A KV cache under a budget, in one llama_context."""

    name: str
    context: Any
    """The llama_context to decode with; may change in resize()."""
    n_kv_heads: int
    """Of all layers."""
    bytes_full_per_token: int
    """K and V of one token for all KV heads, in f16."""

    rope: RopeRange
    """Positions that RoPE may see."""
    rope_obstacle: str
    """Why the session cannot go on beyond them; empty if it can."""
    rebases: int
    """How often stored keys were moved to other positions."""
    sequence: int = SEQUENCE
    """llama.cpp's number of its sequence."""

    @property
    def shift(self) -> int:
        """How far positions of the text are before what RoPE sees; set where a state is loaded."""

    @shift.setter
    def shift(self, shift: int) -> None: ...

    def rope_position(self, position: int) -> int:
        """Where RoPE sees a position of the text."""
        return _core.rope_position(position, self.rope.n_sinks, self.shift)

    def begin_step(self) -> None:
        """Begin a micro-batch, before the stores of all its sequences make room for it."""
        return  # a store that is alone in its context has nothing to tell it

    def end_step(self) -> None:
        """End it after llama_decode, before the stores bring themselves in order."""
        return

    def before(self, n_tokens: int, position: int, n_echo: int = 0) -> None:
        """Make room for a micro-batch, below the positions that RoPE may see.

        `n_echo` more tokens follow, of which nothing is kept; `n_tokens` may be 0 then.
        """

    def after(self, n_tokens: int, position: int) -> None:
        """Bring the store in order after llama_decode; raises where the graph was not as served."""

    def share_again(self) -> None:
        """Share the budget by what echoes have shown of text that was read before."""
        return  # equal budgets of all heads stay as they are

    def check(self) -> None:
        """Raise what went wrong beside a micro-batch that was read well: FreezeError."""
        return  # without cold storage, nothing can

    def thaw(self, rung: Rung, window: int, position: int) -> int:  # noqa: ARG002
        """Restore frozen entries: see Session.thaw(). None without cold storage."""
        return 0

    def resize(self, budget: Budget) -> None:
        """Apply a new budget: grows at once, shrinks by evicting."""

    @property
    def sure_entries(self) -> int:
        """How many tokens every KV head keeps, whatever they are; n_ctx where none is evicted."""

    @property
    def whole_entries(self) -> int:
        """How long a text may get before the budgets of now evict anything; n_ctx: they do not."""

    @property
    def recent_window(self) -> int:
        """The newest entries, which every KV head keeps."""

    def truncate(self, position: int) -> None:
        """Drop entries at and beyond a position; ContextError, and nothing has changed, where that
        would leave other entries than are needed to go on.
        """

    def can_return_to(self, position: int) -> bool:  # noqa: ARG002
        """Whether truncate() to an earlier position, not 0, leaves what was there, had nothing been

        evicted meanwhile.
        """
        return True

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending."""

    def cache_map(self) -> CacheLook:
        """Return a function that looks at what is held: see Session.cache_map()."""

    def budgets(self) -> list[tuple[int, ...]]:
        """[layer][KV head] in entries."""

    @property
    def evicted(self) -> int:
        """Entries evicted so far, of all KV heads."""

    def counters(self) -> dict[str, Any]:
        """The store's part of SessionStats; of frozen entries only where it has any."""

    def state(self) -> StoreState:
        """Everything that decoding depends on; valid until the next change."""

    def check_state(self, state: SavedState) -> None:
        """Raise DamagedState or StateDoesNotFit where load_state() would not go well."""

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
    """Tokens of one sequence in a micro-batch, and what came of them."""

    store: Store
    tokens: Sequence[int]
    position: int
    n_rows: int
    """So many of the last tokens get logits."""
    echo: Sequence[int] = ()
    """Tokens that follow, of which nothing is kept."""
    logits: npt.NDArray[np.float32] | None = field(default=None, init=False)
    """(n_rows, n_vocab); None for n_rows 0."""
    error: BaseException | None = field(default=None, init=False)
    untouched: bool = field(default=True, init=False)
    """Whether the store is still what it was, although there is an error."""

    @property
    def is_single(self) -> bool:
        """Whether it is one token, as those that are written."""
        return len(self.tokens) + len(self.echo) == 1

    def result(self) -> npt.NDArray[np.float32] | None:
        """Return the logits, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.logits


def decode_parts(parts: Sequence[Part], batch: MicroBatch, model_name: str) -> None:
    """Decode one micro-batch, whose parts are of sequences in one context; single tokens first.

    What goes wrong is the error of those parts that it concerns.
    """
    host = parts[0].store
    host.begin_step()
    ready = [part for part in parts if _made_room(part, model_name)]
    if not ready:
        return
    try:
        rows = batch.decode_parts(
            host.context,
            [
                BatchPart(
                    part.tokens,
                    part.store.rope_position(part.position),
                    part.n_rows,
                    part.echo,
                    part.store.sequence,
                )
                for part in ready
            ],
        )
        host.end_step()
        for part, logits in zip(ready, rows, strict=True):
            part.store.after(len(part.tokens), part.position)
            part.logits = logits
    except Exception as error:
        for part in ready:
            part.error = _as_ours(error, model_name)


def _made_room(part: Part, model_name: str) -> bool:
    try:
        part.store.before(len(part.tokens), part.position, len(part.echo))
    except (FreezeError, PoolError) as error:
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
    """Decode one micro-batch of one sequence; logits as MicroBatch.decode returns them.

    Raises UnsupportedModelError where the graph is not what the store must change.
    """
    part = Part(store, tokens, position, n_rows, echo)
    decode_parts([part], batch, model_name)
    return part.result()
