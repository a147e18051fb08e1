"""Define the interface of all stores: what every store does, what some stores do besides, and the
values in which they give and take what they hold.

Every store implements the abstract methods of Store. What only some stores can do is a capability
with a name: `drafts`, `sharing`, `pooled`, `freezing` and `learning` are None where a store does
not have it, so that callers ask for a capability and never for a class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import ContextError
from entropykv.llamacpp.context import SEQUENCE
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.positions import RopeRange
from entropykv.llamacpp.recurrent import RecurrentState, cannot_go_back
from entropykv.policy.division import LossCurve
from entropykv.profile.predictor import ScorePredictor
from entropykv.settings.freezing import Rung
from entropykv.settings.options import Budget


class PoolFigures(Protocol):
    """Tell the bytes that all stores of a pool take together."""

    @property
    def budget_bytes(self) -> int:
        """Return the bytes that the entries of all sequences can never exceed."""

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the entries of all sequences."""

    @property
    def peak_bytes(self) -> int:
        """Return the largest number of bytes that entries have taken."""

    @property
    def staging_bytes(self) -> int:
        """Return the bytes that entries of a micro-batch take outside the budget."""

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of working memory that all sequences share."""


class Places(PoolFigures, Protocol):
    """Give every store of a pool a place of the same size."""

    def resize(self, budget: Budget) -> None:
        """Give all stores their equal part of another budget, or leave all as they were.

        Raises BudgetError if there is no memory for it.
        """


class StoreContext(ABC):
    """Hold a llama_context, and the hook that changes its graphs.

    Its stores are those of the sequences that it decodes. In a pool, they share `pages` or have
    `places`; the other attribute is None.
    """

    handle: Any = None
    """The llama_context; None before it is made, and after close()."""
    hook: _core.GraphHook | _core.WeightHook
    """The hook that changes the graphs of the context, and can time their nodes."""
    layers: Sequence[_core.LayerShape] = ()
    """The shapes of the model's attention layers, if the graph was probed for them; empty on the
    flat store.
    """
    recurrent: bool = False
    """True if stores save, besides entries, the state of recurrent layers, which llama.cpp has for
    each sequence and which cannot be rolled back. False on the flat store, where llama.cpp's own
    saved state includes it.
    """
    reads_together: bool = True
    """False if a step can read single tokens of several sequences, or a piece of one prompt, but
    not both together.
    """
    least_patience: float = 0.0
    """How many seconds a step waits at least for the next tokens of the sessions of the last step;
    more than 0 where a step without some of them costs more than waiting.
    """
    masked_by_llama: bool = False
    """True if llama.cpp's own attention decides which tokens see each other."""
    let_help: Callable[[int], None] | None = None
    """A function that lets n further threads help with products: see GraphHook.help(). None where
    results depend on the number of threads that compute attention.
    """
    only_embeds: bool = False
    """True if devices compute everything but the embeddings of tokens."""
    pages: _core.SequencePool | None = None
    """The pages that the context's stores share; None if they share none."""
    places: Places | None = None
    """The places of the context's stores; None if they have none."""

    @property
    def on_host(self) -> str | None:
        """Return a sentence that says for which layers on a device attention is computed in main
        memory, and why; None if there are none.
        """
        return None

    @property
    def pool(self) -> PoolFigures | None:
        """Return the figures in bytes of what the stores of the context share; None for a session
        alone.
        """
        return self.pages or self.places

    def begin_step(self) -> None:
        """Begin a micro-batch; called before before() of the stores of its sequences."""
        return  # If there is only one store, it may begin the micro-batch itself.

    @abstractmethod
    def end_step(self) -> None:
        """End the micro-batch after llama_decode, before the stores' after() is called.

        Raises RuntimeError if the graph was not as expected.
        """

    def close(self) -> None:
        """Free the context."""
        if self.handle:
            llama_cpp.llama_free(self.handle)
            self.handle = None


