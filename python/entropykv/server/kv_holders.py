"""Find who holds entries of the KV cache: the one conversation of a server, or all of its pool."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from entropykv.server.loading import ServedLlama
from entropykv.server.users import Caller
from entropykv.session.pool_session import PoolSession, Standing
from entropykv.session.session import Session
from entropykv.session.stats import SessionStats

_ALONE = "0"
_COUNTERS = (
    "prompt_tokens",
    "generated_tokens",
    "prompt_seconds",
    "decode_seconds",
    "evictions",
    "entries_frozen",
    "entries_restored",
    "entries_recalled",
)


@contextlib.contextmanager
def between_steps(llama: ServedLlama) -> Iterator[None]:
    """Keep every sequence from reading meanwhile; one that is alone reads in the calling thread."""
    if llama.pool is None:
        yield
        return
    with llama.pool.host.scheduler.between_steps():
        yield


def conversations(llama: ServedLlama, user: str) -> dict[str, Session]:
    """Return a user's sessions that have read something, by the id that routes know them by.

    Without a pool there is one, which is there even before anybody's text was read.
    """
    if llama.pool is None:
        is_seen = llama.tenant is None or llama.tenant.user == user
        return {_ALONE: llama._session} if is_seen else {}
    return {
        f"{each.number}": each
        for each in llama.pool.sessions()
        if each.position > 0 and isinstance(each.tenant, Caller) and each.tenant.user == user
    }


@dataclasses.dataclass(frozen=True)
class Holder:
    """Hold a conversation's figures at one moment."""

    id: str
    name: str | None
    """What its client calls it."""
    position: int
    standing: Standing | None
    """How it stands among the others of a pool; None: it is alone."""
    stats: SessionStats

    @classmethod
    def of(cls, name: str, session: Session) -> Holder:
        """Look at a session, between two steps."""
        client, standing = None, None
        if isinstance(session, PoolSession):
            client, standing = session.name, session.standing()
        return cls(name, client, session.position, standing, session.stats())

    @property
    def is_parked(self) -> bool:
        """Tell whether it holds nothing that can be looked at until its next turn."""
        return self.standing is not None and self.standing.is_parked

    def key(self) -> tuple[Any, ...]:
        """Return what differs where something has changed that a viewer sees."""
        told = self.standing and dataclasses.replace(self.standing, idle_seconds=0.0)
        stats = self.stats
        counts = tuple(getattr(stats, name) for name in _COUNTERS)
        return self.id, self.position, told, stats.kv_bytes_budget, stats.entries_kept, counts

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the page; entries of one that is parked are those that come back."""
        stats, standing = self.stats, self.standing
        return {
            "id": self.id,
            "name": self.name,
            "position": self.position,
            "state": standing.state if standing else "active",
            "idle_seconds": round(standing.idle_seconds, 1) if standing else 0.0,
            "given_up": standing.given_up if standing else 0,
            "parked": self.is_parked,
            "parked_bytes": standing.parked_bytes if standing else 0,
            "entries": standing.parked_entries
            if standing and standing.is_parked
            else stats.entries_kept,
            "entries_full": stats.entries_full,
            "frozen_entries": stats.frozen_entries,
            "budget": 0 if self.is_parked else stats.kv_bytes_budget,
            "bytes": standing.pages_bytes
            if standing and standing.is_parked
            else stats.kv_bytes_now,
            "bytes_full": stats.kv_bytes_full,
            "frozen_bytes": stats.frozen_bytes,
            **{name: getattr(stats, name) for name in _COUNTERS},
        }


def pool_figures(llama: ServedLlama) -> dict[str, Any]:
    """Return what the conversations of all users share, as JSON: sums that name nobody."""
    if llama.pool is None:
        stats = llama._session.stats()
        return {
            "budget": stats.kv_bytes_budget,
            "used": stats.kv_bytes_now,
            "peak": stats.kv_bytes_peak,
            "sequences": 1,
            "parked_bytes": 0,
        }
    now = llama.pool.stats()
    return {
        "budget": now.kv_bytes_budget,
        "used": now.kv_bytes_now,
        "peak": now.kv_bytes_peak,
        "sequences": llama.pool.host.n_sequences,
        "parked_bytes": now.parked_bytes,
    }
