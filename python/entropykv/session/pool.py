"""Hold many conversations with one model, in one hard budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import Unpack

from entropykv.errors import EntropyKVError
from entropykv.llamacpp.model import Model
from entropykv.session.draft_model import open_draft_model
from entropykv.session.model_runner import ModelRunner
from entropykv.session.recovery import Climb
from entropykv.session.session import Session
from entropykv.settings.cache_options import CacheOptions, PoolArguments, shows
from entropykv.settings.freezing import Recovery
from entropykv.settings.options import Budget


@dataclass(frozen=True)
class PoolStats:
    """Hold the figures of a pool at one moment."""

    kv_bytes_budget: int
    """The bytes that all conversations together can never exceed."""
    kv_bytes_now: int
    """The bytes in use now."""
    kv_bytes_peak: int
    """The most bytes that were in use."""
    kv_bytes_staging: int
    """Bytes outside the budget: headwise, one micro-batch of one layer; device, the rows of one
    micro-batch in all layers, and padding.
    """
    kv_bytes_scratch: int
    """Bytes outside the budget and staging: working memory of attention, and copies of importance
    that session/passages.py holds.
    """
    sessions: int
    """How many sessions are open."""
    live: int
    """How many sessions have a share of the pool."""
    swapped_out: int
    """How many sessions are swapped out."""
    swapped_bytes: int
    """The bytes that sessions which are swapped out take outside the pool."""
    waiting: int
    """How many sessions have tokens that wait to be read."""
    entries_kept: int
    """How many entries all live sessions hold in all KV heads."""
    evictions: int
    """How many entries were evicted so far, including closed sessions."""
    checkpoints: int
    """How many checkpoints of all sessions are kept."""
    checkpoint_bytes: int
    """The bytes that checkpoints take outside the pool."""
    text_bytes: int
    """The bytes of the tokens and logits of all sessions, swapped out or not."""


class Pool:
    """Hold one model, and one budget of bytes for all sessions that session() makes.

    Each session has the interface of Session, and may be used by its own thread: the tokens of all
    waiting sessions are read together. The pool lives until its last session ends, or until it is
    closed. `options`, or keyword arguments of the same names: see CacheOptions.

    `n_sequences`: how many conversations hold entries at a time (4 by default). There may be more
    sessions; idle ones are swapped out to `swap` (`ram` or `disk:DIR`), at most `swap_limit` bytes,
    and nothing needs to be read again. Live sessions share the budget: `kv_budget` is for all
    together (a fraction refers to n_sequences contexts), and shares are equal except for weights. A
    session gets a share when it first reads: idle sessions are swapped out until the budget holds
    the whole texts of all that are live. If it still does not, it is divided again, and sessions
    whose shares shrink lose their least important entries. A session that ends or is swapped out
    leaves its share to the others. On a device, each of n_sequences sessions has an equal part. At
    the end of every prompt and answer, a session keeps a checkpoint (see kept_texts.py): in free
    pages of the pool, and in up to `checkpoints` bytes outside; 0: none. `recovery` is the default
    of its sessions.

    Raises the errors of Session, and UnsupportedModelError if only the flat store can serve the
    model, because it holds a single conversation.
    """

    _closed = True
    """True until __init__ has made everything, so that close() works even if __init__ raises."""

    @shows(PoolArguments)
    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        options: CacheOptions | None = None,
        *,
        verbose: bool = False,
        **arguments: Unpack[PoolArguments],
    ) -> None:
        """Load the model; up to `n_ubatch` tokens of a prompt are read between two tokens of other
        sessions.
        """
        self._begin(model, CacheOptions.of(options, arguments).pooled(), verbose=verbose)

    @classmethod
    def of_one(
        cls, model: str | os.PathLike[str] | Model, options: CacheOptions, *, verbose: bool = False
    ) -> Pool:
        """Make a pool of one conversation, which gets the whole budget, like a session without a
        pool.

        Any store can serve it. There is one session at a time, which is neither swapped out nor
        forked: session() raises PoolError until the one before is closed.
        """
        self = cls.__new__(cls)
        self._begin(model, options.alone(), verbose=verbose)
        return self

    def _begin(
        self, model: str | os.PathLike[str] | Model, options: CacheOptions, *, verbose: bool
    ) -> None:
        self._runner = ModelRunner(model, options, verbose=verbose)
        try:
            if self._runner.config.spec_type == "draft":
                open_draft_model(self._runner)
        except BaseException:
            self._runner.close()
            raise
        self._closed = False

    def __enter__(self) -> Pool:
        """Return the pool itself; leaving the `with` block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def __del__(self) -> None:
        """Free the pool if it was not closed."""
        self.close()

    @property
    def runner(self) -> ModelRunner:
        """Return the model runner, which all sessions share."""
        return self._runner

    @property
    def holds_one(self) -> bool:
        """Tell whether of_one() made the pool, so that its only conversation keeps its place."""
        return self._runner.shared.is_private

    def session(
        self,
        *,
        weight: float = 1.0,
        recovery: Recovery | None = None,
        on_climb: Callable[[Climb], object] | None = None,
        tenant: Hashable = None,
    ) -> Session:
        """Make a session; its close() leaves its share of the budget to the others.

        `weight`: the weight of its share, relative to the others, from 0.001 to 1000. `recovery`
        None: that of the pool. `on_climb`: see Session. `tenant`: whose texts it may continue from,
        for example the name of a user: the session finds only checkpoints of sessions of the same
        tenant. Raises SettingsError for another weight, EntropyKVError for a closed pool,
        PoolError if of_one() made the pool and its session is open, and BudgetError without memory.
        """
        recovery = recovery or self._runner.config.options.recovery
        return Session.of_pool(self, self._runner, recovery, on_climb, weight=weight, tenant=tenant)

    def sessions(self) -> list[Session]:
        """Return the open sessions, in the order in which they were made."""
        there = (reference() for reference in self._runner.sessions.valuerefs())
        return [each for each in there if each is not None and not each.is_closed]

    def session_for(self, tokens: Sequence[int], tenant: Hashable = None) -> Session:
        """Make a session that continues from what another session of the tenant has read of
        `tokens`.

        Its `position` says how many of the tokens need not be read: those of the nearest
        checkpoint, or 0. Raises what session() raises.
        """
        session = self.session(tenant=tenant)
        session.text.return_to_checkpoint(tokens)
        return session

    def resize(self, kv_budget: Budget | str | float) -> None:
        """Change the budget of the pool: a larger one takes effect at once, a smaller one evicts.

        Idle sessions are swapped out first if necessary. Raises BudgetError if the sessions that
        are being read would not fit.
        """
        self._runner.resize(Budget.parse(kv_budget))

    def stats(self) -> PoolStats:
        """Return current counts and bytes, between two steps; raises EntropyKVError for a closed
        pool.
        """
        runner, shared, kept = self._runner, self._runner.shared, self._runner.kept_texts
        if runner.closed:
            raise EntropyKVError("the pool is closed; make a new one")
        with runner.scheduler.between_steps():
            counters = [store.counters() for store in runner.stores]
            core = shared.core or _Bytes.of(counters[0])
            return PoolStats(
                kv_bytes_budget=core.budget_bytes,
                kv_bytes_now=core.used_bytes,
                kv_bytes_peak=core.peak_bytes,
                kv_bytes_staging=core.staging_bytes,
                kv_bytes_scratch=_sum(counters, "kv_bytes_scratch")
                + core.scratch_bytes
                + sum(session.snapshot_bytes for session in self.sessions()),
                sessions=len(runner.slots),
                live=len(shared.live),
                swapped_out=len(kept.swapped_out),
                swapped_bytes=kept.swapped_bytes,
                waiting=runner.scheduler.n_waiting,
                entries_kept=_sum(counters, "entries_kept"),
                evictions=runner.evictions,
                checkpoints=len(kept.checkpoints),
                checkpoint_bytes=kept.checkpoint_bytes,
                text_bytes=sum(session.reader.n_bytes for session in self.sessions()),
            )

    def close(self) -> None:
        """Free everything; the sessions cannot be used any more.

        It waits for the running step. Threads that read, write or wait get an EntropyKVError that
        says that the pool is closed.
        """
        if not self._closed:
            self._closed = True
            self._runner.close()


@dataclass(frozen=True)
class _Bytes:
    """Hold the bytes of the only store of a pool that of_one() made."""

    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    staging_bytes: int
    scratch_bytes: int = 0
    """Always 0: the counters of the store have its working memory."""

    @classmethod
    def of(cls, counters: Mapping[str, Any]) -> _Bytes:
        names = ("kv_bytes_budget", "kv_bytes_now", "kv_bytes_peak", "kv_bytes_staging")
        return cls(*(counters[name] for name in names))


def _sum(counters: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(each[name] for each in counters)
