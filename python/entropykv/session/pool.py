"""Hold many conversations with one model, in one hard budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import Unpack

from entropykv.errors import EntropyKVError
from entropykv.llamacpp.model import Model
from entropykv.session.model_runner import ModelRunner
from entropykv.session.recovery import Climb
from entropykv.session.session import Session
from entropykv.settings.cache_options import CacheOptions, PoolArguments, shows
from entropykv.settings.options import Budget
from entropykv.settings.recovery import Recovery
from entropykv.settings.renamed import warn_of_name


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
    swapped_out: int
    """How many of them are kept outside of it."""
    swapped_bytes: int
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

    @property
    def parked(self) -> int:
        """Return swapped_out, under the name that it had before version 0.2.0."""
        warn_of_name("PoolStats.parked", "swapped_out")
        return self.swapped_out

    @property
    def parked_bytes(self) -> int:
        """Return swapped_bytes, under the name that it had before version 0.2.0."""
        warn_of_name("PoolStats.parked_bytes", "swapped_bytes")
        return self.swapped_bytes


class Pool:
    """One model, and one budget of bytes for all sessions that session() makes.

    Each session has the interface of Session, and may be used by a thread of its own: the tokens of
    all that are waiting are read together. The pool lives as long as one of them, unless it is
    closed. `options`, or keyword arguments of the same names: see
    CacheOptions. `n_sequences`: how many conversations hold entries at a time (4 unless given);
    there may be more sessions, which are swapped out while they are idle: what they hold goes to
    `swap`, `ram` or `disk:DIR`, of at most `swap_limit` bytes, and nothing of it is read again.
    Those that hold entries share the budget: `kv_budget` is that of all together (a fraction is
    that of n_sequences contexts), and each has an equal part of it, but for weights. Another one
    that comes costs the others their least important entries; one that goes, or is swapped out,
    leaves its part to them. At the end of every prompt and answer, a session keeps a checkpoint
    (see checkpoints.py): in the pool as long as it has room, and in up to `checkpoints` bytes
    besides it; 0: none. `recovery` is that of sessions that get no other.

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
        self._runner = ModelRunner(model, asked, verbose=verbose)
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
    def runner(self) -> ModelRunner:
        """Return the model, the context and the steps that the sessions share."""
        return self._runner

    @property
    def host(self) -> ModelRunner:
        """Return `runner` under the name that it had before version 0.2.0."""
        warn_of_name("Pool.host", "runner")
        return self._runner

    def session(
        self,
        *,
        weight: float = 1.0,
        recovery: Recovery | None = None,
        on_climb: Callable[[Climb], object] | None = None,
        tenant: Hashable = None,
    ) -> Session:
        """Make a session; close() gives its part of the budget to the others.

        `weight`: its part, relative to those of the others. `recovery` None: that of the pool.
        `on_climb`: see Session. `tenant`: whose texts it may go on from, such as a user's name: it
        finds the checkpoints of sessions of the same tenant alone.
        """
        recovery = recovery or self._runner.config.options.recovery
        return Session.of_pool(self, self._runner, recovery, on_climb, weight=weight, tenant=tenant)

    def sessions(self) -> list[Session]:
        """Return the sessions that are open, in the order in which they came."""
        there = (reference() for reference in self._runner.sessions.valuerefs())
        return [each for each in there if each is not None and not each.is_closed]

    def session_for(self, tokens: Sequence[int], tenant: Hashable = None) -> Session:
        """Make a session that goes on from what any other one of the tenant has read of a text.

        Its position says how many tokens need not be read: those of the nearest checkpoint.
        """
        session = self.session(tenant=tenant)
        session.return_to_checkpoint(tokens)
        return session

    def resize(self, kv_budget: Budget | str | float) -> None:
        """Change the budget of all: it grows at once, and shrinks by evicting.

        BudgetError where it would not hold those that are being read; idle ones are swapped out
        before.
        """
        self._runner.resize(Budget.parse(kv_budget))

    def stats(self) -> PoolStats:
        """Return counts and bytes of the moment."""
        runner, shared = self._runner, self._runner.shared
        core = shared.core
        if runner.closed or core is None:
            raise EntropyKVError("the pool is closed; make a new one")
        with runner.scheduler.between_steps():
            counters = [slot.store.counters() for slot in runner.slots]
            return PoolStats(
                kv_bytes_budget=core.budget_bytes,
                kv_bytes_now=core.used_bytes,
                kv_bytes_peak=core.peak_bytes,
                kv_bytes_staging=core.staging_bytes,
                kv_bytes_scratch=_sum(counters, "kv_bytes_scratch") + core.scratch_bytes,
                sessions=len(runner.slots),
                live=len(shared.live),
                swapped_out=shared.swap_space.count,
                swapped_bytes=shared.swap_space.bytes,
                waiting=runner.scheduler.n_waiting,
                entries_kept=_sum(counters, "entries_kept"),
                evictions=runner.evictions,
                checkpoints=len(runner.checkpoints),
                checkpoint_bytes=runner.checkpoints.bytes,
                text_bytes=sum(session.text_bytes for session in self.sessions()),
            )

    def close(self) -> None:
        """Free everything; the sessions cannot be used any more.

        It waits for the step that is being made. Threads that read, write or wait get an
        EntropyKVError that says that the pool is closed.
        """
        if not self._closed:
            self._closed = True
            self._runner.close()


def _sum(counters: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(each[name] for each in counters)


def __getattr__(name: str) -> Any:
    if name == "PoolSession":
        warn_of_name("PoolSession", "Session")
        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
