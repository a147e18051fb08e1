"""Hold many conversations with one model, in one hard budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import Unpack

from entropykv.errors import EntropyKVError
from entropykv.llamacpp.model import Model
from entropykv.session.host import Host
from entropykv.session.pool_session import PoolSession
from entropykv.session.recovery import Climb
from entropykv.settings.cache_options import CacheOptions, PoolArguments, shows
from entropykv.settings.options import Budget
from entropykv.settings.recovery import Recovery


@dataclass(frozen=True)
class PoolStats:
    """Hold figures of a pool at one moment."""

    kv_bytes_budget: int
    """The bytes that all conversations together can never exceed."""
    kv_bytes_now: int
    kv_bytes_peak: int
    """The most bytes that were in use."""
    kv_bytes_staging: int
    """Bytes besides the pool: one micro-batch of one layer."""
    kv_bytes_scratch: int
    """Bytes besides both: what the threads of the attention op work with."""
    sessions: int
    """How many sessions are open."""
    live: int
    """How many of them hold entries in the pool."""
    parked: int
    """How many of them are kept outside of it."""
    parked_bytes: int
    waiting: int
    """How many of them have tokens that wait to be read."""
    entries_kept: int
    """How many entries all that are live hold, in all KV heads."""
    evictions: int
    """How many entries were evicted so far, of all that are or were open."""
    checkpoints: int
    """How many checkpoints of all sessions are kept."""
    checkpoint_bytes: int
    """The bytes that checkpoints take besides the pool."""
    text_bytes: int
    """The bytes of the tokens and logits of all sessions, swapped out or not."""


class Pool:
    """One model, and one budget of bytes for all sessions that session() makes.

    Each session has the interface of Session, and may be used by a thread of its own: the tokens of
    all that are waiting are read together. The pool lives as long as one of them, unless it is
    closed. `options`, or keyword arguments of the same names: see
    CacheOptions. `n_sequences`: how many conversations hold entries at a time (4 unless given);
    there may be more sessions, which are parked while they are idle: what they hold goes to `park`,
    `ram` or `disk:DIR`, of at most `park_limit` bytes, and nothing of it is read again. Those that
    hold entries share the budget: `kv_budget` is that of all together (a fraction is that of
    n_sequences contexts), and each has an equal part of it, but for weights. Another one that comes
    costs the others their least important entries; one that goes, or is parked, leaves its part to
    them. At the end of every prompt and answer, a session keeps a checkpoint (see checkpoints.py):
    in the pool as long as it has room, and in up to `checkpoints` bytes besides it; 0: none.
    `recovery` is that of sessions that get no other.

    Raises what Session raises, and UnsupportedModelError where only the flat store serves the
    model, which holds one conversation.
    """

    _closed = True
    """True until it holds something, so that close() works even where __init__ raises."""

    @shows(PoolArguments)
    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        options: CacheOptions | None = None,
        *,
        verbose: bool = False,
        **arguments: Unpack[PoolArguments],
    ) -> None:
        """Load the model; `n_ubatch` tokens of a prompt are read between two tokens of writers."""
        asked = CacheOptions.of(options, arguments).pooled()
        self._host = Host(model, asked, verbose=verbose)
        self._closed = False

    def __enter__(self) -> Pool:
        """Use the pool as a context manager: it closes at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def __del__(self) -> None:
        """Free what nobody has closed."""
        self.close()

    @property
    def host(self) -> Host:
        """Return the model, the context and the steps that the sessions share."""
        return self._host

    def session(
        self,
        *,
        weight: float = 1.0,
        recovery: Recovery | None = None,
        on_climb: Callable[[Climb], object] | None = None,
        tenant: Hashable = None,
    ) -> PoolSession:
        """Make a session; close() gives its part of the budget to the others.

        `weight`: its part, relative to those of the others. `recovery` None: that of the pool.
        `on_climb`: see Session. `tenant`: whose texts it may go on from, such as a user's name: it
        finds the checkpoints of sessions of the same tenant alone.
        """
        recovery = recovery or self._host.recipe.options.recovery
        return PoolSession(
            self._host,
            pool=self,
            weight=weight,
            recovery=recovery,
            on_climb=on_climb,
            tenant=tenant,
        )

    def sessions(self) -> list[PoolSession]:
        """Return the sessions that are open, in the order in which they came."""
        there = (reference() for reference in self._host.sessions.valuerefs())
        return [each for each in there if each is not None and not each.is_closed]

    def session_for(self, tokens: Sequence[int], tenant: Hashable = None) -> PoolSession:
        """Make a session that goes on from what any other one of the tenant has read of a text.

        Its position says how many tokens need not be read: those of the nearest checkpoint.
        """
        session = self.session(tenant=tenant)
        session.return_to_checkpoint(tokens)
        return session

    def resize(self, kv_budget: Budget | str | float) -> None:
        """Change the budget of all: it grows at once, and shrinks by evicting.

        BudgetError where it would not hold those that are being read; idle ones are parked before.
        """
        self._host.resize(Budget.parse(kv_budget))

    def stats(self) -> PoolStats:
        """Return counts and bytes of the moment."""
        host, shared = self._host, self._host.shared
        if host.closed or shared is None:
            raise EntropyKVError("the pool is closed; make a new one")
        with host.scheduler.between_steps():
            core = shared.core
            counters = [seat.store.counters() for seat in host.seats]
            return PoolStats(
                kv_bytes_budget=core.budget_bytes,
                kv_bytes_now=core.used_bytes,
                kv_bytes_peak=core.peak_bytes,
                kv_bytes_staging=core.staging_bytes,
                kv_bytes_scratch=_sum(counters, "kv_bytes_scratch") + core.scratch_bytes,
                sessions=len(host.seats),
                live=len(shared.live),
                parked=shared.parking.count,
                parked_bytes=shared.parking.bytes,
                waiting=host.scheduler.n_waiting,
                entries_kept=_sum(counters, "entries_kept"),
                evictions=host.evictions,
                checkpoints=len(host.checkpoints),
                checkpoint_bytes=host.checkpoints.bytes,
                text_bytes=sum(session.text_bytes for session in self.sessions()),
            )

    def close(self) -> None:
        """Free everything; the sessions cannot be used any more.

        It waits for the step that is being made. Threads that read, write or wait get an
        EntropyKVError that says that the pool is closed.
        """
        if not self._closed:
            self._closed = True
            self._host.close()


def _sum(counters: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(each[name] for each in counters)
