"""A session of a pool: one conversation of several with a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from entropykv.session.host import Host
from entropykv.session.recovery import Climb
from entropykv.session.seat import Seat
from entropykv.session.sequence import TokenSequence
from entropykv.session.session import Session
from entropykv.session.shared_pool import SharedPool
from entropykv.settings.recovery import Recovery


@dataclass(frozen=True)
class Standing:
    """How a session stands among the others of its pool."""

    state: Literal["active", "idle", "parked", "waiting"]
    """`waiting`: its tokens wait for room in the pool; `idle`: it may be parked for another."""
    idle_seconds: float
    """Since tokens of it were read."""
    given_up: int
    """Entries that left so far because its share became smaller, for the sake of others."""
    parked_entries: int = 0
    """Entries of all KV heads that are kept outside of the pool."""
    parked_bytes: int = 0


class PoolSession(Session):
    """A Session whose entries are in a pool; see Pool.session(), which makes it."""

    name: str | None = None
    """What those who use it call it, for who looks at all sessions of a pool."""

    def __init__(
        self,
        host: Host,
        *,
        weight: float = 1.0,
        recovery: Recovery | None = None,
        on_climb: Callable[[Climb], object] | None = None,
        origin: Seat | None = None,
        sequence: TokenSequence | None = None,
    ) -> None:
        """Take a seat; `origin`: whose entries are copied, and `sequence`: the text of it."""
        host.recipe.check_recovery(recovery)
        self._take_part(host, recovery, on_climb, weight=weight, alone=False)
        host.sessions[self.number] = self
        if origin is None or sequence is None or sequence.position == 0:
            return
        try:
            with host.scheduler.between_steps():
                self._shared.copy(origin, self._seat)
        except BaseException:
            self.close()
            raise
        self._sequence = sequence

    @property
    def _shared(self) -> SharedPool:
        """The pages that it shares with the others of its pool."""
        return cast(SharedPool, self._host.shared)

    @property
    def weight(self) -> float:
        """Its part of the pool, relative to those of the others."""
        return self._seat.weight

    @property
    def is_live(self) -> bool:
        """Whether it holds entries in the pool, and is not parked or empty."""
        return self._seat.live

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or its pool was."""
        return self._closed or self._host.closed

    @property
    def number(self) -> int:
        """How many sessions its pool had had before it."""
        return self._seat.number

    def standing(self) -> Standing:
        """How it stands among the others of the pool."""
        seat, scheduler, now = self._seat, self._host.scheduler, time.monotonic()
        idle_seconds = now - seat.last_step
        if seat.parked is not None:
            state: Literal["parked", "waiting"] = (
                "waiting" if scheduler.is_waiting(seat) else "parked"
            )
            parked = seat.parked
            return Standing(state, idle_seconds, seat.given_up, parked.n_entries, parked.n_bytes)
        is_idle = seat.is_idle(now) and not scheduler.is_waiting(seat)
        return Standing("idle" if is_idle else "active", idle_seconds, seat.given_up)

    def park(self) -> None:
        """Leave its part of the pool to the others until it is used again. PoolError."""
        self._check_usable()
        with self._host.scheduler.between_steps():
            self._shared.park(self._seat)
            self._shared.share()

    def fork(self) -> PoolSession:
        """Return another session of the pool, which goes on from what this one has read.

        Its entries are copied: it is parked until it reads, and then has a part of the pool of its
        own. Raises PoolError where no more can be parked.
        """
        self._check_usable()
        self._sequence.note_evictions(self.evicted)
        return PoolSession(
            self._host,
            weight=self.weight,
            recovery=self.recovery,
            on_climb=self.on_climb,
            origin=self._seat,
            sequence=self._sequence.copy(),
        )
