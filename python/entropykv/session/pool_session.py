"""Hold one conversation of several with a model, as a session of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from entropykv.errors import PoolError
from entropykv.session.checkpoints import Checkpoint
from entropykv.session.model_runner import ModelRunner
from entropykv.session.recovery import Climb
from entropykv.session.sequence import TokenSequence
from entropykv.session.session import Session
from entropykv.session.shared_pool import SharedPool
from entropykv.session.swap_space import SwappedSequence
from entropykv.settings.recovery import Recovery
from entropykv.settings.renamed import warn_of_name


@dataclass(frozen=True)
class PoolStatus:
    """Say how a session stands among the others of its pool."""

    state: Literal["active", "idle", "swapped_out", "waiting"]
    """What it does; `waiting`: for room in the pool, `idle`: it may be swapped out for another."""
    idle_seconds: float
    """Seconds since tokens of it were read."""
    given_up: int
    """How many entries left because its share became smaller, for the sake of others."""
    is_swapped_out: bool = False
    """True where it has no share; it may still wait for one."""
    swapped_entries: int = 0
    """How many entries of all KV heads come back with its next token."""
    pages_bytes: int = 0
    """Bytes of pages that it has in the pool while it is swapped out, shared ones included."""
    swapped_bytes: int = 0
    """Bytes that are kept outside of the pool meanwhile."""


class PoolSession(Session):
    """Keep a Session's entries in a pool, whose session() makes it."""

    name: str | None = None
    """What those who use it call it, to find it among all sessions of a pool."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        pool: object,
        weight: float = 1.0,
        recovery: Recovery | None = None,
        on_climb: Callable[[Climb], object] | None = None,
        origin: Checkpoint | None = None,
        tenant: Hashable = None,
    ) -> None:
        """Take a slot; `origin` is a swapped out state to go on from, which becomes its own.

        `pool` owns the runner, and is kept as long as the session.
        """
        self._pool = pool
        self.tenant = tenant
        """Whose texts it shares: see Pool.session."""
        runner.config.check_recovery(recovery)
        self._take_part(runner, recovery, on_climb, weight=weight, alone=False)
        runner.sessions[self.number] = self
        if origin is not None:
            self._go_on_from(origin)

    def _go_on_from(self, origin: Checkpoint) -> None:
        with self._runner.exclusively(self._slot):
            self._shared.give(self._slot, origin.swapped)
        self._sequence = origin.sequence.copy()
        self._sequence.evicted_before = origin.swapped.evicted
        self._broken = False

    @property
    def _shared(self) -> SharedPool:
        """Return the pages that it shares with the others of its pool."""
        return cast(SharedPool, self._runner.shared)

    @property
    def weight(self) -> float:
        """Return its part of the pool, relative to those of the others."""
        return self._slot.weight

    @property
    def is_live(self) -> bool:
        """Tell whether it holds entries in the pool, and is not swapped or empty."""
        return self._slot.live

    @property
    def is_closed(self) -> bool:
        """Tell whether it was closed, or its pool was."""
        return self._closed or self._runner.closed

    @property
    def number(self) -> int:
        """Return how many sessions its pool had had before it."""
        return self._slot.number

    def pool_status(self) -> PoolStatus:
        """Return how it stands among the others of the pool, between two steps.

        Only then does what it holds stay where it is: a step may hand its pages to another one.
        """
        with self._runner.scheduler.between_steps():
            return self._status_between_steps()

    def _status_between_steps(self) -> PoolStatus:
        slot, scheduler, now = self._slot, self._runner.scheduler, time.monotonic()
        idle_seconds = now - slot.last_step
        swapped = slot.swapped
        if swapped is not None:
            state: Literal["swapped_out", "waiting"] = (
                "waiting" if scheduler.is_waiting(slot) else "swapped_out"
            )
            return PoolStatus(
                state,
                idle_seconds,
                slot.given_up,
                is_swapped_out=True,
                swapped_entries=swapped.n_entries,
                pages_bytes=swapped.n_pages * slot.headwise.sharing.plan.page_bytes,
                swapped_bytes=swapped.n_bytes,
            )
        is_idle = slot.is_idle(now) and not scheduler.is_waiting(slot)
        return PoolStatus("idle" if is_idle else "active", idle_seconds, slot.given_up)

    def swap_out(self) -> None:
        """Leave its part of the pool to others until it is used again; raises PoolError."""
        self._check_usable()
        with self._runner.exclusively(self._slot):
            self._shared.swap_out(self._slot)
            self._shared.share()

    def park(self) -> None:
        """Swap out, under the name that it had before version 0.2.0."""
        warn_of_name("PoolSession.park", "swap_out")
        self.swap_out()

    def standing(self) -> PoolStatus:
        """Return pool_status(), under the name that it had before version 0.2.0."""
        warn_of_name("PoolSession.standing", "pool_status")
        return self.pool_status()

    def fork(self) -> PoolSession:
        """Return another session of the pool, which goes on from what this one has read.

        Both have the same pages until one of them changes. It is swapped out until it reads, and
        then has a share of the pool. Raises PoolError where no more can be swapped out.
        """
        self._check_usable()
        runner, origin = self._runner, None
        if self.position:
            with runner.exclusively(self._slot):
                kept = self._shared.kept_of(self._slot)
                self._sequence.note_evictions(self.evicted)
                origin = self._checkpoint(self._sequence.copy(), kept)
        return PoolSession(
            runner,
            pool=self._pool,
            weight=self.weight,
            recovery=self.recovery,
            on_climb=self.on_climb,
            origin=origin,
            tenant=self.tenant,
        )

    def keep_checkpoint(self) -> None:
        """Keep where the text stands, to come back to, and for others that begin as it does."""
        checkpoints = self._runner.checkpoints
        if checkpoints.limit_bytes == 0 or self.position == 0 or self._broken:
            return
        with self._runner.exclusively(self._slot):
            swapped = self._shared.checkpoint_of(self._slot)
            if swapped is not None:
                self._sequence.note_evictions(self.evicted)
                checkpoints.keep(self._checkpoint(self._sequence.to_come_back_to(), swapped))

    def _checkpoint(self, text: TokenSequence, swapped: SwappedSequence) -> Checkpoint:
        goes_back = not self._runner.recurrent
        return Checkpoint(text, swapped, goes_back=goes_back, tenant=self.tenant)

    def return_to_checkpoint(
        self, tokens: Sequence[int], beyond: int = 0, *, repeatable: bool = False
    ) -> bool:
        """Go back as a Session does, to a checkpoint of any session of its tenant in the pool.

        With a checkpoint of all of the text, the logits are there again.
        """
        runner = self._runner
        with runner.exclusively(self._slot):
            found, position = runner.checkpoints.nearest(tokens, self.tenant, repeatable=repeatable)
            if found is None or position <= beyond:
                return False
            try:
                swapped = self._shared.swap_space.copy(found.swapped)
            except PoolError:  # there is no room to swap out what it holds
                return False
            self._go_on_from(replace(found, swapped=swapped))
        if position < self.position:
            try:
                self.truncate(position)
            except PoolError:  # there is no room to be live, and waiting for it may take long
                self.truncate(0)
                return False
        return True
