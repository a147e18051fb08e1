"""Find the conversations of a server's pool that hold entries of the KV cache."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from entropykv.server.http.users import Caller
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.session.session import Session
from entropykv.session.shared_pool import PoolStatus
from entropykv.session.stats import SessionStats

_COUNTERS = (
    "prompt_tokens",
    "generated_tokens",
    "drafted_tokens",
    "accepted_drafts",
    "draft_steps",
    "prompt_seconds",
    "decode_seconds",
    "evictions",
    "entries_frozen",
    "entries_restored",
    "entries_recalled",
)


def between_steps(model: LoadedModel) -> contextlib.AbstractContextManager[None]:
    """Prevent all sequences from reading in the `with` block."""
    return model.pool.runner.scheduler.between_steps()


def conversations(model: LoadedModel, user: str) -> dict[str, Session]:
    """Return a user's sessions that have read something, by their id in routes."""
    return {
        f"{each.number}": each
        for each in model.pool.sessions()
        if each.position > 0 and isinstance(each.tenant, Caller) and each.tenant.user == user
    }


@dataclasses.dataclass(frozen=True)
class Holder:
    """Hold the figures of a conversation at one moment."""

    id: str
    name: str | None
    """The name that the client has given to the conversation, or that of the document."""
    is_document: bool
    position: int
    pool_status: PoolStatus
    """The status of the conversation among the other sessions of the pool."""
    stats: SessionStats

    @classmethod
    def of(cls, name: str, session: Session) -> Holder:
        """Read the figures of a session, between two steps."""
        status, kind = session.cache.pool_status(), session.is_document
        return cls(name, session.name, kind, session.position, status, session.stats())

    @property
    def is_swapped_out(self) -> bool:
        """Tell whether it is swapped out, so that nothing can be shown before its next turn."""
        return self.pool_status.is_swapped_out

    def key(self) -> tuple[Any, ...]:
        """Return a key that differs if anything has changed that a viewer sees."""
        told = dataclasses.replace(self.pool_status, idle_seconds=0.0)
        stats = self.stats
        counts = tuple(getattr(stats, name) for name in _COUNTERS)
        return self.id, self.position, told, stats.kv_bytes_budget, stats.entries_kept, counts

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the page; for a swapped out conversation, entries are those that will
        return.
        """
        stats, pool_status = self.stats, self.pool_status
        return {
            "id": self.id,
            "name": self.name,
            "document": self.is_document,
            "position": self.position,
            "state": pool_status.state,
            "idle_seconds": round(pool_status.idle_seconds, 1),
            "given_up": pool_status.given_up,
            "swapped_out": self.is_swapped_out,
            "swapped_bytes": pool_status.swapped_bytes,
            "entries": pool_status.swapped_entries if self.is_swapped_out else stats.entries_kept,
            "entries_full": stats.entries_full,
            "frozen_entries": stats.frozen_entries,
            "budget": 0 if self.is_swapped_out else stats.kv_bytes_budget,
            "bytes": pool_status.pages_bytes if self.is_swapped_out else stats.kv_bytes_now,
            "bytes_full": stats.kv_bytes_full,
            "frozen_bytes": stats.frozen_bytes,
            **{name: getattr(stats, name) for name in _COUNTERS},
        }


def pool_figures(model: LoadedModel, user: str) -> dict[str, Any]:
    """Return the figures that all users share, as JSON: sums without names.

    `others` says whether texts of another key than the `user`'s are in the pool.
    """
    now = model.pool.stats()
    return {
        "budget": now.kv_bytes_budget,
        "used": now.kv_bytes_now,
        "peak": now.kv_bytes_peak,
        "sequences": model.pool.runner.n_sequences,
        "others": any(
            each.position > 0 and isinstance(each.tenant, Caller) and each.tenant.user != user
            for each in model.pool.sessions()
        ),
        "swapped_bytes": now.swapped_bytes,
    }
