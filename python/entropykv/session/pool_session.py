"""Hold one conversation of several with a model, as a session of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from entropykv.errors import PoolError
from entropykv.session.checkpoints import Checkpoint
from entropykv.session.host import Host
from entropykv.session.parking import Parked
from entropykv.session.recovery import Climb
from entropykv.session.sequence import TokenSequence
from entropykv.session.session import Session
from entropykv.session.shared_pool import SharedPool
from entropykv.settings.recovery import Recovery


@dataclass(frozen=True)
class Standing:
    """Say how a session stands among the others of its pool."""

    state: Literal["active", "idle", "parked", "waiting"]
    """What it does; `waiting`: for room in the pool, `idle`: it may be parked for another."""
    idle_seconds: float
    """Seconds since tokens of it were read."""
    given_up: int
    """How many entries left because its share became smaller, for the sake of others."""
    is_parked: bool = False
    """True where it has no share; it may still wait for one."""
    parked_entries: int = 0
    """How many entries of all KV heads come back with its next token."""
    pages_bytes: int = 0
    """Bytes of pages that it has in the pool while it is parked, shared ones included."""
    parked_bytes: int = 0
    """Bytes that are kept outside of the pool meanwhile."""


class PoolSession(Session):
    """Keep a Session's entries in a pool, whose session() makes it."""

    name: str | None = None
    """What those who use it call it, to find it among all sessions of a pool."""

    def __init__(
        self,
        host: Host,
        *,
        pool: object,
        weight: float = 1.0,
        recovery: Recovery | None = None,
        on_climb: Callable[[Climb], object] | None = None,
        origin: Checkpoint | None = None,
        tenant: Hashable = None,
    ) -> None:
        """Take a seat; `origin` is a parked state to go on from, which becomes its own.

        `pool` owns the host, and is kept as long as the session.
        """
        self._pool = pool
        self.tenant = tenant
        """Whose texts it shares: see Pool.session."""
        host.recipe.check_recovery(recovery)
        self._take_part(host, recovery, on_climb, weight=weight, alone=False)
        host.sessions[self.number] = self
        if origin is not None:
            self._go_on_from(origin)

    def _go_on_from(self, origin: Checkpoint) -> None:
        with self._host.at_seat(self._seat):
            self._shared.give(self._seat, origin.parked)
        self._sequence = origin.sequence.copy()
        self._sequence.evicted_before = origin.parked.evicted
        self._broken = False

    @property
    def _shared(self) -> SharedPool:
        """Return the pages that it shares with the others of its pool."""
        return cast(SharedPool, self._host.shared)

    @property
    def weight(self) -> float:
        """Return its part of the pool, relative to those of the others."""
        return self._seat.weight

    @property
    def is_live(self) -> bool:
        """Tell whether it holds entries in the pool, and is not parked or empty."""
        return self._seat.live

    @property
    def is_closed(self) -> bool:
        """Tell whether it was closed, or its pool was."""
        return self._closed or self._host.closed

    @property
    def number(self) -> int:
        """Return how many sessions its pool had had before it."""
        return self._seat.number

    def standing(self) -> Standing:
        """Return how it stands among the others of the pool, between two steps.

        Only then does what it holds stay where it is: a step may hand its pages to another one.
        """
        with self._host.scheduler.between_steps():
            return self._standing_between_steps()

    def _standing_between_steps(self) -> Standing:
        seat, scheduler, now = self._seat, self._host.scheduler, time.monotonic()
        idle_seconds = now - seat.last_step
        parked = seat.parked
        if parked is not None:
            state: Literal["parked", "waiting"] = (
                "waiting" if scheduler.is_waiting(seat) else "parked"
            )
            return Standing(
                state,
                idle_seconds,
                seat.given_up,
                is_parked=True,
                parked_entries=parked.n_entries,
                pages_bytes=parked.n_pages * seat.headwise.sharing.plan.page_bytes,
                parked_bytes=parked.n_bytes,
            )
        is_idle = seat.is_idle(now) and not scheduler.is_waiting(seat)
        return Standing("idle" if is_idle else "active", idle_seconds, seat.given_up)

    def park(self) -> None:
        """Leave its part of the pool to others until it is used again; raises PoolError."""
        self._check_usable()
        with self._host.at_seat(self._seat):
            self._shared.park(self._seat)
            self._shared.share()

    def fork(self) -> PoolSession:
        """Return another session of the pool, which goes on from what this one has read.

        Both have the same pages until one of them changes. It is parked until it reads, and then
        has a share of the pool. Raises PoolError where no more can be parked.
        """
        self._check_usable()
        host, origin = self._host, None
        if self.position:
            with host.at_seat(self._seat):
                kept = self._shared.kept_of(self._seat)
                self._sequence.note_evictions(self.evicted)
                origin = self._checkpoint(self._sequence.copy(), kept)
        return PoolSession(
            host,
            pool=self._pool,
            weight=self.weight,
            recovery=self.recovery,
            on_climb=self.on_climb,
            origin=origin,
            tenant=self.tenant,
        )

    def keep_checkpoint(self) -> None:
        """Keep where the text stands, to come back to, and for others that begin as it does."""
        checkpoints = self._host.checkpoints
        if checkpoints.limit_bytes == 0 or self.position == 0 or self._broken:
            return
        with self._host.at_seat(self._seat):
            parked = self._shared.checkpoint_of(self._seat)
            if parked is not None:
                self._sequence.note_evictions(self.evicted)
                checkpoints.keep(self._checkpoint(self._sequence.to_come_back_to(), parked))

    def _checkpoint(self, text: TokenSequence, parked: Parked) -> Checkpoint:
        goes_back = not self._host.recurrent
        return Checkpoint(text, parked, goes_back=goes_back, tenant=self.tenant)

    def return_to_checkpoint(
        self, tokens: Sequence[int], beyond: int = 0, *, repeatable: bool = False
    ) -> bool:
        """Go back as a Session does, to a checkpoint of any session of its tenant in the pool.

        With a checkpoint of all of the text, the logits are there again.
        """
        host = self._host
        with host.at_seat(self._seat):
            found, position = host.checkpoints.nearest(tokens, self.tenant, repeatable=repeatable)
            if found is None or position <= beyond:
                return False
            try:
                parked = self._shared.parking.copy(found.parked)
            except PoolError:  # there is no room to park what it holds
                return False
            self._go_on_from(replace(found, parked=parked))
        if position < self.position:
            try:
                self.truncate(position)
            except PoolError:  # there is no room to be live, and waiting for it may take long
                self.truncate(0)
                return False
        return True
