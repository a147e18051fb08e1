"""Ask what a session's store holds, and change how much it may hold: `session.cache`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv.session.model_runner import ModelRunner
from entropykv.session.second_readings import PredictorFit
from entropykv.session.sequence_slot import SequenceSlot, Trajectory
from entropykv.session.shared_pool import PoolStatus
from entropykv.settings.options import Budget, at_least
from entropykv.settings.recovery import Rung
from entropykv.store.protocol import CacheMapFunction


class SessionCache:
    """Show what is stored of one sequence, where, and with what share of a pool."""

    def __init__(self, runner: ModelRunner, slot: SequenceSlot) -> None:
        """Serve the sequence of one slot of a model runner."""
        self._runner = runner
        self._slot = slot

    @property
    def store(self) -> str:
        """Return the name of the store: headwise, device or flat."""
        return self._slot.store.name

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending; raises IndexError for an unknown
        head.
        """
        budgets = self.budgets()
        if not 0 <= layer < len(budgets) or not 0 <= kv_head < len(budgets[layer]):
            raise IndexError(f"the model has no KV head {kv_head} in layer {layer}")
        with self._runner.live_store(self._slot) as store:
            return store.entries(layer, kv_head)

    def importance(
        self,
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] | None:
        """Return for every KV head of all layers the positions that it keeps, ascending, and their
        importance.

        Returns None if the store or the policy does not measure attention. Raises PoolError if the
        pool has no room for the session.
        """
        with self._runner.live_store(self._slot) as store:
            found = []
            for layer, budgets in enumerate(store.budgets()):
                for head in range(len(budgets)):
                    importance = store.importance(layer, head)
                    if importance is None:
                        return None
                    found.append((store.entries(layer, head), importance))
            return found

    def map(self) -> CacheMapFunction:
        """Return a function that shows what all KV heads hold, for viewers.

        look(first, per_column, n_columns) returns three arrays of bytes, (KV heads of all layers,
        columns), or with one row if all KV heads keep the same: the shares of a column's positions
        that are held, that are frozen, and that are held now but were frozen at the last call; in
        255ths, rounded up.
        """
        return self._slot.store.cache_map()

    @property
    def trajectory(self) -> Trajectory | None:
        """Return the numbers of entries over the text, if entries are frozen; else None."""
        return self._slot.trajectory

    @property
    def evicted(self) -> int:
        """Return how many entries of all KV heads were dropped for good so far."""
        return self._slot.store.evicted

    @property
    def on_host(self) -> str | None:
        """Return which layers the device store serves in main memory because their device cannot
        compute their attention; None if there are none, and for other stores.
        """
        return self._slot.store.context.on_host

    @property
    def untaught(self) -> str | None:
        """Return how policy `auto` could rank entries better on a device, where no predictor of
        scores is learnt; None if it has one, and for other policies and stores.
        """
        return self._runner.untaught

    @property
    def context(self) -> Any:
        """Return the llama_context, for samplers; its logits may belong to another session."""
        return self._slot.store.context.handle

    def budgets(self) -> list[tuple[int, ...]]:
        """Return the entries that every KV head may keep, as `[layer][KV head]`."""
        return self._slot.store.budgets()

    @property
    def sure_entries(self) -> int:
        """Return how many of the newest tokens every KV head certainly keeps; n_ctx if nothing is
        evicted.
        """
        return self._slot.store.reach().sure

    @property
    def bytes_full_per_token(self) -> int:
        """Return the bytes that a full cache in f16 would take for a token."""
        return self._slot.store.facts.bytes_full_per_token

    def resize(self, kv_budget: Budget | str | float) -> None:
        """Change the budget while running: a larger one takes effect at once, a smaller one evicts.

        BudgetError leaves the session unchanged.
        """
        self._runner.check_usable(self._slot)
        budget = Budget.parse(kv_budget)
        try:
            self._runner.resize(budget)
        except MemoryError:
            raise self._runner.factory.too_large(budget) from None
        self._slot.note_evictions()

    def thaw(self, rung: Rung = Rung.FULL, window: int = 0) -> int:
        """Restore frozen entries as far as the budget has room; returns how many entries of all KV
        heads.

        SOFT: those that would stay frozen for more than one further step; WINDOW: those frozen in
        the last `window` steps; FULL: all, and detections start again. The next token also searches
        the remaining ones.
        """
        self._runner.check_usable(self._slot)
        at_least("window", window, 0)
        with self._runner.live_store(self._slot) as store:
            position = self._slot.text.position
            return store.freezing.thaw(rung, window, position) if store.freezing else 0

    @property
    def predictor_fit(self) -> PredictorFit | None:
        """Return the object that fits the model's predictor to its first texts; None if there is
        one already.
        """
        return self._runner.second_readings.fit

    @property
    def is_live(self) -> bool:
        """Tell whether it has a share of the pool, and is neither swapped out nor empty."""
        return self._slot.live

    def swap_out(self) -> None:
        """Leave its share to the others of the pool until it is used again; raises PoolError."""
        self._runner.check_usable(self._slot)
        shared = self._runner.shared
        with self._runner.exclusively(self._slot):
            shared.swap_out(self._slot)
            shared.share()

    def pool_status(self) -> PoolStatus:
        """Return the session's status in its pool, at a moment between two steps.

        During a step, its pages may be given to another session.
        """
        with self._runner.scheduler.between_steps():
            return self._runner.shared.status_of(self._slot)