Logits = npt.NDArray[np.float32]
Shares = npt.NDArray[np.uint8]
CacheMapFunction = Callable[[int, int, int], tuple[Shares, Shares, Shares]]
"""A function that shows what a store holds when it is called: see SessionCache.map() for its
arguments and result.
"""


@dataclass(frozen=True)
class StoreFacts:
    """Hold the properties of a store that never change."""

    n_kv_heads: int
    """The number of KV heads of all layers."""
    bytes_full_per_token: int
    """Bytes of K and V of one token for all KV heads, in f16."""
    rope: RopeRange
    """The positions that RoPE may see."""
    rope_obstacle: str = ""
    """Why the session cannot continue beyond the positions of `rope`; empty if it can."""
    file_format: str = ""
    """The name of the store in whose format states are saved; empty: that of the store itself."""
    key_centres: str | None = None
    """A hash of how keys are stored: see store/headwise.py; None: as they are."""
    saves_cells: bool = False
    """True if a saved state holds cells of llama.cpp, whose format depends on its version."""


@dataclass(frozen=True, eq=False)
class Embedded:
    """Hold embeddings that are read instead of those of tokens."""

    rows: npt.NDArray[np.float32]
    """The embeddings, (tokens, n_embd)."""
    positions: npt.NDArray[np.int32] | None
    """The positions at which M-RoPE sees the embeddings, (4, tokens); None: consecutive positions.
    """
    sees_all: bool
    """True where the embeddings attend to each other, also to later ones."""


class TokensToRead(NamedTuple):
    """Say what one sequence reads in a micro-batch."""

    n_tokens: int
    """How many tokens of the sequence's text are read, with drafts; 0 if there is only an echo."""
    position: int
    """The position in the text of the first token that is read."""
    n_echo: int = 0
    """How many tokens of an echo follow, of which nothing is kept."""
    n_drafts: int = 0
    """How many of the `n_tokens`, the last ones, are drafts; DraftReader.settle() must follow."""
    embedded: Embedded | None = None
    """Embeddings that are read instead of tokens."""
    recalls: bool = True
    """Whether frozen entries may be recalled if several tokens are read; for a single token, this
    happens at intervals.
    """


class Reach(NamedTuple):
    """Say how much of a text a store's budget holds, in tokens."""

    whole: int
    """The length of the longest text from which nothing is evicted; n_ctx: nothing ever is."""
    sure: int
    """The longest text of which every KV head certainly keeps all; n_ctx if nothing is evicted."""
    recent_window: int
    """How many of the newest entries every KV head keeps."""


Section = bytearray | memoryview
"""The bytes of a section of a saved state, which may be changed."""
LOST = (
    "the file of a saved session or document was changed while its entries were in use, so that "
    "they are lost; load it again, and replace such files instead of writing to them"
)
"""The message of the error for entries that are lost with a mapped file."""


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
    """True if the next token searches frozen entries, as after thaw()."""
    whole_from: int
    """The position from which on layers with a window hold everything that they see."""
    file: _core.MappedFile | None = None
    """The mapped file that the sections are memory of; None if they have memory of their own."""


class DamagedState(Exception):  # noqa: N818  (it is caught where the file's name is known)
    """Raised for a saved state that no store can have written; its message names what is
    impossible.
    """


class StateDoesNotFit(Exception):  # noqa: N818
    """Raised for a valid state that the store cannot load; its message says what to do."""


@dataclass(frozen=True)
class StoreCheckpoint:
    """Hold a checkpoint of a headwise store: pages that it shares with the store, and the other
    state that decoding needs.
    """

    core: _core.Checkpoint
    shift: int
    """How far positions of the text are ahead of those that RoPE sees, see Store.shift."""
    whole_from: int
    """The position from which on layers with a window hold everything that they see."""
    seen: npt.NDArray[np.float64] | None
    """What budgets that follow the text have measured; None if there are none."""
    recurrent: bytes
    """The state of recurrent layers in llama.cpp's format; empty without such layers."""
    n_bytes: int
    """The bytes that the checkpoint holds besides the pages."""
    n_pages: int
    """How many pages the checkpoint holds, including pages that it shares."""

    def copy(self) -> StoreCheckpoint:
        """Return another checkpoint that owns the same pages."""
        return replace(self, core=self.core.copy())

    @property
    def is_lost(self) -> bool:
        """Tell whether entries are lost, because someone has changed the file that their pages are
        mapped from.
        """
        return self.core.is_lost

    def drop(self) -> None:
        """Give the pages back to the pool; the checkpoint cannot be used any more."""
        self.core.drop()


