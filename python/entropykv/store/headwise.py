"""The headwise store in a session: planning budgets, serving the attention."""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import ContextError, SettingsError
from entropykv.llamacpp.context import relu2_layers
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.positions import RopeRange
from entropykv.llamacpp.recurrent import WHY, RecurrentState, cannot_go_back, is_recurrent
from entropykv.policy.names import Policy
from entropykv.policy.online import changes_budgets, is_observed, online_budgets
from entropykv.policy.plan import HeadwisePlan, own_windows, plan_headwise
from entropykv.profile.belongs import check_model
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.freezing import Freezing
from entropykv.settings.options import Budget, Settings
from entropykv.store.cold import ColdSide
from entropykv.store.headwise_probe import hooked_context, probed_layers, refuse_by_kind
from entropykv.store.headwise_state import HeadwiseState
from entropykv.store.protocol import Rung, SavedState, Store, StoreState


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
        self._n_ubatch = n_ubatch
        refuse_by_kind(model, settings)
        self._model = model
        self._hook = _core.GraphHook(relu2_layers(model, settings), settings.most_threads)
        self.context = hooked_context(model, settings, self._hook, n_ubatch)
        try:
            self._recurrent = RecurrentState(self.context) if is_recurrent(model) else None
            self.layers = probed_layers(model, settings, self._hook, self.context)
            self._check_profile()
            self.rope_obstacle = self._hook.rope_obstacle or (WHY if self._recurrent else "")
            self._check_importance(model)
            limit = self._hook.rope_limit or model.geometry.n_ctx_train
            self.rope = RopeRange(limit, settings.n_sinks)
            self.n_kv_heads = sum(shape.n_head_kv for shape in self.layers)
            self._windowed = any(s.window for s in self.layers)
            self._loaded = 0
            self.bytes_full_per_token = sum(2 * s.n_head_kv * s.entry_values for s in self.layers)
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
                n_threads=settings.most_threads,
                own_windows=own_windows(policy, settings.recent_window),
                shared_choice=policy.rule.by_layer,
                ropes=[node.rope for node in self._hook.nodes],
                freezing=self.cold.settings,
            )
            self.cold.serve(self._store)
            self._online = online_budgets(policy, self._store, self.layers, n_ctx)
            self._state = HeadwiseState(
                self._store, self.layers, policy, self.cold, self._online, self._recurrent
            )
            self._follow(plan)
        except BaseException:
            self.close()
            raise
        self._hook.serve(self._store)

    def _check_profile(self) -> None:
        if self._profile is None:
            return
        first = self.layers[0]
        heads = (len(self.layers), first.n_head, first.n_head_kv)
        check_model(self._profile, self._model.geometry, heads)

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

    def _shares(self) -> list[int]:
        """Budgets of the plan, or those that follow from the text."""
        plan = self._followed
        online = self._online.budgets(plan) if self._online else None
        return online or [entries for layer in plan.budgets for entries in layer]

    def _share(self) -> None:
        """Apply the plan."""
        plan = self._followed
        self._store.set_budgets(
            budgets=self._shares(),
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
        self._budgets_change = changes_budgets(n_tokens, position, self._n_ubatch)
        if self._online:
            self._online.prepare(budgets_change=self._budgets_change)
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
        if self._online and is_observed(n_tokens, self._n_ubatch):
            self._online.observe(n_tokens, budgets_change=self._budgets_change)
            if self._budgets_change:
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

    @property
    def sure_entries(self) -> int:
        """Sinks and recent window, or all; none where a schedule may freeze any of them."""
        if self.cold.settings is not None:
            return 0
        plan = self._followed
        return self._n_ctx if plan.mean_entries >= self._n_ctx else plan.floor_entries

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
        """See HeadwiseState."""
        return self._state.save()

    def check_state(self, state: SavedState) -> None:
        """Check number, size, positions and importance of the entries of every KV head."""
        self._state.check(state)

    def load_state(self, state: SavedState) -> None:
        """Get the pages, then copy; heads that hold more than their budget evict."""
        self._state.load(state, self._shares, self._share)
        self.shift = state.shift
        self._loaded = state.position if self._windowed else 0  # what left is not in the file

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
            "kv_bytes_scratch": self._store.scratch_bytes,
            "products": self._hook.products,
            "products_bytes_scratch": self._hook.products_scratch_bytes,
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
