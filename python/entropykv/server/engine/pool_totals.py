"""Add up the figures of the workers that answer requests at the same time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from entropykv.server.http.users import Caller
from entropykv.session.pool import Pool, PoolStats
from entropykv.session.stats import SessionStats


@dataclass
class Totals:
    """Count tokens and seconds of one slot."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    draft_steps: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    climbs: Counter[str] = field(default_factory=Counter)
    """How often each rung of the recovery ladder was climbed."""

    def counts(self) -> tuple[int, int]:
        """Return how many tokens were read and written so far."""
        return self.prompt_tokens, self.generated_tokens

    def add(self, before: SessionStats, now: SessionStats) -> None:
        """Add the difference between the figures before and after a request."""
        for name in _SUMS:
            done = getattr(now, name) - getattr(before, name)
            setattr(self, name, getattr(self, name) + done)
        self.climbs += Counter(now.climbs) - Counter(before.climbs)


_SUMS = [each.name for each in dataclasses.fields(Totals) if each.name != "climbs"]


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
        **{name: sum(getattr(each, name) for each in totals) for name in _SUMS},
    )
