"""Run the flat store in a session: llama.cpp's own cache, with cells for the budget."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import (
    BudgetError,
    ContextError,
    UnsupportedModelError,
)
from entropykv.llamacpp.context import (
    GGML_PAIRS,
    context_parameters,
    let_hook_change,
    refuse_diffusion,
    relu2_layers,
)
from entropykv.llamacpp.model import Model, captured_log, serves_products
from entropykv.llamacpp.positions import flat_range, k_shift_obstacle
from entropykv.llamacpp.recurrent import cannot_go_back, is_recurrent
from entropykv.policy.plan import FlatPlan
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.find import check_model
from entropykv.settings.options import Budget
from entropykv.store.protocol import (
    DamagedState,
    Reach,
    SavedState,
    Shares,
    StateDoesNotFit,
    Store,
    StoreContext,
    StoreFacts,
    StoreState,
    TokensToRead,
    held_shares,
)


class FlatContext(StoreContext):
    """Hold a context in which llama.cpp computes attention; another one with more cells can replace
    it.
    """

    masked_by_llama = True

    def __init__(self, model: Model, config: ResolvedConfig) -> None:
        """Make the hook that changes the graphs; the store makes the llama_context and passes it to
        replace().

        Raises UnsupportedModelError for a squared-ReLU model whose layers are offloaded, and for a
        diffusion model.
        """
        refuse_diffusion(model)
        self._model = model
        self._config = config
        options = config.options
        n_gates = relu2_layers(model, options)
        self.hook: _core.WeightHook = _core.WeightHook(
            n_gates, options.most_threads, 1 + options.draft_max
        )
        self._hooked = n_gates > 0 or serves_products()

    def new_handle(self, cells: int) -> Any:
        """Make a llama_context with `cells` cells, for replace(); raises ModelFileError if
        llama.cpp cannot.
        """
        config = self._config
        parameters = context_parameters(self._model, config.options, config.n_ubatch, cells)
        parameters.type_k, parameters.type_v = GGML_PAIRS[config.kv_type]
        if config.kv_type != "f16":
            parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if self._hooked:
            let_hook_change(parameters, self.hook)
        return self._model.new_context(parameters)

    def replace(self, handle: Any) -> None:
        """Use the llama_context `handle` from now on, and free the one before."""
        self.close()
        self.handle = handle

    def end_step(self) -> None:
        """Raise RuntimeError if a gate of a squared-ReLU model was not changed."""
        self.hook.check_step()


WITHOUT_HOLES = frozenset({"qwen4exp"})
"""Architectures with a second cache of compressed keys. As of llama-cpp-python 0.3.36, an assertion
about its indices ends the process once positions are missing; no API reports this.
"""


class FlatStore(Store):
    """Evict whole positions from llama.cpp's own cache: all heads keep the same ones."""

    name = "flat"
    context: FlatContext

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        context: FlatContext,
        budget: Budget,
    ) -> None:
        """Give a context as many cells as the budget and one micro-batch need.

        The context's former llama_context is freed. Raises UnsupportedModelError if the budget is
        below the context and the architecture is in WITHOUT_HOLES, BudgetError for a budget that is
        too small, ProfileError for a profile of another model, and the error of new_handle().
        """
        options, geometry = config.options, model.geometry
        if config.profile:
            check_model(config.profile, geometry)
        self._model = model
        self._is_recurrent = is_recurrent(model)
        self._window = max(0, llama_cpp.llama_model_n_swa(model.handle))
        """How many of the newest positions layers with sliding windows see; 0 without windows."""
        self._config = config
        self._heads_per_layer = geometry.kv_heads_per_layer
        plan = self._plan(budget)
        self._cells = plan.cells
        self._recent_window = plan.protection.recent_window
        self.context = context
        context.replace(context.new_handle(plan.cells))
        self._store = _core.FlatStore(
            context=_address(context.handle),
            budget=plan.entries,
            score=config.policy.importance.kind,
            n_sinks=plan.protection.n_sinks,
            recent_window=plan.protection.recent_window,
            rope_sinks=options.n_sinks,
        )
        self._rebases = 0
        self._position = 0
        """The position of the first token of the last micro-batch."""
        rope = flat_range(model, config.n_ctx, options.n_sinks)
        obstacle = ""
        if config.n_ctx > rope.limit:
            obstacle = k_shift_obstacle(model, context.handle, options, config.kv_type)
        self.facts = StoreFacts(
            n_kv_heads=sum(geometry.kv_heads_per_layer),
            bytes_full_per_token=2 * geometry.cached_values,
            rope=rope,
            rope_obstacle=obstacle,
            saves_cells=True,
        )

    @property
    def shift(self) -> int:
        """Return how far positions of the text are ahead of those that RoPE sees."""
        return self._store.shift

    @shift.setter
    def shift(self, shift: int) -> None:
        self._store.shift = shift

    def _plan(self, budget: Budget) -> FlatPlan:
        plan = self._config.flat_plan(budget)
        if plan.entries < self._config.n_ctx and self._model.geometry.architecture in WITHOUT_HOLES:
            raise UnsupportedModelError(
                f"{self._model.name}: llama.cpp fails where positions of this architecture "
                f"({self._model.geometry.architecture}) are missing from its cache, so nothing can "
                "be evicted; use --kv-budget 1.0 (kv_budget=1.0)"
            )
        return plan

    def before(self, reading: TokensToRead) -> None:
        """Compact the cells if holes would cost attention time; rotate keys if positions run out.

        Raises UnsupportedModelError for images with positions of several dimensions (M-RoPE).
        """
        embedded, position = reading.embedded, reading.position
        if embedded is not None and embedded.positions is not None:
            raise UnsupportedModelError(
                f"{self._model.name}: its images have positions of several dimensions (M-RoPE), by "
                "which the flat store cannot evict; use --store headwise (store='headwise')"
            )
        self._position = position
        self._store.make_room(reading.n_tokens)
        shift = self.facts.rope.shift_for(self.shift, position, reading.n_tokens)
        # Rotate only directly before a decode, so that a state saved before is not rotated.
        if shift != self.shift:
            self._store.rebase(shift)
            self._rebases += 1
        self.context.hook.begin_step()

    @property
    def drafts(self) -> FlatStore | None:
        """Return the store itself; None with recurrent layers or sliding windows, where wrong
        drafts cannot be undone: cells of a window lose what they held when a draft overwrites them.
        """
        return None if self._is_recurrent or self._window > 0 else self

    def most_drafts(self, position: int, wanted: int) -> int:
        """Return how many drafts may follow the token at `position`, at most `wanted`: as many as
        evict nothing and move no keys.
        """
        room = min(self._store.budget - self._store.entries, self._config.n_ubatch)
        in_place = self.facts.rope.drafts_in_place(self.shift, position, wanted)
        return max(0, min(in_place, room - 1))

    def settle(self, n_right: int) -> None:
        """Remove the cells of wrong drafts, before any other token attends to them."""
        memory = llama_cpp.llama_get_memory(self.context.handle)
        first = self.facts.rope.seen(self._position + 1 + n_right, self.shift)
        llama_cpp.llama_memory_seq_rm(memory, self.sequence, first, -1)

    def after(self, n_tokens: int) -> None:
        """Evict down to the budget."""
        self._store.settle(self._position, n_tokens)

    def resize(self, budget: Budget) -> None:
        """Evict down to a smaller budget; move to a context with more cells for a larger one.
        Raises BudgetError as Store.resize() does, and the other errors of the constructor.
        """
        plan = self._plan(budget)
        if plan.cells > self._cells:
            self._move_to(plan.cells)
        self._recent_window = plan.protection.recent_window
        self._store.set_budget(plan.entries, plan.protection.n_sinks, self._recent_window)

    def _move_to(self, cells: int) -> None:
        """Move to a larger context; if that fails, change nothing and raise BudgetError, or
        ModelFileError without such a context.
        """
        larger = self.context.new_handle(cells)
        try:
            with captured_log():
                self._store.move_to(_address(larger))
        except (MemoryError, RuntimeError) as error:
            llama_cpp.llama_free(larger)
            raise BudgetError(
                f"{self._model.name}: what is held cannot be moved to a cache of {cells} cells "
                f"({error}); give a smaller budget"
            ) from error
        self.context.replace(larger)
        self._cells = cells

    def reach(self) -> Reach:
        """Return the budget, which is the same for all KV heads."""
        budget = self._store.budget
        return Reach(whole=budget, sure=budget, recent_window=self._recent_window)

    def truncate(self, position: int) -> None:
        """Drop entries from a position on.

        Raises ContextError if the entry before it was evicted, because llama.cpp can only continue
        after that one; if a recurrent state is beyond it; and if layers with sliding windows have
        lost entries that the next token would see.
        """
        if self._is_recurrent and position > 0:
            raise cannot_go_back(self._model, position)
        if position > 0 and position - 1 not in self._store.positions:
            raise ContextError(
                f"cannot go back to position {position}: the flat store has evicted the token "
                "before it; go back less far, or call reset() and read the text again"
            )
        if not self._windows_are_whole(position):
            raise ContextError(
                f"{self._model.name}: cannot go back to position {position}: layers with a sliding "
                "window have dropped what they would see from there; go back less far, or call "
                "reset() and read the text again"
            )
        self._store.truncate(position)
        if position == 0:
            self.shift = 0

    def can_return_to(self, position: int) -> bool:
        """Tell whether recurrent layers and sliding windows allow a rollback to a position."""
        return not self._is_recurrent and self._windows_are_whole(position)

    def _windows_are_whole(self, position: int) -> bool:
        """Tell whether layers with sliding windows hold everything that a token at `position` would
        see.

        llama.cpp reuses cells of these layers that are outside of the window. The positions that it
        still holds begin at llama_memory_seq_pos_min().
        """
        held = self._store.positions
        in_window = held[(held >= position - self._window) & (held < position)]
        if position == 0 or self._window == 0 or in_window.size == 0:
            return True
        memory = llama_cpp.llama_get_memory(self.context.handle)
        first = llama_cpp.llama_memory_seq_pos_min(memory, self.sequence)
        return bool(first <= self.facts.rope.seen(int(in_window[0]), self.shift))

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:  # noqa: ARG002
        """Return the kept positions, ascending, (n,): the same for every layer and head."""
        return self._store.positions

    def _look(self, first: int, per_column: int, n_columns: int) -> tuple[Shares, Shares, Shares]:
        """Return a cache map with a single row, because every KV head keeps the same positions: see
        held_shares().
        """
        return held_shares([self._store.positions], first, per_column, n_columns)

    def budgets(self) -> list[tuple[int, ...]]:
        """Return the budgets in entries, as [layer][KV head]."""
        return [(self._store.budget,) * heads for heads in self._heads_per_layer]

    def state(self) -> StoreState:
        """Return the state: the positions that are kept, and llama.cpp's state of the sequence,
        after compacting the cells.
        """
        state = self._store.save_state()
        positions = self._store.positions.astype("<i4").tobytes()
        return StoreState(
            entries=[[self._store.entries] * heads for heads in self._heads_per_layer],
            evicted=self._store.evicted,
            section_bytes=[len(positions), len(state)],
            sections=iter((positions, state)),
        )

    def check_state(self, state: SavedState) -> None:
        """Check positions and their number; llama.cpp checks its own state when it is loaded.

        Raises DamagedState, or StateDoesNotFit for more positions than there are cells.
        """
        sections = state.sections
        positions = np.frombuffer(sections[0], "<i4") if len(sections) == 2 else None
        if positions is None:
            raise DamagedState("other sections than those of the flat store")
        n = len(positions)
        if state.entries != [[n] * heads for heads in self._heads_per_layer]:
            raise DamagedState("another number of positions than of entries")
        ends = [-1, *positions.tolist(), state.position]
        if ends[-2] != ends[-1] - 1 or any(a >= b for a, b in itertools.pairwise(ends)):
            raise DamagedState("positions that cannot be")
        if n > self._cells:
            raise StateDoesNotFit(
                f"keeps {n} tokens, more than the {self._cells} cells of this session; use "
                f"--kv-budget {n} (kv_budget={n}) or more"
            )

    def load_state(self, state: SavedState) -> None:
        """Load llama.cpp's state, and evict; raises RuntimeError if llama.cpp refuses it."""
        positions, cells = state.sections
        # Suppress llama.cpp's log, because the raised error says what matters to a user.
        with captured_log():
            self._store.load_state(
                np.frombuffer(positions, "<i4").tolist(), cells, state.evicted, state.shift
            )

    @property
    def evicted(self) -> int:
        """Return how many entries of all KV heads were evicted so far."""
        return self._store.evicted * self.facts.n_kv_heads

    def counters(self) -> dict[str, Any]:
        """Return this store's figures for SessionStats."""
        cell_bytes = self._config.cell_bytes
        return {
            "kv_type": self._config.kv_type,
            "kv_bytes_budget": self._cells * cell_bytes,
            "kv_bytes_peak": self._store.peak * cell_bytes,
            "kv_bytes_now": self._store.entries * cell_bytes,
            "kv_bytes_staging": self._store.largest_copy,
            "kv_bytes_scratch": 0,
            "products": self.context.hook.products,
            "products_bytes_scratch": self.context.hook.products_scratch_bytes,
            "entries_kept": self._store.entries * self.facts.n_kv_heads,
            "evictions": self.evicted,
            "eviction_seconds": self._store.eviction_seconds,
            "rebases": self._rebases,
        }

    def close(self) -> None:
        """Do nothing: everything that the store uses belongs to the context."""


def _address(context: Any) -> int:
    return ctypes.cast(context, ctypes.c_void_p).value or 0