class RollbackRange:
    """Tell to which positions layers with windows can be rolled back."""

    def __init__(
        self,
        model: Model,
        core: _core.HeadwiseStore | _core.DeviceStore,
        recurrent: RecurrentState | None,
    ) -> None:
        """Start with an empty store. `recurrent`: the state of recurrent layers, which can never be
        rolled back; None without such layers.
        """
        self._model = model
        self._core = core
        self._recurrent = recurrent
        self._loaded = 0

    @property
    def whole_from(self) -> int:
        """Return the first position from which on windows are complete, so that the store can be
        rolled back to it.
        """
        return max(self._loaded, self._core.windows_whole_from)

    def begin_from(self, whole_from: int) -> None:
        """Record from which position on the windows of a loaded text are complete; this may be
        called before the text is loaded.
        """
        self._loaded = whole_from

    def leads_to(self, position: int) -> bool:
        """Tell whether the store holds everything that it held when the text ended at `position`;
        False with recurrent layers.
        """
        return self._recurrent is None and position >= self.whole_from

    def check(self, position: int) -> None:
        """Raise ContextError if the store cannot be rolled back to a position: see leads_to().
        Position 0 is always possible.
        """
        if position == 0:
            return
        if self._recurrent is not None:
            raise cannot_go_back(self._model, position)
        if not self.leads_to(position):
            raise ContextError(
                f"{self._model.name}: cannot go back to position {position}: layers with a sliding "
                f"window are sure to hold what they see only from position {self.whole_from} on; "
                "call reset() and read the text again"
            )

    def note_truncated(self, position: int) -> None:
        """Record that everything from a position on was dropped."""
        self._loaded = min(self._loaded, position)


class DraftReader(Protocol):
    """Read guessed tokens behind a token, and undo those that were wrong."""

    def most_drafts(self, position: int, wanted: int) -> int:
        """Return how many drafts may follow the next token, at `position`, at most `wanted`.

        It returns 0 where the changes by wrong drafts could not be undone.
        """

    def settle(self, n_right: int) -> None:
        """Undo what all drafts of the last micro-batch but the first `n_right` have changed."""


class TextBudgets(Protocol):
    """Share a budget among KV heads by what the text shows, and by how long it will be."""

    def expect(self, n_tokens: int) -> None:
        """Plan for a text of n_tokens: keep it whole if the budget can hold it, or else follow the
        policy. In a pool, whose shares set the plan, the plan stays.
        """

    def whole_before(self, position: int, n_tokens: int) -> int:
        """Return how many of the next tokens to read at once, from `position` on.

        Fewer than `n_tokens` are read if budgets should be set by what the text has shown before
        entries are evicted.
        """

    def share_again(self) -> None:
        """Share the budget by what echoes have shown about text that was read before."""

    def loss_curve(self) -> LossCurve | None:
        """Return what the text loses with fewer pages; None if that was not measured."""


class Thawable(Protocol):
    """Keep evicted entries in cold storage, from which they can return."""

    def check(self) -> None:
        """Raise FreezeError for an error of cold storage that was not raised yet, because it did
        not keep a micro-batch from being read.
        """

    def thaw(self, rung: Rung, window: int, position: int) -> int:
        """Restore frozen entries as SessionCache.thaw() does, in a text of `position` tokens;
        returns how many of all KV heads.
        """


