"""Make pictures of the KV cache: which positions of a text every KV head holds."""

from __future__ import annotations

import base64
import dataclasses
import time
import zlib
from collections.abc import Sequence
from typing import Any

from entropykv.server.engine.kv_holders import (
    Holder,
    between_steps,
    conversations,
    pool_figures,
)
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.session.session import Session
from entropykv.store.protocol import Shares


def about(model: LoadedModel) -> dict[str, Any]:
    """Return what does not change: the model, and the number of KV heads of each layer."""
    stats = model.stats()
    return {
        "model": model.name,
        "store": stats.store,
        "policy": stats.policy,
        "kv_type": stats.kv_type,
        "kv_budget": stats.kv_budget,
        "freeze": stats.freeze is not None,
        "n_ctx": stats.n_ctx,
        "layers": [len(heads) for heads in model.idle.cache.budgets()],
        "shared": not model.pool.holds_one,
    }


@dataclasses.dataclass(frozen=True)
class Window:
    """Hold which positions a viewer wants to see, and the most columns of the picture."""

    first: int = 0
    last: int | None = None
    """The end of the positions, exclusive; None: the end of the text."""
    columns: int = 512

    def fit(self, position: int) -> tuple[int, int, int]:
        """Return the first position, the positions per column (a power of two) and the number of
        columns.
        """
        last = position if self.last is None else min(self.last, position)
        first = min(self.first, last)
        per_column = 1
        while per_column * self.columns < last - first:
            per_column *= 2
        return first, per_column, max(1, -(-(last - first) // per_column))


@dataclasses.dataclass(frozen=True)
class Map:
    """Hold which positions the KV heads of one conversation hold."""

    id: str
    first: int
    per_column: int
    planes: Sequence[Shares]
    """The shares that are held, are frozen, and returned since the last picture: (rows,
    columns).
    """

    def to_json(self) -> dict[str, Any]:
        """Return JSON, in which the planes are concatenated, deflated and base64-encoded."""
        packed = zlib.compress(b"".join(plane.tobytes() for plane in self.planes), 1)
        rows, columns = self.planes[0].shape
        return {
            "id": self.id,
            "first": self.first,
            "per_column": self.per_column,
            "rows": rows,
            "columns": columns,
            "planes": base64.b64encode(packed).decode("ascii"),
        }


@dataclasses.dataclass(frozen=True)
class Picture:
    """Hold everything that is shown at one moment."""

    pool: dict[str, Any]
    conversations: Sequence[Holder]
    map: Map | None
    """The map of the selected conversation; None if it is swapped out, or if there is none."""
    seconds: float
    """CPU seconds that the worker thread spent on it."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the page."""
        return {
            "time": time.time(),
            "pool": self.pool,
            "conversations": [each.to_json() for each in self.conversations],
            "map": None if self.map is None else self.map.to_json(),
        }


class CacheView:
    """Take pictures for one viewer; nothing is sent twice, and nothing of other users."""

    def __init__(self, user: str, window: Window, conversation: str | None = None) -> None:
        """Show the `window` of a user's conversation, or of the latest one for None.

        A picture also has the figures of the user's other conversations.
        """
        self._user = user
        self._window = window
        self._wanted = conversation
        self._look: tuple[Session, Any] | None = None
        self._seen: object = None

    def take(self, model: LoadedModel) -> Picture | None:
        """Return a picture, or None if nothing has changed since the last one."""
        start = time.thread_time()
        with between_steps(model):
            sessions = conversations(model, self._user)
            found = [Holder.of(name, session) for name, session in sessions.items()]
            pool = pool_figures(model, self._user)
            seen = [each.key() for each in found], None if found else pool
            if seen == self._seen:
                return None
            self._seen = seen
            held = self._map(sessions, found)
        return Picture(pool, found, held, time.thread_time() - start)

    def _map(self, sessions: dict[str, Session], found: Sequence[Holder]) -> Map | None:
        shown = self._chosen(sessions, found)
        if shown is None or shown.is_swapped_out:
            return None
        session = sessions[shown.id]
        first, per_column, n_columns = self._window.fit(shown.position)
        if self._look is None or self._look[0] is not session:
            self._look = session, session.cache.map()
        return Map(shown.id, first, per_column, self._look[1](first, per_column, n_columns))

    def _chosen(self, sessions: dict[str, Session], found: Sequence[Holder]) -> Holder | None:
        """Return the requested conversation, or else the last one shown, or else one that is
        running.
        """
        if self._wanted is not None:
            return next((each for each in found if each.id == self._wanted), None)
        if self._look is not None:
            for each in found:
                if sessions[each.id] is self._look[0]:
                    return each
        return min(found, key=lambda each: each.pool_status.idle_seconds, default=None)
