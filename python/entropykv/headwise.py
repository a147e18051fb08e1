"""The headwise store in a session: probing the graph, planning budgets, serving the attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.budget import HeadwisePlan, plan_headwise
from entropykv.cold import ColdSide
from entropykv.config import Budget, Settings
from entropykv.errors import (
    ContextError,
    EntropyKVError,
    SettingsError,
    UnsupportedModelError,
)
from entropykv.fingerprint import check_model
from entropykv.freezing import Freezing
from entropykv.model import Model
from entropykv.online import LEAST_TOKENS, online_budgets
from entropykv.policy import Policy
from entropykv.profile import EntropyProfile
from entropykv.recovery import Rung
from entropykv.recurrent import WHY, RecurrentState, cannot_go_back, is_recurrent
from entropykv.rope import RopeRange
from entropykv.session_file import SavedContents, SessionReader
from entropykv.store import (
    Store,
    StoreState,
    context_parameters,
    decode_one_token,
    let_hook_change,
    refuse_diffusion,
    relu2_layers,
)
from entropykv.windows import layer_windows

_USE_FLAT = "use --store flat (store='flat'), which serves any model"


class HeadwiseStore(Store):
    """Paged entries per (layer, KV head); llama.cpp's own cells only count one micro-batch."""

    name = "headwise"
    shift = 0
    rebases = 0

    def __init__(
        self,
        model: Model,
        settings: Settings,
        n_ctx: int,
        n_ubatch: int,
        budget: Budget,
        policy: Policy,
        profile: EntropyProfile | None,
        *,
        freezing: Freezing | None = None,
    ) -> None:
        """Probe the model's graph and take over its attention.

        Raises UnsupportedModelError where the graph has something that this store does not serve,
        SettingsError where the policy needs what the model does not have.
        """
        self._settings = settings
        self._policy = policy
        self._profile = profile
        self._n_ctx = n_ctx
        if settings.n_gpu_layers:
            raise UnsupportedModelError(
                "the headwise store runs on the CPU, but layers are offloaded; use --store flat "
                "or no --n-gpu-layers"
            )
        _refuse_by_kind(model)
        self._model = model
        self._hook = _core.GraphHook(relu2_layers(model, settings))
        self.context = self._hooked_context(model, n_ubatch)
        try:
            self._recurrent = RecurrentState(self.context) if is_recurrent(model) else None
            self.layers = self._probe(model)
            self.rope_obstacle = self._hook.rope_obstacle or (WHY if self._recurrent else "")
            self._check_importance(model)
            limit = self._hook.rope_limit or model.geometry.n_ctx_train
            self.rope = RopeRange(limit, settings.n_sinks)
            self.n_kv_heads = sum(shape.n_head_kv for shape in self.layers)
            self._windowed = any(s.window for s in self.layers)
            self._loaded = 0
            self.bytes_full_per_token = sum(
                2 * s.n_head_kv * (s.k_dim + s.v_dim) for s in self.layers
            )
            plan = self._plan(budget)
            self.cold = ColdSide(freezing, model, self.layers, settings.kv_type, policy)
            self._store = _core.HeadwiseStore(
                layers=self.layers,
                kv_type=settings.kv_type,
                importance=policy.importance.settings(
                    profile.coefficient_of_variation if profile else 0.0
                ),
                n_sinks=plan.protection.n_sinks,
                recent_window=plan.protection.recent_window,
                max_tokens=n_ubatch,
                max_entries=n_ctx,
                n_threads=max(settings.threads, settings.threads_batch),
                own_windows=policy.rule.by_layer,
                shared_choice=policy.rule.by_layer,
                ropes=[node.rope for node in self._hook.nodes],
                freezing=self.cold.settings,
            )
            self.cold.serve(self._store)
            self._online = online_budgets(policy, self._store, self.layers, n_ctx)
            self._follow(plan)
        except BaseException:
            self.close()
            raise
        self._hook.serve(self._store)

    def _hooked_context(self, model: Model, n_ubatch: int) -> Any:
        # Of a hybrid model, the last cell of a micro-batch stays until the next one is read.
        cells = n_ubatch + is_recurrent(model)
        parameters = context_parameters(model, self._settings, n_ubatch, cells)
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F16
        let_hook_change(parameters, self._hook)
        return model.new_context(parameters)

    def _probe(self, model: Model) -> list[_core.LayerShape]:
        """Decode one token and look at the graph; returns the shapes of the attention layers."""
        if not decode_one_token(self.context):
            raise EntropyKVError(f"{model.geometry.path}: llama.cpp cannot run this model")
        self._forget_cells()
        if self._hook.refusal or not self._hook.nodes:
            why = self._hook.refusal or "it has no attention layers"
            raise _unsupported(model, why)
        layers = self._windowed_shapes(model)
        if self._profile:
            first = layers[0]
            self._profile.check_geometry(len(layers), first.n_head, first.n_head_kv, model.name)
            check_model(self._profile, model.geometry)
        return layers

    def _windowed_shapes(self, model: Model) -> list[_core.LayerShape]:
        try:
            windows = layer_windows(model, self._settings)
        except UnsupportedModelError as error:
            raise _unsupported(model, str(error)) from None
        if not windows:
            return [node.shape for node in self._hook.nodes]
        return [windows[node.cache_layer].of(node.shape) for node in self._hook.nodes]

    def _check_importance(self, model: Model) -> None:
        measure = self._policy.importance.measure
        obstacle = self._hook.rope_obstacle
        if measure == "expected" and obstacle:
            raise SettingsError(
                f"{model.name}: policy {self._policy.name} turns queries to later positions, which "
                f"this model does not allow: {obstacle}; use measure mass"
            )

    def _plan(self, budget: Budget) -> HeadwisePlan:
        settings = self._settings
        return plan_headwise(
            budget,
            self.layers,
            self._n_ctx,
            settings.kv_type,
            self._policy,
            self._profile,
            settings.n_sinks,
            settings.recent_window,
        )

    def _follow(self, plan: HeadwisePlan) -> None:
        self._followed = plan
        if self._online:
            self._online.expect(plan)
        self._share()

    def _share(self) -> None:
        """Apply the plan: its budgets, or those that follow from the text."""
        plan = self._followed
        online = self._online.budgets(plan) if self._online else None
        self._store.set_budgets(
            budgets=online or [entries for layer in plan.budgets for entries in layer],
            pool_pages=plan.pool_pages,
            n_sinks=plan.protection.n_sinks,
            recent_window=plan.protection.recent_window,
        )

    def keep_everything(self) -> None:
        """Drop nothing, not even what has left a window: for those who look at whole texts."""
        pages = sum(_core.pages_for(self._n_ctx, n) for n in self._followed.entries_per_page)
        protection = self._followed.protection
        self._store.set_budgets(
            [self._n_ctx] * self.n_kv_heads, pages, protection.n_sinks, protection.recent_window
        )

    def _forget_cells(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    @property
    def core(self) -> _core.HeadwiseStore:
        """The extension's store, for those who look at attention rows."""
        return self._store

    def before(self, n_tokens: int, position: int) -> None:
        """Reserve pages for all that the micro-batch can leave behind."""
        self.cold.check_file()
        self._rebase(self.rope.shift_for(self.shift, position, n_tokens))
        with self.cold.growing():
            self._store.begin(n_tokens, position, self.rope_position(position))
        self._hook.begin_step()

    def _rebase(self, shift: int) -> None:
        if shift == self.shift:
            return
        ropes = [node.rope for node in self._hook.nodes]
        self._store.rebase(ropes, self.rope.n_sinks, self.shift, shift)
        self.shift = shift
        self.rebases += 1

    def after(self, n_tokens: int, position: int) -> None:  # noqa: ARG002
        """Free llama.cpp's cells, check that every layer was served, and share the budget again."""
        if self._recurrent:
            self._recurrent.forget_cells()
        else:
            self._forget_cells()
        self._hook.check_step()
        if self._online and n_tokens >= LEAST_TOKENS:
            self._online.observe(n_tokens)
            with self.cold.growing_later():
                self._share()

    def check(self) -> None:
        """Raise FreezeError where cold storage failed; what was frozen is given up."""
        self.cold.check()

    def resize(self, budget: Budget) -> None:
        """Share the new budget among the heads, evicting where they hold more."""
        plan = self._plan(budget)
        with self.cold.growing():
            self._follow(plan)

    def truncate(self, position: int) -> None:
        """Drop entries at and beyond a position.

        ContextError where a recurrent state is beyond, or where layers with windows have dropped
        what the tokens after it would see.
        """
        if self._recurrent and position > 0:
            raise cannot_go_back(self._model, position)
        if position > 0 and not self.can_return_to(position):
            raise ContextError(
                f"{self._model.name}: cannot go back to position {position}: layers with a sliding "
                f"window have dropped what they would see from there, but not from position "
                f"{self._whole_from} on; call reset() and read the text again"
            )
        self._forget_cells()  # a decode that failed leaves some
        self._store.truncate(position)
        self._loaded = min(self._loaded, position)
        if position == 0:
            self.shift = 0
            if self._online:
                self._online.forget()
                self._share()

    def can_return_to(self, position: int) -> bool:
        """Whether windows held all then that they would hold again; states do not."""
        return not self._recurrent and position >= self._whole_from

    @property
    def _whole_from(self) -> int:
        return max(self._loaded, self._store.windows_whole_from)

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Positions kept, ascending."""
        return self._store.positions(layer, kv_head)

    def budgets(self) -> list[tuple[int, ...]]:
        """[layer][KV head] in entries."""
        return [
            tuple(self._store.budget(layer, head) for head in range(shape.n_head_kv))
            for layer, shape in enumerate(self.layers)
        ]

    def state(self) -> StoreState:
        """A section for every KV head, layer by layer; what online budgets have seen; the state."""
        entries = [
            [self._store.count(layer, head) for head in range(shape.n_head_kv)]
            for layer, shape in enumerate(self.layers)
        ]
        rest = [] if self._online is None else [self._online.state().astype("<f8").tobytes()]
        rest += [] if self._recurrent is None else [self._recurrent.save()]
        return StoreState(
            entries=entries,
            evicted=self._store.evicted,
            section_bytes=[
                *(self._store.state_bytes(i, head) for i, head, _ in _per_head(entries)),
                *map(len, rest),
            ],
            sections=itertools.chain(
                (self._section(i, head) for i, head, _ in _per_head(entries)), rest
            ),
        )

    def _section(self, layer: int, kv_head: int) -> bytes:
        with self.cold.reading():
            return self._store.save_head(layer, kv_head)

    def check_state(
        self, reader: SessionReader, contents: SavedContents, sections: Sequence[bytearray]
    ) -> None:
        """Check number, size, positions and importance of the entries of every KV head."""
        self.cold.check_loading(reader.where)
        heads = [len(layer) for layer in contents.entries]
        n_sections = self.n_kv_heads + (self._online is not None) + (self._recurrent is not None)
        if heads != [shape.n_head_kv for shape in self.layers] or len(sections) != n_sections:
            raise reader.damaged("other KV heads than the model has")
        if self._policy.rule.by_layer and any(len(set(layer)) > 1 for layer in contents.entries):
            raise reader.damaged("KV heads of a layer that keep different positions")
        if self._online:
            seen = sections[self.n_kv_heads]
            problem = "a cut number" if len(seen) % 8 else self._online.problem(_floats(seen))
            if problem:
                raise reader.damaged(problem)
        for (layer, head, count), section in zip(
            _per_head(contents.entries), sections[: self.n_kv_heads], strict=True
        ):
            problem = self._store.state_problem(layer, count, section, contents.position)
            if problem:
                raise reader.damaged(f"KV head {head} of layer {layer} has {problem}")

    def load_state(self, contents: SavedContents, sections: Sequence[bytearray]) -> None:
        """Get the pages, then copy; heads that hold more than their budget evict."""
        heads = list(_per_head(contents.entries))
        former = self._recurrent.replace(sections[-1]) if self._recurrent else b""
        sections, rest = sections[: self.n_kv_heads], sections[self.n_kv_heads :]
        if self._online:
            self._online.load(_floats(rest[0]))
        try:
            with self.cold.growing():
                if self._online:
                    self._share()
                self._store.begin_load([count for _, _, count in heads], sections, contents.evicted)
        except BaseException:
            if self._recurrent:
                self._recurrent.replace(former)
            raise
        for (layer, head, count), section in zip(heads, sections, strict=True):
            self._store.load_head(layer, head, count, section)
        self.shift = contents.shift
        self._loaded = contents.position if self._windowed else 0  # what left is not in the file

    @property
    def evicted(self) -> int:
        """Entries evicted so far, of all KV heads."""
        return self._store.evicted

    def counters(self) -> dict[str, Any]:
        """The store's part of SessionStats."""
        return {
            "kv_type": self._settings.kv_type,
            "kv_bytes_budget": self._store.budget_bytes,
            "kv_bytes_peak": self._store.peak_bytes,
            "kv_bytes_now": self._store.used_bytes,
            "kv_bytes_staging": self._store.staging_bytes,
            "entries_kept": self._store.entries,
            "evictions": self.evicted,
            "eviction_seconds": self._store.eviction_seconds,
            "rebases": self.rebases,
            **self.cold.counters(),
        }

    def thaw(self, rung: Rung, window: int, position: int) -> int:
        """See Session.thaw()."""
        return self.cold.thaw(rung, window, position)

    def close(self) -> None:
        """Free the context, and remove the file of what is frozen."""
        super().close()
        if hasattr(self, "cold"):
            self.cold.close()


def _floats(section: bytearray) -> npt.NDArray[np.float64]:
    return np.frombuffer(section, "<f8").astype(np.float64)


def _per_head(entries: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Layer, KV head and number of entries of every KV head."""
    for layer, counts in enumerate(entries):
        for head, count in enumerate(counts):
            yield layer, head, count


def _unsupported(model: Model, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{model.name}: the headwise store cannot serve this model: {why}; {_USE_FLAT}"
    )


def _refuse_by_kind(model: Model) -> None:
    """Refuse what the graph does not show."""
    refuse_diffusion(model)
    kinds = {
        "it has only recurrent layers": llama_cpp.llama_model_is_recurrent(model.handle),
        "it has an encoder": llama_cpp.llama_model_has_encoder(model.handle),
    }
    for why, applies in kinds.items():
        if applies:
            raise _unsupported(model, why)
