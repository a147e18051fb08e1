"""Run the device store in a session: budgets per KV head, with K and V on the devices of the
layers.

A DeviceContext has a llama_context for one sequence, or for several that share it; each sequence
has a DeviceStore.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.llamacpp.context import relu2_layers
from entropykv.llamacpp.model import Model, offloaded_layers
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.plan import HeadwisePlan
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.settings.options import Budget
from entropykv.store.kv_heads import (
    KvHeadStore,
    check_config,
    check_features,
    hooked_context,
    probed_layers,
    ranking_predictor,
    refuse_by_kind,
    unsupported,
)
from entropykv.store.protocol import (
    DamagedState,
    Reach,
    RollbackRange,
    SavedState,
    StoreContext,
    StoreState,
    TokensToRead,
)


class DeviceContext(StoreContext):
    """Hold a context whose attention device stores compute; llama.cpp's own cells hold only one
    micro-batch.

    It has the figures in bytes of all its stores, as SequencePool has those of headwise stores.
    """

    reads_together = False
    least_patience = 0.01
    """How many seconds a step waits at least for the other sessions: if the number of tokens
    changes, llama.cpp builds its graph anew, and CUDA records it again.
    """

    def __init__(self, model: Model, config: ResolvedConfig) -> None:
        """Probe the model's graph, and compute its attention from then on.

        Raises UnsupportedModelError if the graph has something that the device store does not
        support, and ModelFileError or EntropyKVError if llama.cpp cannot run the model.
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
        offloaded = offloaded_layers(options.n_gpu_layers)
        # llama.cpp counts the output as one more layer.
        self.only_embeds = all(node.on_device for node in self.hook.nodes) and (
            offloaded < 0 or offloaded > model.geometry.n_layer
        )
        self.devices = _core.Devices(options.most_threads, self.n_sequences)
        self.batch = _core.DeviceBatch()
        self.hook.serve_on_devices(self.batch)
        self.rope_obstacle: str | None = None
        """Why keys cannot be moved to other positions; empty if they can; None before the first
        store has found it out.
        """
        self._stores: weakref.WeakSet[DeviceStore] = weakref.WeakSet()
        self._peak = 0

    @property
    def on_host(self) -> str | None:
        """Return a sentence that says for which layers on a device attention is computed in main
        memory, and why; None if there are none. The answer is known once there is a store.
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
        """Tell whether attention of all layers is computed in main memory; known once there is a
        store.
        """
        on_host = self.devices.on_host
        return all(i in on_host or not n.on_device for i, n in enumerate(self.hook.nodes))

    def resize(self, budget: Budget) -> None:
        """Give all stores their equal part of another budget, or leave all as they were.

        For a larger budget, the rows are allocated anew. Raises BudgetError if it is too small, or
        if the devices have no memory for the rows.
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

    def add(self, store: DeviceStore) -> None:
        """Count the bytes of a store, as long as it exists."""
        self._stores.add(store)

    def begin_step(self) -> None:
        """Begin a micro-batch. All cells of llama.cpp are freed, because the graph expects token i
        of the micro-batch in cell i.
        """
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), False)
        self.batch.clear()
        self.hook.begin_step()

    def end_step(self) -> None:
        """End the micro-batch: check that the attention of every layer was computed, and evict in
        the stores whose sequences had no drafts.
        """
        self.hook.check_step()
        self.batch.commit()
        self.note_use()

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
        """Return the largest number of bytes of entries after any micro-batch."""
        return self._peak

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of the rows that all places have beyond their budgets; 0 while no place
        has rows.
        """
        live = [store.core for store in self._stores if store.core.is_live]
        return self.n_sequences * live[0].staging_bytes if live else 0

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of working memory that all sequences share."""
        return self.devices.scratch_bytes

    def close(self) -> None:
        """Free the context, the rows of its stores, and the devices."""
        super().close()
        if hasattr(self, "devices"):
            for store in self._stores:
                store.core.release()
            self.devices.close()


