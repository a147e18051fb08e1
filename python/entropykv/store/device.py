"""Run the device store in a session: budgets per KV head, with K and V where the weights are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import BudgetError, UnsupportedModelError
from entropykv.llamacpp.batch import Embedded
from entropykv.llamacpp.context import relu2_layers
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.positions import RopeRange
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.plan import HeadwisePlan
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.settings.options import Budget
from entropykv.store.figures import core_counters, held_shares
from entropykv.store.headwise_probe import (
    check_config,
    hooked_context,
    probed_layers,
    refuse_by_kind,
    unsupported,
)
from entropykv.store.protocol import (
    CacheMapFunction,
    DamagedState,
    SavedState,
    Shares,
    StateDoesNotFit,
    Store,
    StoreState,
)

_NO_SHIFT = (
    "the device store does not move keys to other positions, which --store headwise "
    "(store='headwise') does"
)


class DeviceStore(Store):
    """Keep the entries of one sequence per (layer, KV head), on the device of the layer.

    Every KV head has rows for its budget and for one micro-batch, which are allocated when the
    store is made. Budgets do not change while a text is read.
    """

    name = "device"
    file_format = "headwise"
    hook: _core.GraphHook
    rebases = 0
    rope_obstacle = _NO_SHIFT

    def __init__(self, model: Model, config: ResolvedConfig, budget: Budget | None = None) -> None:
        """Make a context whose cells hold one micro-batch, and rows for the budget.

        `budget` None takes that of the config. Raises UnsupportedModelError if the model's graph
        has something that this store does not support, or a device cannot compute its attention.
        """
        refuse_by_kind(model, self.name)
        if is_recurrent(model):
            raise unsupported(model, "it has recurrent layers", self.name)
        options = config.options
        self._model, self._config = model, config
        self.hook = _core.GraphHook(
            relu2_layers(model, options), options.most_threads, on_devices=True
        )
        self.context: Any = hooked_context(
            model, options, self.hook, config.n_ubatch, 1, on_devices=True
        )
        try:
            self.layers = probed_layers(model, options, self.hook, self.context, self.name)
            self._check_layers()
            check_config(config, model, self.layers, self.hook.rope_obstacle)
            self._plan = self._plan_of(options.budget if budget is None else budget)
            self._store = self._make_rows()
        except BaseException:
            self.close()
            raise
        self.hook.serve_on_devices(self._store)
        self.rope = RopeRange(self.hook.rope_limit or model.geometry.n_ctx_train, options.n_sinks)
        self.n_kv_heads = sum(shape.n_head_kv for shape in self.layers)
        self.bytes_full_per_token = sum(2 * s.n_head_kv * s.entry_values for s in self.layers)

    def _check_layers(self) -> None:
        if any(shape.window for shape in self.layers):
            raise unsupported(self._model, "it has layers with sliding windows", self.name)
        if any(shape.readers > 1 for shape in self.layers):
            raise unsupported(self._model, "layers share their K and V", self.name)

    def _plan_of(self, budget: Budget) -> HeadwisePlan:
        return self._config.headwise_plan(budget, self.layers)

    def _make_rows(self) -> _core.DeviceStore:
        config, plan = self._config, self._plan
        try:
            return _core.DeviceStore(
                hook=self.hook,
                kv_type=config.kv_type,
                importance=config.policy.importance.settings(config.variation),
                n_sinks=plan.protection.n_sinks,
                recent_window=plan.protection.recent_window,
                max_tokens=config.n_ubatch,
                max_entries=config.n_ctx,
                budgets=list(itertools.chain(*plan.budgets)),
                n_threads=config.options.most_threads,
            )
        except MemoryError:
            raise BudgetError(
                f"{self._model.name}: a KV budget of {config.options.budget} in a context of "
                f"{config.n_ctx} tokens does not fit into the memory of its devices; give a "
                "smaller one (kv_budget, n_ctx), or offload fewer layers (n_gpu_layers)"
            ) from None
        except RuntimeError as error:
            raise unsupported(self._model, str(error), self.name) from None

    @property
    def shift(self) -> int:
        """Return 0, because keys are never moved."""
        return 0

    @shift.setter
    def shift(self, shift: int) -> None:
        if shift != 0:
            raise ValueError(_NO_SHIFT)

    @property
    def recent_window(self) -> int:
        """Return how many of the newest entries every KV head keeps."""
        return self._plan.protection.recent_window

    def before(
        self,
        n_tokens: int,
        position: int,
        n_echo: int = 0,  # noqa: ARG002
        n_drafts: int = 0,  # noqa: ARG002
        *,
        embedded: Embedded | None = None,
    ) -> None:
        """Choose the rows of the micro-batch, and free llama.cpp's cells."""
        if embedded is not None:
            raise UnsupportedModelError(
                f"{self._model.name}: the device store cannot read images; use --store headwise "
                "(store='headwise')"
            )
        # The graph expects token i of the micro-batch in cell i.
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        self._store.reserve(n_tokens, position)
        self.hook.begin_step()

    def after(self, n_tokens: int, position: int) -> None:  # noqa: ARG002
        """Check that every layer was served."""
        self.hook.check_step()

    def resize(self, budget: Budget) -> None:
        """Evict down to a smaller budget; raises BudgetError for one that has no rows."""
        plan = self._plan_of(budget)
        try:
            self._store.set_budgets(
                list(itertools.chain(*plan.budgets)),
                plan.protection.n_sinks,
                plan.protection.recent_window,
            )
        except ValueError:
            raise BudgetError(
                f"{self._model.name}: the device store cannot grow beyond the budget that it was "
                f"made with, and {budget} is larger; make a session with it, and load a saved one"
            ) from None
        self._plan = plan

    @property
    def sure_entries(self) -> int:
        """Return how many of the newest tokens every KV head certainly keeps."""
        return self.whole_entries if self._plan.holds_all else self._plan.floor_entries

    @property
    def whole_entries(self) -> int:
        """Return the longest text of which the budget drops nothing."""
        least = min(itertools.chain(*self._plan.budgets))
        return self._config.n_ctx if self._plan.holds_all else least

    def truncate(self, position: int) -> None:
        """Drop entries from a position on."""
        self._store.truncate(position)

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending."""
        return self._store.positions(layer, kv_head)

    def cache_map(self) -> CacheMapFunction:
        """Return a function that shows what is held: a row for every KV head of all layers."""
        return self._look

    def _look(self, first: int, per_column: int, n_columns: int) -> tuple[Shares, Shares, Shares]:
        rows = [self._store.positions(*head) for head in self._heads()]
        return held_shares(rows, first, per_column, n_columns)

    def _heads(self) -> Iterator[tuple[int, int]]:
        """Yield layer and KV head of every KV head."""
        for layer, shape in enumerate(self.layers):
            for kv_head in range(shape.n_head_kv):
                yield layer, kv_head

    def budgets(self) -> list[tuple[int, ...]]:
        """Return the budgets in entries, as [layer][KV head]."""
        return list(self._plan.budgets)

    def state(self) -> StoreState:
        """Return the content to save: a section for every KV head, as the headwise store has it."""
        entries = [
            [self._store.count(layer, head) for head in range(shape.n_head_kv)]
            for layer, shape in enumerate(self.layers)
        ]
        return StoreState(
            entries=entries,
            evicted=self._store.evicted,
            section_bytes=[self._store.state_bytes(*head) for head in self._heads()],
            sections=(self._store.save_head(*head) for head in self._heads()),
        )

    def check_state(self, state: SavedState) -> None:
        """Check number, size, positions and importance of the entries of every KV head."""
        heads = [len(layer) for layer in state.entries]
        if heads != [shape.n_head_kv for shape in self.layers] or len(state.sections) != sum(heads):
            raise DamagedState("other KV heads than the model has")
        counts = list(itertools.chain(*state.entries))
        for (layer, head), count, section in zip(
            self._heads(), counts, state.sections, strict=True
        ):
            problem = self._store.state_problem(layer, count, section, state.position)
            if problem:
                raise DamagedState(f"KV head {head} of layer {layer} has {problem}")
            if count > self._store.most_loaded(layer, head):
                raise StateDoesNotFit(
                    f"a KV head keeps {count} entries, and the device has rows for "
                    f"{self._store.most_loaded(layer, head)}; give a larger budget (kv_budget), or "
                    "load it with --store headwise (store='headwise')"
                )

    def load_state(self, state: SavedState) -> None:
        """Replace the content by a checked state, and evict down to the budget."""
        counts = list(itertools.chain(*state.entries))
        self._store.load(counts, list(state.sections))
        self._store.evicted += state.evicted

    def close(self) -> None:
        """Free the context, and the memory of the devices."""
        super().close()
        if hasattr(self, "_store"):
            self._store.release()

    @property
    def evicted(self) -> int:
        """Return how many entries of all KV heads were evicted so far."""
        return self._store.evicted

    def counters(self) -> dict[str, Any]:
        """Return this store's figures for SessionStats."""
        return {
            "kv_type": self._config.kv_type,
            **core_counters(self._store, self.hook),
            "kv_bytes_on_devices": dict(self._store.device_bytes),
            "rebases": self.rebases,
        }
