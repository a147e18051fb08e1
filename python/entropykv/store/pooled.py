"""Run the headwise store of a sequence that shares a pool of pages with others."""

from __future__ import annotations

from entropykv.settings.options import Budget
from entropykv.store.checkpoint import StoreCheckpoint
from entropykv.store.headwise import HeadwiseStore
from entropykv.store.protocol import StoreState


class PooledStore(HeadwiseStore):
    """Keep entries in a share of a pool, which others get while the sequence rests."""

    share_pages = 0
    """How many pages of the pool it may hold."""
    longest: int | None = None
    """How long its text gets, where the share holds all of it; None: as long as the context."""

    def take_share(self, pages: int, longest: int | None) -> None:
        """Hold at most so many pages, and evict what is more; `longest`: see there."""
        if (pages, longest) == (self.share_pages, self.longest):
            return
        budget = Budget("bytes", max(1, pages * self.sharing.plan.page_bytes))
        plan = self._config.headwise_plan(budget, self.layers, longest)
        with self.cold.growing():
            self.sharing.follow(plan)
        self.share_pages, self.longest = pages, longest

    def set_aside(self) -> None:
        """Forget everything, and leave the pool's pages to others until resize()."""
        self.truncate(0)
        self._store.give_up_share()
        self.share_pages, self.longest = 0, None
        if self._recurrent:
            self._recurrent.forget()

    def take_place(self, sequence: int) -> None:
        """Be llama.cpp's sequence of this number from now on."""
        self.sequence = sequence
        if self._recurrent:
            self._recurrent.sequence = sequence

    def checkpoint(self) -> StoreCheckpoint | None:
        """Share the pages of what is held now; None where it freezes: frozen entries are copied."""
        if self.cold.settings is not None:
            return None
        return self._state.checkpoint(self.shift, self.rollback.whole_from)

    def go_on_from(self, checkpoint: StoreCheckpoint, *, ends: bool) -> bool:
        """Hold what a checkpoint holds; what is more than the share is evicted.

        Returns False where the pool has no room for it: then nothing is held. The checkpoint is
        dropped if it `ends`.
        """
        done = self._state.go_on_from(checkpoint, self.sharing.share, ends=ends)
        self.shift = checkpoint.shift if done else 0
        self.rollback.begin_from(checkpoint.whole_from if done else 0)
        return done

    def state_of(self, checkpoint: StoreCheckpoint) -> StoreState:
        """Return what state() was when a checkpoint was made."""
        return self._state.state_of(checkpoint)
