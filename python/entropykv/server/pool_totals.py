"""Add up what those who answer requests side by side have read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from entropykv.server.users import Caller
from entropykv.session.pool import Pool, PoolStats
from entropykv.session.stats import SessionStats


@dataclass
class Totals:
    """Count tokens and seconds of one that answers one request after the other."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, before: SessionStats, now: SessionStats) -> None:
        """Count what was done with a session meanwhile."""
        for name in vars(self):
            done = getattr(now, name) - getattr(before, name)
            setattr(self, name, getattr(self, name) + done)


@dataclass(frozen=True)
class Moment:
    """Hold the figures of a pool, and of those who are kept in it, between two steps."""

    pool: PoolStats | None
    """None where there is no pool."""
    conversations: list[tuple[Caller, SessionStats, bool]]
    """Of each that is kept: whose it is, its figures, and whether it holds entries of the pool."""


def figures_of_pool(pool: Pool, one: SessionStats, totals: Sequence[Totals]) -> SessionStats:
    """Return the figures of all conversations as if they were one; `one` are those of any."""
    now = pool.stats()
    return dataclasses.replace(
        one,
        kv_bytes_budget=now.kv_bytes_budget,
        kv_bytes_now=now.kv_bytes_now,
        kv_bytes_peak=now.kv_bytes_peak,
        kv_bytes_staging=now.kv_bytes_staging,
        kv_bytes_scratch=now.kv_bytes_scratch,
        entries_kept=now.entries_kept,
        evictions=now.evictions,
        **{name: sum(getattr(each, name) for each in totals) for name in vars(Totals())},
    )
