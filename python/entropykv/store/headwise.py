"""Run the headwise store in a session: plan budgets, and provide the attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.llamacpp.batch import Embedded
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.positions import RopeRange
from entropykv.llamacpp.recurrent import WHY, RecurrentState
from entropykv.policy.online import online_budgets
from entropykv.policy.plan import HeadwisePlan
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.settings.options import Budget
from entropykv.settings.recovery import Rung
from entropykv.store.cold import ColdSide
from entropykv.store.figures import core_counters
from entropykv.store.headwise_budgets import HeadwiseBudgets
from entropykv.store.headwise_context import HeadwiseContext
from entropykv.store.headwise_probe import check_config
from entropykv.store.headwise_state import HeadwiseState, StoreCheckpoint
from entropykv.store.key_centres import digest_of
from entropykv.store.protocol import CacheMapFunction, PooledStore, SavedState, StoreState
from entropykv.store.rollback_range import RollbackRange
from entropykv.store.score_prediction import ScorePrediction, ranking_predictor


class HeadwiseStore(PooledStore):
    """Keep the paged entries of one sequence per (layer, KV head); others may share its context."""

    name = "headwise"
    hook: _core.GraphHook
    shift = 0
    rebases = 0
    share_pages = 0
    """The most pages of the pool that it may hold."""
    longest: int | None = None
    """The most tokens of its text, if the share holds all of it; None: the whole context."""

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        shared_context: HeadwiseContext,
        budget: Budget | None = None,
    ) -> None:
        """Make a store in a context.

        `budget` None takes that of the config. In a context of several sequences, the budget is for
        all together, and the store holds nothing before take_share(). Raises UnsupportedModelError
        if the model's graph has something that this store does not support, SettingsError if the
        policy needs something that the model does not have.
        """
        options, policy = config.options, config.policy
        self._config = config
        self._shared_context = shared_context
        self.hook = self._shared_context.hook
        self.context = self._shared_context.handle
        self.layers = self._shared_context.layers
        self.key_centres = digest_of(self._shared_context.key_centres)
        try:
            self._recurrent = (
                RecurrentState(self.context) if self._shared_context.recurrent else None
            )
            self.rope_obstacle = self.hook.rope_obstacle or (WHY if self._recurrent else "")
            check_config(config, model, self.layers, self.hook.rope_obstacle)
            limit = self.hook.rope_limit or model.geometry.n_ctx_train
            self.rope = RopeRange(limit, options.n_sinks)
            self.n_kv_heads = sum(shape.n_head_kv for shape in self.layers)
            self.bytes_full_per_token = sum(2 * s.n_head_kv * s.entry_values for s in self.layers)
            self.cold = ColdSide(config.freezing, model, self.layers, config.kv_type, policy)
            asked = config.options.budget if budget is None else budget
            plan = self.plan_of(asked)
            self._store = _core_of(config, self._shared_context, self.cold, plan)
            self.prediction = ScorePrediction(self._store, len(self.layers))
            if predictor := ranking_predictor(config):
                self.prediction.adopt(predictor)
            self.rollback = RollbackRange(model, self._store, self.layers, self._recurrent)
            self.cold.serve(self._store)
            online = online_budgets(policy, self._store, self.layers, config.n_ctx, config.profile)
            self._state = HeadwiseState(
                self._store, self.layers, policy, self.cold, online, self._recurrent
            )
            self.sharing = HeadwiseBudgets(self._store, config, self.layers, online)
            if self._shared_context.pool is None:
                self.sharing.take(plan)
            else:
                self.sharing.await_share(plan, asked)
        except BaseException:
            self.close()
            raise

    def plan_of(self, budget: Budget) -> HeadwisePlan:
        """Return what a budget means for every KV head; raises BudgetError if it is too small."""
        return self._config.headwise_plan(budget, self.layers)

    @property
    def recent_window(self) -> int:
        """Return how many of the newest entries every KV head keeps."""
        return self.sharing.plan.protection.recent_window

    def begin_step(self) -> None:
        """Begin a micro-batch in the context, which others may share."""
        self._shared_context.begin_step()

    def end_step(self) -> None:
        """End the micro-batch: the context frees llama.cpp's cells and checks all layers."""
        self._shared_context.end_step()

    @property
    def core(self) -> _core.HeadwiseStore:
        """Return the extension's store, for callers that examine attention rows."""
        return self._store

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
        """Reserve pages for everything that the micro-batch may leave behind.

        Raises SessionFileError if someone has changed a file that pages are mapped from.
        """
        self.cold.check_file()
        self._state.check_files()
        shift = self.rope.shift_for(self.shift, position, n_tokens)
        if shift != self.shift:
            ropes = [node.rope for node in self.hook.nodes]
            self._store.rebase(ropes, self.rope.n_sinks, self.shift, shift)
            self.shift = shift
            self.rebases += 1
        self.sharing.prepare(n_tokens - n_drafts, position, n_echo)
        with self.cold.growing():
            rope_position = self.rope_position(position)
            self._shared_context.batch.add(
                self._store,
                n_tokens,
                position,
                rope_position,
                n_echo,
                see_all=embedded is not None and embedded.sees_all,
                n_drafts=n_drafts,
                recalls=recalls,
            )

    def most_drafts(self, position: int, wanted: int) -> int:
        """Return how many drafts may follow a token: only as long as nothing else would change.

        Keys are moved to other positions, and budgets follow a longer text, before single tokens.
        """
        config = self._config
        if self._recurrent or config.policy.importance.repeats or config.n_ubatch == 1:
            return 0
        wanted = self.drafts_in_place(position, wanted)
        if (longest := self.sharing.longest_whole) > position:
            wanted = min(wanted, longest - position - 1)
        return self._shared_context.batch.most_drafts(self._store, wanted)

    def settle(self, n_right: int) -> None:
        """Undo what wrong drafts have changed, bit by bit."""
        self._store.settle_drafts(n_right)

    def whole_before(self, position: int, n_tokens: int) -> int:
        """Return how many tokens to read before budgets are shared: see HeadwiseBudgets."""
        return self.sharing.whole_before(position, n_tokens)

    def after(self, n_tokens: int, position: int) -> None:  # noqa: ARG002
        """Share the budget again if the policy follows the text.

        Raises SessionFileError if a file was changed while the micro-batch read its pages.
        """
        self._state.check_files()
        if self._recurrent:
            self._recurrent.forget_cells()
        if self.sharing.observe(n_tokens):
            self.share_again()

    def share_again(self) -> None:
        """Share the budget by what the text has shown."""
        with self.cold.growing_later():
            self.sharing.share()

    def check(self) -> None:
        """Raise FreezeError if cold storage failed; all frozen entries are given up."""
        self.cold.check()

    def resize(self, budget: Budget) -> None:
        """Share the new budget among the heads; those that hold more evict."""
        plan = self.plan_of(budget)
        with self.cold.growing():
            self.sharing.take(plan)

    def expect(self, n_tokens: int) -> None:
        """Keep a text of n_tokens whole if the bytes hold it."""
        self.sharing.expect(n_tokens)

    @property
    def sure_entries(self) -> int:
        """Return the longest text of which every KV head keeps everything.

        It is 0 if a schedule may freeze any entry.
        """
        return self.sharing.sure_entries

    @property
    def whole_entries(self) -> int:
        """Return the longest text of which the budget drops nothing."""
        return max(self.sharing.whole_entries, self.sharing.longest_whole)

    def truncate(self, position: int) -> None:
        """Drop entries from a position on.

        Raises ContextError if a recurrent state is beyond it, or if layers with windows have
        dropped entries that later tokens would see.
        """
        self.rollback.check(position)
        if self._recurrent:
            self._recurrent.forget()
        self._store.truncate(position)
        self.sharing.expect(position)
        self.rollback.note_truncated(position)
        if position == 0:
            self.shift = 0
            self.sharing.forget()

    def can_return_to(self, position: int) -> bool:
        """Tell whether windows hold everything that they held at that time; recurrent states never
        do.
        """
        return self.rollback.leads_to(position)

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending."""
        return self._store.positions(layer, kv_head)

    def importance(self, layer: int, kv_head: int) -> npt.NDArray[np.float32] | None:
        """Return the importance of the entries of entries(); None if queries do not add to it."""
        if not self._config.policy.importance.adds_up:
            return None
        return self._store.importance(layer, kv_head)

    def cache_map(self) -> CacheMapFunction:
        """Return a function that shows what is held: a row for every KV head of all layers."""
        return partial(_core.CacheMap().count, self._store)

    def budgets(self) -> list[tuple[int, ...]]:
        """Return the budgets in entries, as [layer][KV head]."""
        return [
            tuple(self._store.budget(layer, head) for head in range(shape.n_head_kv))
            for layer, shape in enumerate(self.layers)
        ]

    def state(self) -> StoreState:
        """Return the content to save: a section for every KV head."""
        return self._state.save(self.rollback.whole_from)

    def check_state(self, state: SavedState) -> None:
        """Check number, size, positions and importance of the entries of every KV head."""
        self._state.check(state)

    def load_state(self, state: SavedState) -> None:
        """Reserve the pages, then copy the entries; heads that hold more than their budget
        evict.
        """
        with self.sharing.expecting(state.position):
            self._state.load(state, self.sharing.shares, self.sharing.share)
        self.shift = state.shift
        self.rollback.begin_with(state)

    def predict_held(self, n_tokens: int) -> None:
        """Predict the scores of all entries that are held, for a text of n_tokens.

        These are entries that were read before there was a predictor; larger scores of an echo are
        kept.
        """
        self._store.predict_stored(n_tokens, self.shift)

    # --- in a pool --------------------------------------------------------------------------------

    def take_share(self, pages: int, longest: int | None) -> None:
        """Hold at most so many pages, and evict the rest; `longest`: see the attribute."""
        if (pages, longest) == (self.share_pages, self.longest):
            return
        budget = Budget("bytes", max(1, pages * self.sharing.plan.page_bytes))
        plan = self._config.headwise_plan(budget, self.layers, longest)
        with self.cold.growing():
            self.sharing.follow(plan)
        self.share_pages, self.longest = pages, longest

    @property
    def n_entries(self) -> int:
        """Return how many entries all KV heads hold."""
        return self._store.entries

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page of the pool."""
        return self.sharing.plan.page_bytes

    def set_evicted(self, n: int) -> None:
        """Set how many entries were evicted so far."""
        self._store.set_evicted(n)

    def set_aside(self) -> None:
        """Drop everything, and leave the pages to others of the pool until resize()."""
        self.truncate(0)
        self._store.give_up_share()
        self.share_pages, self.longest = 0, None
        if self._recurrent:
            self._recurrent.forget()

    def take_place(self, sequence: int) -> None:
        """Use this number as llama.cpp's number of the sequence."""
        self.sequence = sequence
        if self._recurrent:
            self._recurrent.sequence = sequence

    def checkpoint(self) -> StoreCheckpoint | None:
        """Share the current pages; None if the store freezes, because frozen entries must be
        copied.
        """
        if self.cold.settings is not None:
            return None
        return self._state.checkpoint(self.shift, self.rollback.whole_from)

    def go_on_from(self, checkpoint: StoreCheckpoint, *, ends: bool) -> bool:
        """Replace the content by that of a checkpoint; entries beyond the share are evicted.

        Returns False if the pool has no room for it: then the store is empty. The checkpoint is
        dropped if it `ends`.
        """
        done = self._state.go_on_from(checkpoint, self.sharing.share, ends=ends)
        self.shift = checkpoint.shift if done else 0
        self.rollback.begin_from(checkpoint.whole_from if done else 0)
        return done

    def state_of(self, checkpoint: StoreCheckpoint) -> StoreState:
        """Return what state() would have returned when a checkpoint was made."""
        return self._state.state_of(checkpoint)

    # --- figures ----------------------------------------------------------------------------------

    @property
    def evicted(self) -> int:
        """Return how many entries of all KV heads were evicted so far."""
        return self._store.evicted

    def counters(self) -> dict[str, Any]:
        """Return this store's figures for SessionStats."""
        return {
            "kv_type": self._config.kv_type,
            **core_counters(self._store, self.hook),
            "rebases": self.rebases,
            "centred_layers": sum(of.size > 0 for of in self._shared_context.key_centres),
            **self.cold.counters(),
        }

    def thaw(self, rung: Rung, window: int, position: int) -> int:
        """Restore the frozen entries of a rung of the recovery ladder: see Session.thaw()."""
        return self.cold.thaw(rung, window, position)

    def close(self) -> None:
        """Remove the file of frozen entries; the owner frees the context."""
        self.context = None
        if hasattr(self, "cold"):
            self.cold.close()


def _core_of(
    config: ResolvedConfig, shared_context: HeadwiseContext, cold: ColdSide, plan: HeadwisePlan
) -> _core.HeadwiseStore:
    return _core.HeadwiseStore(
        layers=shared_context.layers,
        kv_type=config.kv_type,
        importance=config.policy.importance.settings(config.variation),
        n_sinks=plan.protection.n_sinks,
        recent_window=plan.protection.recent_window,
        max_tokens=shared_context.n_ubatch,
        max_entries=config.n_ctx,
        n_threads=config.options.most_threads,
        own_windows=config.own_windows,
        counts_dropped=config.policy.rule.by_losses,
        shared_choice=config.policy.rule.by_layer,
        ropes=[node.rope for node in shared_context.hook.nodes],
        key_centres=shared_context.key_centres,
        freezing=cold.settings,
        pool=shared_context.pool,
    )
