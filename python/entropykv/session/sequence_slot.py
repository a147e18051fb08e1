"""Hold a sequence's part of a runner: its text, its store, its weight, and whether it is live."""

from __future__ import annotations

from typing import cast

from entropykv.policy.division import LossCurve
from entropykv.session.sequence import TokenSequence
from entropykv.session.swap_space import SwappedSequence
from entropykv.session.trajectory import Trajectory
from entropykv.store.headwise import HeadwiseStore
from entropykv.store.protocol import Store

IDLE_SECONDS = 1.0
"""Seconds without reading after which a sequence may be swapped out though nobody said it rests."""


class SequenceSlot:
    """Hold all that there is of one sequence; a session is a handle on it."""

    def __init__(
        self, store: Store, weight: float, number: int, text: TokenSequence, *, live: bool
    ) -> None:
        """Begin with nothing read."""
        self.store = store
        self.number = number
        """How many sequences had a slot at this runner before."""
        self.weight = weight
        """Its part of the pool, relative to those of the others."""
        self.live = live
        self.gone = False
        """True once its session is closed: nothing can be read or held any more."""
        self.swapped: SwappedSequence | None = None
        self.text = text
        """What was read, as its session knows it; loading and forking put another in its place."""
        self.trajectory: Trajectory | None = None
        """What was held over the text, where entries are frozen."""
        self.broken = False
        """True where a decode has failed half-way."""
        self.writes = False
        """True where the latest tokens were written one by one, and are not a prompt."""
        self.position = 0
        """How many tokens were read, when it was last between two steps."""
        self.expected = 0
        """Tokens that its text is known to get, at least: the others have what it does not need."""
        self.shared_for = 0
        """Tokens that shares have room for, or have gone by."""
        self.loss_curve: LossCurve | None = None
        """What its text loses with fewer pages, when shares last went by it."""
        self.rests = False
        """True where its session has said that no token follows soon."""
        self.last_step = 0.0
        self.inherited = 0
        """How many entries had been evicted of the sequence that it is a copy of."""
        self.given_up = 0
        """How many entries left because its share became smaller, for the sake of others."""

    @property
    def evicted(self) -> int:
        """Return how many entries were evicted since it is there."""
        return self.store.evicted - self.inherited

    def note_evictions(self) -> None:
        """Let the text know where it ended when entries were last evicted."""
        self.text.note_evictions(self.store.evicted)

    def is_idle(self, now: float) -> bool:
        """Tell whether it can be swapped out without making anybody wait."""
        return self.live and (self.rests or now - self.last_step > IDLE_SECONDS)

    @property
    def headwise(self) -> HeadwiseStore:
        """Return the store, which is a HeadwiseStore: no other one shares a pool."""
        return cast(HeadwiseStore, self.store)
