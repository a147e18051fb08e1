"""Take the figures of a pool: those of its bytes, and those of all workers together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from entropykv.server.engine.answering import COUNTS, Totals
from entropykv.server.http.users import Caller
from entropykv.session.pool import Pool, PoolStats
from entropykv.session.stats import SessionStats


@dataclass(frozen=True)
class Moment:
    """Hold the figures of a pool and of its conversations, taken between two steps."""

    pool: PoolStats
    conversations: list[tuple[Caller, SessionStats, bool]]
    """For each kept conversation: its caller, its figures, and whether it holds entries of the
    pool.
    """


def figures_of_pool(pool: Pool, one: SessionStats, totals: Sequence[Totals]) -> SessionStats:
    """Return the sum over all conversations as SessionStats; `one` are the figures of any
    session. A full cache is that of the conversations that hold entries now.
    """
    with pool.runner.scheduler.between_steps():
        now, counters = pool.stats(), pool.runner.counters()
        n_tokens = sum(each.position for each in pool.sessions() if each.cache.is_live)
    return dataclasses.replace(
        one,
        kv_bytes_full=n_tokens * pool.runner.bytes_full_per_token,
        entries_full=n_tokens * pool.runner.n_kv_heads,
        kv_bytes_budget=now.kv_bytes_budget,
        kv_bytes_now=now.kv_bytes_now,
        kv_bytes_peak=now.kv_bytes_peak,
        kv_bytes_staging=now.kv_bytes_staging,
        kv_bytes_scratch=now.kv_bytes_scratch,
        entries_kept=now.entries_kept,
        evictions=now.evictions,
        **counters,
        climbs=dict(sum((each.climbs for each in totals), Counter())),
        **{name: sum(getattr(each, name) for each in totals) for name in COUNTS},
    )
