"""A sequence's part of what a host holds: its store, its weight, and whether it is live."""

from __future__ import annotations

from typing import cast

from entropykv.policy.division import LossCurve
from entropykv.session.parking import Parked
from entropykv.store.pooled import PooledStore
from entropykv.store.protocol import Store

IDLE_SECONDS = 1.0
"""A sequence that was not read on for so long may be parked for another, though nobody said that it
rests."""


class Seat:
    """A session's part of its host: a store, and whether it is live."""

    def __init__(self, store: Store, weight: float, number: int, *, live: bool) -> None:
        """A sequence that has read nothing yet."""
        self.store = store
        self.number = number
        """How many had a seat at this host before."""
        self.weight = weight
        """Its part of the pool, relative to the others'."""
        self.live = live
        self.parked: Parked | None = None
        self.position = 0
        """Tokens read, when it was last between two steps."""
        self.expected = 0
        """Tokens that its text is known to get, at least: the others have what it does not need."""
        self.shared_for = 0
        """Tokens that shares have room for, or have gone by."""
        self.loss_curve: LossCurve | None = None
        """What its text loses with fewer pages, when shares last went by it."""
        self.rests = False
        """Whether its session has said that no token follows soon."""
        self.last_step = 0.0
        self.inherited = 0
        """Entries that had been evicted of what it is a copy of."""
        self.given_up = 0
        """Entries that left because its share became smaller, for the sake of others."""

    @property
    def evicted(self) -> int:
        """Entries evicted since it is there."""
        return self.store.evicted - self.inherited

    def is_idle(self, now: float) -> bool:
        """Whether it can be parked without making anybody wait."""
        return self.live and (self.rests or now - self.last_step > IDLE_SECONDS)

    @property
    def headwise(self) -> PooledStore:
        """The store of a sequence that shares a pool: no other store does."""
        return cast(PooledStore, self.store)
