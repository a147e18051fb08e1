"""Make the llama_context of device stores, for one sequence or for several that share it."""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import llama_cpp

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.llamacpp.context import relu2_layers
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.plan import HeadwisePlan
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.settings.options import Budget
from entropykv.store.headwise_probe import (
    hooked_context,
    probed_layers,
    refuse_by_kind,
    unsupported,
)
from entropykv.store.rollback_range import RollbackRange
from entropykv.store.store_context import StoreContext


class PlacedStore(Protocol):
    """Define what a context needs of its stores, each of which has rows for an equal part of the
    budget.
    """

    rollback: RollbackRange

    @property
    def core(self) -> _core.DeviceStore:
        """Return the extension's store."""

    def plan_of(self, budget: Budget) -> HeadwisePlan:
        """Return the plan of an equal part of a budget."""

    def take_plan(self, plan: HeadwisePlan) -> None:
        """Go on with a plan whose budgets the extension's store has."""


class DeviceContext(StoreContext):
    """Hold a context whose attention device stores compute; llama.cpp's own cells hold only one
    micro-batch.

    It has the figures of all its stores, as SequencePool has those of headwise stores.
    """

    reads_together = False

    def __init__(self, model: Model, config: ResolvedConfig) -> None:
        """Probe the model's graph, and compute its attention from then on.

        Raises UnsupportedModelError if the graph has something that the device store does not
        support.
        """
        options = config.options
        self._name = model.name
        refuse_by_kind(model, "device")
        if is_recurrent(model):
            raise unsupported(model, "it has recurrent layers", "device")
        self.n_sequences = options.n_sequences or 1
        self.places = self if options.in_pool else None
        self.hook: _core.GraphHook = _core.GraphHook(
            relu2_layers(model, options), options.most_threads, on_devices=True
        )
        n_tokens = config.n_ubatch + self.n_sequences * config.n_drafts
        self.handle = hooked_context(
            model, options, self.hook, n_tokens, self.n_sequences, on_devices=True
        )
        try:
            self.layers = probed_layers(model, options, self.hook, self.handle, "device")
        except BaseException:
            self.close()
            raise
        self.devices = _core.Devices(options.most_threads, self.n_sequences)
        self.batch = _core.DeviceBatch()
        self.hook.serve_on_devices(self.batch)
        self.rope_obstacle: str | None = None
        """Why keys cannot be moved to other positions, or empty; None until the first store."""
        self._stores: weakref.WeakSet[PlacedStore] = weakref.WeakSet()
        self._peak = 0

    @property
    def on_host(self) -> str | None:
        """Return which layers attend in main memory although they are on a device, and why, once
        there is a store; None if no layer does.
        """
        layers: dict[str, list[int]] = {}
        for number, why in self.devices.on_host.items():
            reason = f"{why} for heads of {self.layers[number].k_dim} values"
            layers.setdefault(reason, []).append(self.hook.nodes[number].cache_layer)
        if not layers:
            return None
        return "; ".join(
            f"K, V and attention of {_named(numbers)} are in main memory, because {reason}"
            for reason, numbers in layers.items()
        )

    @property
    def is_on_host(self) -> bool:
        """Tell whether all layers attend in main memory, once there is a store."""
        on_host = self.devices.on_host
        return all(i in on_host or not n.on_device for i, n in enumerate(self.hook.nodes))

    def resize(self, budget: Budget) -> None:
        """Give all stores their equal part of another budget, or leave all as they were.

        Rows for a larger one are allocated anew. Raises BudgetError if the devices have no memory
        for it.
        """
        stores = list(self._stores)
        if not stores:
            return
        plan = stores[0].plan_of(budget)
        protection = plan.protection
        whole_from = [store.rollback.whole_from for store in stores]
        try:
            _core.DeviceStore.resize(
                [store.core for store in stores],
                list(itertools.chain(*plan.budgets)),
                protection.n_sinks,
                protection.recent_window,
            )
        except MemoryError:
            raise BudgetError(
                f"{self._name}: a KV budget of {budget} does not fit into the memory of its "
                "devices; give a smaller one (kv_budget)"
            ) from None
        finally:
            for store, first in zip(stores, whole_from, strict=True):
                store.rollback.begin_from(first)
        for store in stores:
            store.take_plan(plan)

    def add(self, store: PlacedStore) -> None:
        """Count the bytes of a store, as long as it exists."""
        self._stores.add(store)

    def begin_step(self) -> None:
        """Begin a micro-batch: the graph expects its token i in cell i."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), False)
        self.batch.clear()
        self.hook.begin_step()

    def end_step(self) -> None:
        """End the micro-batch: check that every layer was served, and let stores without drafts
        decide who stays.
        """
        self.hook.check_step()
        self.batch.commit()

    def note_use(self) -> None:
        """Record how many bytes are in use after a micro-batch."""
        self._peak = max(self._peak, self.used_bytes)

    @property
    def budget_bytes(self) -> int:
        """Return the bytes that the entries of all sequences can never exceed."""
        stores = list(self._stores)
        return self.n_sequences * stores[0].core.budget_bytes if stores else 0

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the entries of all sequences."""
        return sum(store.core.used_bytes for store in self._stores)

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes of entries that there were."""
        return self._peak

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of rows beyond the budgets of all places, as long as there are rows."""
        live = [store.core for store in self._stores if store.core.is_live]
        return self.n_sequences * live[0].staging_bytes if live else 0

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of working memory that all sequences share."""
        return self.devices.scratch_bytes

    def close(self) -> None:
        """Free the context and the devices."""
        super().close()
        if hasattr(self, "devices"):
            for store in self._stores:
                store.core.release()
            self.devices.close()


def _named(layers: list[int]) -> str:
    """Return words for numbers of layers, ascending, in which neighbours are ranges."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    words = [f"{first}" if first == last else f"{first} to {last}" for first, last in ranges]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(words)}"