class Learning(Protocol):
    """Predict the scores of entries, and collect the sums that a predictor is fitted to."""

    def fits(self, predictor: ScorePredictor) -> bool:
        """Tell whether a predictor is for the KV heads and features of the store's entries."""

    def adopt(self, predictor: ScorePredictor) -> None:
        """Predict scores of new entries; raises ProfileError if the predictor does not fit."""

    def collect_lessons(self, on: bool) -> None:
        """Start (`on`) or stop to collect lessons, from the next micro-batch on."""

    def teach_stored(self, begin: int, end: int, shift: int) -> None:
        """Add the lessons of text at the positions [begin, end), which an echo has repeated after
        it was read; `shift`: that of the store.
        """

    def lessons(self) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
        """Yield for every layer how many entries gave lessons, and their sums of products: see
        HeadwiseStore.lessons() in _core.pyi.
        """

    def clear_lessons(self) -> None:
        """Set all lessons to zero, and free their memory if they are no longer collected."""

    def predict_held(self, n_tokens: int, shift: int) -> None:
        """Predict the scores of all entries that are held of a text of n_tokens; `shift`: that of
        the store.
        """


class Pooled(ABC):
    """Define what a store does that shares a context and a budget with others.

    The default methods are for stores that leave nothing in the pool while their sequences are
    swapped out.
    """

    rollback: RollbackRange
    """To which positions the sequence can be rolled back."""
    copies_checkpoints: bool = False
    """True if a checkpoint is a copy of the state outside the pool, because pages cannot
    be shared.
    """
    share_pages: int = 0
    """The most pages of the pool that the store may hold."""

    @abstractmethod
    def take_place(self, sequence: int) -> None:
        """Take a place in the pool: `sequence` is llama.cpp's number for the sequence, which reads
        from now on. Raises BudgetError without memory for the place.
        """

    def take_share(self, pages: int, longest: int | None) -> None:
        """Hold at most this many pages of the pool, and evict what exceeds them; raises FreezeError
        if it is to be frozen and cold storage has no room.

        `longest`: the most tokens that the text may have, if the share holds all of them; None: the
        whole context.
        """
        raise NotImplementedError  # Stores with places of equal size share no pages.

    @abstractmethod
    def set_aside(self) -> None:
        """Drop everything, and leave the place to others of the pool."""

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page of checkpoints; 0 if nothing stays in the pool."""
        return 0

    @property
    @abstractmethod
    def n_entries(self) -> int:
        """Return how many entries all KV heads hold."""

    @abstractmethod
    def set_evicted(self, n: int) -> None:
        """Set how many entries were evicted so far; called when the store takes over the text of
        another one.
        """

    def checkpoint(self) -> StoreCheckpoint | None:
        """Return a checkpoint that shares the current pages; None if the state must be copied
        instead.
        """
        return None

    def go_on_from(self, checkpoint: StoreCheckpoint, *, ends: bool) -> bool:  # noqa: ARG002
        """Replace the content by that of a checkpoint, which is dropped if it `ends`; returns False
        if the pool has no room, and then the store is empty.
        """
        return False

    def state_of(self, checkpoint: StoreCheckpoint) -> StoreState:
        """Return what state() would have returned when a checkpoint was made."""
        raise NotImplementedError


class Store(ABC):
    """Keep K and V of one sequence under a budget, in a llama_context."""

    name: str
    facts: StoreFacts
    context: StoreContext
    """The context that decodes the sequence, of this store alone or of several."""
    sequence: int = SEQUENCE
    """llama.cpp's number of the sequence."""
    shift: int
    """How far positions of the text are ahead of those that RoPE sees. The store changes it when
    keys are moved, and loading sets it.
    """

    sharing: TextBudgets | None = None
    """The part that sets budgets by what the text shows; None: they do not depend on the text."""
    freezing: Thawable | None = None
    """The part that keeps evicted entries in cold storage; None: they are dropped for good."""
    learning: Learning | None = None
    """The part that predicts the scores of entries and collects lessons; None: the store learns no
    predictor.
    """

    @property
    def drafts(self) -> DraftReader | None:
        """Return the part that reads guessed tokens; None if none can be read, or undone."""
        return None

    @property
    def pooled(self) -> Pooled | None:
        """Return the store by its interface for pools; None if it cannot share a pool."""
        return None

    @abstractmethod
    def before(self, reading: TokensToRead) -> None:
        """Make room for a micro-batch, within the positions that RoPE may see.

        Raises UnsupportedModelError if the store cannot read embeddings of this kind, FreezeError
        if cold storage is full or was changed, SessionFileError if a mapped file was changed.
        """

    @abstractmethod
    def after(self, n_tokens: int) -> None:
        """Bring the store in order after llama_decode, of whose tokens the first n_tokens are kept
        as text.
        """

    @abstractmethod
    def resize(self, budget: Budget) -> None:
        """Apply a new budget: a larger one takes effect at once, a smaller one evicts. Raises
        BudgetError for one that is too small or does not fit into memory.
        """

    @abstractmethod
    def reach(self) -> Reach:
        """Return how much of a text the budget holds."""

    @abstractmethod
    def truncate(self, position: int) -> None:
        """Drop entries from a position on.

        Raises ContextError, and changes nothing, if entries would be missing that are needed to
        continue.
        """

    def can_return_to(self, position: int) -> bool:  # noqa: ARG002
        """Tell whether truncate() to an earlier position leaves the entries of that time.

        Only windows and recurrent layers are considered: not evictions since then, and not position
        0, to which every store can be truncated.
        """
        return True

    @abstractmethod
    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending, (n,)."""

    def importance(self, layer: int, kv_head: int) -> npt.NDArray[np.float32] | None:  # noqa: ARG002
        """Return the importance of the entries of entries(), float32, (n,); None if the policy or
        the store does not measure attention.
        """
        return None

    @abstractmethod
    def budgets(self) -> list[tuple[int, ...]]:
        """Return the budgets in entries, as [layer][KV head]."""

    def cache_map(self) -> CacheMapFunction:
        """Return a function that shows what is held, for viewers: see SessionCache.map()."""
        return self._look

    def _look(self, first: int, per_column: int, n_columns: int) -> tuple[Shares, Shares, Shares]:
        rows = [
            self.entries(layer, kv_head)
            for layer, heads in enumerate(self.budgets())
            for kv_head in range(len(heads))
        ]
        return held_shares(rows, first, per_column, n_columns)

    @property
    @abstractmethod
    def evicted(self) -> int:
        """Return how many entries of all KV heads were evicted so far."""

    @abstractmethod
    def counters(self) -> dict[str, Any]:
        """Return the store's figures for SessionStats, with those of frozen entries only if the
        store freezes.
        """

    @abstractmethod
    def state(self) -> StoreState:
        """Return everything that decoding depends on; its sections can be read until the store
        changes.
        """

    @abstractmethod
    def check_state(self, state: SavedState) -> None:
        """Raise DamagedState or StateDoesNotFit if load_state() would fail."""

    @abstractmethod
    def load_state(self, state: SavedState) -> None:
        """Replace the content by a checked state, and evict down to the budget.

        An exception leaves the store unchanged, except for those that a store's own load_state()
        names.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what is this store's own; the context's owner frees the context."""


def held_shares(
    rows: Sequence[npt.NDArray[np.int32]], first: int, per_column: int, n_columns: int
) -> tuple[Shares, Shares, Shares]:
    """Return a cache map of the kept positions in `rows`, in which no entry is frozen or restored:
    see SessionCache.map().
    """
    counts = []
    for positions in rows:
        columns = (positions - first) // per_column
        inside = columns[(columns >= 0) & (columns < n_columns)]
        counts.append(np.bincount(inside, minlength=n_columns))
    held = np.ceil(255 * np.array(counts) / per_column).astype(np.uint8)
    return held, np.zeros_like(held), np.zeros_like(held)