def _named(layers: list[int]) -> str:
    """Return words for ascending numbers of layers, in which neighbouring numbers become ranges."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    words = [f"{first}" if first == last else f"{first} to {last}" for first, last in ranges]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(words)}"


class DeviceStore(KvHeadStore):
    """Keep the entries of one sequence per (layer, KV head), on the device of the layer.

    Every KV head has rows for its budget and for one micro-batch. The rows are allocated when the
    store is made or, in a pool, for all places when the first sequence takes one. Budgets do not
    change while a text is read.
    """

    name = "device"
    copies_checkpoints = True
    context: DeviceContext
    _store: _core.DeviceStore

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        context: DeviceContext,
        budget: Budget | None = None,
    ) -> None:
        """Make a store in a context that others of its pool share; a pool's store has no place yet.

        `budget` None: that of the config; in a pool, each sequence gets an equal part of it. Raises
        UnsupportedModelError if neither a device nor the CPU can compute the model's attention,
        BudgetError for a budget that is too small or does not fit into the memory of the devices,
        SettingsError for predictions that the model's RoPE does not allow, and ProfileError for a
        profile or predictor of another model.
        """
        self._model, self._config = model, config
        options = config.options
        self.context, self.layers = context, context.layers
        hook = self._hook = context.hook
        check_config(config, model, self.layers, hook.rope_obstacle)
        self._plan = self.plan_of(options.budget if budget is None else budget)
        self._store = self._make_rows()
        if context.rope_obstacle is None:
            ropes = [node.rope for node in hook.nodes]
            context.rope_obstacle = hook.rope_obstacle or self._store.rotation_problem(ropes)
        if options.in_pool:
            self._store.release()
        context.add(self)
        self.rollback = RollbackRange(model, self._store, None)
        self.facts = self._facts(model, context.rope_obstacle, file_format="headwise")

    def _make_rows(self) -> _core.DeviceStore:
        config, plan = self._config, self._plan
        # The first store finds out what the devices can compute; later ones of a pool get their
        # rows with their places.
        live = not config.options.in_pool or self.context.rope_obstacle is None
        try:
            return _core.DeviceStore(
                devices=self.context.devices,
                hook=self.context.hook,
                layers=self.layers,
                kv_type=config.kv_type,
                importance=config.policy.importance.on_devices().settings(),
                n_sinks=plan.protection.n_sinks,
                recent_window=plan.protection.recent_window,
                max_tokens=config.n_ubatch,
                max_entries=config.n_ctx,
                budgets=list(itertools.chain(*plan.budgets)),
                live=live,
                predictor=self._predictor(),
            )
        except MemoryError:
            raise self._no_memory() from None
        except RuntimeError as error:
            raise unsupported(self._model, str(error), self.name) from None

    def _predictor(self) -> list[npt.NDArray[np.float32]]:
        """Return for every layer the weights that predict scores, (n_head_kv, n_features); an empty
        list if the policy uses none.

        Raises ProfileError if the weights are for entries with other features.
        """
        predictor = ranking_predictor(self._config)
        if predictor is None:
            return []
        check_features(
            predictor,
            [
                _core.feature_count(shape, node.rope)
                for shape, node in zip(self.layers, self.context.hook.nodes, strict=True)
            ],
        )
        return list(predictor.weights)

    def _no_memory(self) -> BudgetError:
        return BudgetError(
            f"{self._model.name}: a KV budget of {self._config.options.budget} in a context of "
            f"{self._config.n_ctx} tokens does not fit into the memory of its devices; give a "
            "smaller one (kv_budget, n_ctx), or offload fewer layers (n_gpu_layers)"
        )

    @property
    def core(self) -> _core.DeviceStore:
        """Return the extension's store."""
        return self._store

    def before(self, reading: TokensToRead) -> None:
        """Tell the batch which tokens the micro-batch has; rows for them are chosen in its step."""
        rope_position = self._seen_position(reading.position, reading.n_tokens)
        sees_all = reading.embedded is not None and reading.embedded.sees_all
        self.context.batch.add(
            self._store,
            reading.n_tokens,
            reading.position,
            rope_position,
            reading.n_drafts,
            sees_all,
        )

    @property
    def drafts(self) -> DeviceStore | None:
        """Return the store itself; None if micro-batches have only one token."""
        return None if self._config.n_ubatch == 1 else self

    def most_drafts(self, position: int, wanted: int) -> int:
        """Return how many drafts may follow the token at `position`, at most `wanted`: as many as
        move no keys to other positions, evict nothing, and are not observed.
        """
        wanted = min(wanted, self._config.n_ubatch - 1)
        wanted = self.facts.rope.drafts_in_place(self.shift, position, wanted)
        return self._store.most_drafts(position, wanted)

    def settle(self, n_right: int) -> None:
        """Store the entries of a run and evict what the budget cannot hold, then undo what wrong
        drafts have changed.
        """
        self._store.commit_step()
        self._store.settle_drafts(n_right)
        self.context.note_use()

    def after(self, n_tokens: int) -> None:  # noqa: ARG002
        """Commit the micro-batch, unless end_step() of the context has done so."""
        self._store.commit_step()

    def resize(self, budget: Budget) -> None:
        """Share the new budget among the KV heads; heads that hold more than their part evict.

        In a pool, it is the budget of all sequences, each of which gets an equal part. Raises
        BudgetError as DeviceContext.resize() does; nothing has changed then.
        """
        self.context.resize(budget)

    def plan_of(self, budget: Budget) -> HeadwisePlan:
        """Return what a budget means for every KV head of this store; in a pool, it is the budget
        of all sequences, and this store gets an equal part. Raises BudgetError if it is too small.
        """
        if self._config.options.in_pool:
            return self._config.equal_share(budget, self.layers)
        return self._config.headwise_plan(budget, self.layers)

    def take_plan(self, plan: HeadwisePlan) -> None:
        """Record a plan whose budgets the store of the extension follows already."""
        self._plan = plan

    def reach(self) -> Reach:
        """Return how much of a text the budget holds; budgets do not change while it is read."""
        plan, n_ctx = self._plan, self._config.n_ctx
        return Reach(
            whole=n_ctx if plan.holds_all else min(itertools.chain(*plan.budgets)),
            sure=n_ctx if plan.holds_all else plan.floor_entries,
            recent_window=plan.protection.recent_window,
        )

    def budgets(self) -> list[tuple[int, ...]]:
        """Return the budgets in entries, as [layer][KV head]."""
        return list(self._plan.budgets)

    def state(self) -> StoreState:
        """Return the content to save: a section per KV head, in the headwise store's format."""
        entries = [
            [self._store.count(layer, head) for head in range(shape.n_head_kv)]
            for layer, shape in enumerate(self.layers)
        ]
        return StoreState(
            entries=entries,
            evicted=self._store.evicted,
            section_bytes=[self._store.state_bytes(*head) for head in self._heads()],
            sections=itertools.chain.from_iterable(
                self._store.save_layer(layer) for layer in range(len(self.layers))
            ),
            whole_from=self.rollback.whole_from,
        )

    def check_state(self, state: SavedState) -> None:
        """Check number, size, positions and importance of the entries of every KV head; raises
        DamagedState.
        """
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

    def load_state(self, state: SavedState) -> None:
        """Replace the content by a checked state, and evict down to the budget."""
        counts = list(itertools.chain(*state.entries))
        evicted_before = self._store.evicted
        self._store.load(counts, list(state.sections))
        self._store.evicted += state.evicted - evicted_before
        self.shift = state.shift
        self.rollback.begin_from(state.whole_from)

    def take_place(self, sequence: int) -> None:
        """Take a place with rows for an equal part of the budget; `sequence` is the number of the
        place, and llama.cpp's number for the sequence. Raises BudgetError if the devices have no
        memory.
        """
        self.sequence = sequence
        try:
            self._store.acquire(sequence)
        except MemoryError:
            raise self._no_memory() from None

    def set_aside(self) -> None:
        """Drop everything, and leave the place until take_place(); the last store that leaves frees
        the rows of all places.
        """
        self.truncate(0)
        self._store.release()

    def close(self) -> None:
        """Leave the place, and free its memory on the devices."""
        if hasattr(self, "_store"):
            self._store.release()

    def counters(self) -> dict[str, Any]:
        """Return this store's figures for SessionStats."""
        counters = super().counters()
        if not self._config.options.in_pool:  # In a pool, all sequences share this memory.
            counters["kv_bytes_scratch"] += self.context.scratch_bytes
        return {
            **counters,
            "kv_bytes_on_devices": dict(self._store.device_bytes),
            "device_traffic": self.context.devices.traffic,
        }
