"""Ask what a session's store holds, and change how much it may hold: `session.cache`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv.session.model_runner import ModelRunner
from entropykv.session.second_readings import PredictorFit
from entropykv.session.shared_pool import PoolStatus, SequenceSlot
from entropykv.session.stats import Trajectory
from entropykv.settings.freezing import Rung
from entropykv.settings.options import Budget, at_least
from entropykv.store.protocol import CacheMapFunction


class SessionCache:
    """Show what is stored of one sequence, where, and with what share of a pool.

    Methods that wait for the store raise EntropyKVError for a session that is closed.
    """

    def __init__(self, runner: ModelRunner, slot: SequenceSlot) -> None:
        """Serve the sequence of one slot of a model runner."""
        self._runner = runner
        self._slot = slot

    @property
    def store(self) -> str:
        """Return the name of the store: headwise, device or flat."""
        return self._slot.store.name

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending, (n_entries,). Raises IndexError for
        a layer or head that the model does not have, PoolError if the pool has no room for the
        session.
        """
        budgets = self.budgets()
        if not 0 <= layer < len(budgets) or not 0 <= kv_head < len(budgets[layer]):
            raise IndexError(f"the model has no KV head {kv_head} in layer {layer}")
        with self._runner.live_store(self._slot) as store:
            return store.entries(layer, kv_head)

    def importance(
        self,
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] | None:
        """Return (positions, importance) for every KV head of all layers: the positions that it
        keeps, ascending, int32, and the importance of these entries, float32, each (n_entries,).

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

        The function takes (first position, positions per column, number of columns) and returns
        three arrays of bytes, (KV heads of all layers, columns), or with one row if all KV heads
        keep the same: the shares of a column's positions that are held, that are frozen, and that
        are held now but were frozen at the last call; in 255ths, rounded up.
        """
        return self._slot.store.cache_map()

    @property
    def trajectory(self) -> Trajectory | None:
        """Return how many entries were active and frozen as the text grew; None unless entries are
        frozen.
        """
        return self._slot.trajectory

    @property
    def evicted(self) -> int:
        """Return how many entries of all KV heads were dropped for good so far."""
        return self._slot.store.evicted

    @property
    def on_host(self) -> str | None:
        """Return a sentence about the layers that the device store serves in main memory because
        their device cannot compute their attention; None if there are none, and for other stores.
        """
        return self._slot.store.context.on_host

    @property
    def untaught(self) -> str | None:
        """Return a sentence for the user if policy `auto` has no predictor on a device, where none
        is learnt; None in all other cases.
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
        """Return how long a text may be, in tokens, so that every KV head is certain to keep all of
        it; n_ctx if nothing is ever evicted.
        """
        return self._slot.store.reach().sure

    @property
    def bytes_full_per_token(self) -> int:
        """Return the bytes that one token takes in a full cache in f16, in all layers."""
        return self._slot.store.facts.bytes_full_per_token

    def resize(self, kv_budget: Budget | str | float) -> None:
        """Change the budget between two steps: a larger one takes effect at once, a smaller one
        evicts. In a pool, it is the budget of all sessions.

        Raises BudgetError for a budget that is too small or does not fit into memory; the session
        stays as it was.
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
        heads, 0 if the store does not freeze.

        SOFT: entries that would stay frozen for more than one further step. WINDOW: entries that
        were frozen while the last `window` tokens were read. FULL: all, and the counts by which the
        freeze schedule decides start at zero. REWALK: all. The next token also searches the
        remaining ones. Raises SettingsError for a negative window, EntropyKVError for a session
        that is closed or whose last decode failed, PoolError if the pool has no room for it.
        """
        self._runner.check_usable(self._slot)
        at_least("window", window, 0)
        with self._runner.live_store(self._slot) as store:
            position = self._slot.text.position
            return store.freezing.thaw(rung, window, position) if store.freezing else 0

    @property
    def predictor_fit(self) -> PredictorFit | None:
        """Return the object that learns the model's predictor from its first texts; None if a
        predictor is known or none is needed.
        """
        return self._runner.second_readings.fit

    @property
    def is_live(self) -> bool:
        """Tell whether the session has a share of its pool. One that is swapped out or has read
        nothing has none; a session without a pool always has the whole budget.
        """
        return self._slot.live

    def swap_out(self) -> None:
        """Leave the session's share to the others of the pool until it is used again.

        Raises PoolError for a session without a pool, or if what was read cannot be kept elsewhere.
        """
        self._runner.check_usable(self._slot)
        shared = self._runner.shared
        with self._runner.exclusively(self._slot):
            shared.swap_out(self._slot)
            shared.share()

    def pool_status(self) -> PoolStatus:
        """Return the status of the session in its pool, between two steps.

        It waits for the end of a running step, in which the pages of the session may be given to
        another one.
        """
        with self._runner.scheduler.between_steps():
            return self._runner.shared.status_of(self._slot)
