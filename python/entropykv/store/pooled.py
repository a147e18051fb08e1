"""The headwise store of a sequence that shares a pool of pages with others."""

from __future__ import annotations

from entropykv.store.checkpoint import StoreCheckpoint
from entropykv.store.headwise import HeadwiseStore
from entropykv.store.protocol import StoreState


class PooledStore(HeadwiseStore):
    """Entries in a share of a pool, which others get while the sequence rests."""

    share_pages = 0
    """Pages of the pool that it may hold."""

    def set_aside(self) -> None:
        """Forget everything, and leave the pool's pages to others until resize()."""
        self.truncate(0)
        self._store.give_up_share()
        self.share_pages = 0
        if self._recurrent:
            self._recurrent.forget()

    def take_place(self, sequence: int) -> None:
        """Be llama.cpp's sequence of this number from now on."""
        self.sequence = sequence
        if self._recurrent:
            self._recurrent.sequence = sequence

    def checkpoint(self) -> StoreCheckpoint | None:
        """Return what is held now, its pages shared; None where it freezes: those are copied."""
        if self.cold.settings is not None:
            return None
        return self._state.checkpoint(self.shift, self._whole_from)

    def go_on_from(self, checkpoint: StoreCheckpoint, *, ends: bool) -> bool:
        """Hold what a checkpoint holds; what is more than the share is evicted."""
        done = self._state.go_on_from(checkpoint, self.sharing.share, ends=ends)
        self.shift = checkpoint.shift if done else 0
        self._loaded = checkpoint.whole_from if done else 0
        return done

    def state_of(self, checkpoint: StoreCheckpoint) -> StoreState:
        """Return what state() was when a checkpoint was made."""
        return self._state.state_of(checkpoint)
