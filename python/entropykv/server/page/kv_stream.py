"""Define the routes of cache viewers: pictures of the cache as events, and the text that
it holds.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import dataclasses
import json
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from entropykv.server.dialects.fields import MOST_TOKENS as LAST_POSITION
from entropykv.server.dialects.fields import Name
from entropykv.server.engine.engine import Engine
from entropykv.server.http.errors import RequestError
from entropykv.server.http.users import Caller, user_of
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.server.models.registry import ModelRegistry
from entropykv.session.session import Session
from entropykv.session.shared_pool import PoolStatus
from entropykv.session.stats import SessionStats
from entropykv.store.protocol import Shares

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
        """Read the figures of a session, between two steps; `name` is its id in routes."""
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
    """Three arrays (rows, columns) of the shares of a column's positions that are held, are frozen,
    and have returned since the last picture: see SessionCache.map().
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
        """Return the requested conversation, or None if it is gone; if none was requested, the last
        one shown, or else the one used last.
        """
        if self._wanted is not None:
            return next((each for each in found if each.id == self._wanted), None)
        if self._look is not None:
            for each in found:
                if sessions[each.id] is self._look[0]:
                    return each
        return min(found, key=lambda each: each.pool_status.idle_seconds, default=None)


@dataclasses.dataclass(frozen=True)
class HeldTokens:
    """Hold the tokens of a range of positions, and how many KV heads hold each of them."""

    session: Session
    position: int
    first: int
    tokens: list[int]
    heads: int
    held: list[int]
    frozen: list[int]
    swapped: bool
    """True if its conversation is swapped out, so that no KV head is counted."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the page; a character of several tokens is in the text of the last of
        them.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = (self.session.token_bytes(token, special=True) for token in self.tokens)
        return {
            "position": self.position,
            "first": self.first,
            "heads": self.heads,
            "texts": [decoder.decode(text) for text in texts],
            "held": self.held,
            "frozen": self.frozen,
            "swapped_out": self.swapped,
        }


def held_tokens(
    model: LoadedModel, user: str, name: str | None, first: int, count: int
) -> HeldTokens:
    """Return the tokens of a range of positions; raises RequestError for an unknown conversation.

    `name` is the conversation's id; None means the user's first one.
    """
    with between_steps(model):
        sessions = conversations(model, user)
        session = next(iter(sessions.values()), None) if name is None else sessions.get(name)
        if session is None:
            what = (
                "no conversation has read anything yet"
                if name is None
                else f"there is no conversation {name!r}: it has ended, or never was"
            )
            raise RequestError(404, f"{what}; /v1/kv/stream shows those that there are")
        return _held_tokens(session, first, count)


def _held_tokens(session: Session, first: int, count: int) -> HeldTokens:
    tokens = session.tokens[first : first + count]
    heads = sum(len(layer) for layer in session.cache.budgets())
    held, frozen, _ = session.cache.map()(first, 1, max(len(tokens), 1))
    scale = heads if len(held) == 1 else 1
    n_held, n_frozen = (
        (scale * np.count_nonzero(plane, axis=0))[: len(tokens)].tolist()
        for plane in (held, frozen)
    )
    swapped = session.cache.pool_status().is_swapped_out
    position = session.position
    return HeldTokens(session, position, first, tokens, heads, n_held, n_frozen, swapped)


INTERVAL = 0.25
"""The least seconds between two pictures."""
MOST_SHARE = 0.02
"""The largest share of the worker's time that a viewer may cost; slow pictures are sent
less often.
"""
MOST_VIEWERS = 16
MOST_SECONDS = 3600
"""After how many seconds a stream ends at the latest, so that no viewer keeps a place for ever."""
MOST_COLUMNS = 2048
MOST_TOKENS = 4096
_PING_INTERVAL = 15.0
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events, until `seconds` have passed or the model is unloaded.",
        "content": {"text/event-stream": {}},
    }
}


def kv_stream_routes(
    models: ModelRegistry, *, show_text: bool, most_seconds: int = MOST_SECONDS
) -> APIRouter:
    """Return the routes. Without viewers, they cost the worker threads no time.

    A user sees only conversations of the own key, and their texts only with `show_text`. Streams
    end after `most_seconds`, also if a request asks for more.
    """
    router = APIRouter(tags=["KV cache"])
    viewers = _Viewers()

    @router.get("/v1/kv/stream", response_class=StreamingResponse, responses=_EVENTS)
    async def stream(
        request: Request,
        columns: Annotated[int, Query(ge=1, le=MOST_COLUMNS)] = 512,
        first: Annotated[int, Query(ge=0, le=LAST_POSITION)] = 0,
        last: Annotated[int | None, Query(ge=1, le=LAST_POSITION)] = None,
        conversation: Name | None = None,
        model: Name | None = None,
        seconds: Annotated[
            int, Query(ge=1, le=MOST_SECONDS, description="How long to watch.")
        ] = MOST_SECONDS,
    ) -> StreamingResponse:
        """Send server-sent events: `model` once, then `kv` when something has changed.

        Every `kv` has the figures of all conversations of the same key, and the `map` of one
        conversation: the requested one, or the latest. Its `planes` have a byte for every KV head
        and column of positions, deflated and in base64: what is held, what is frozen, and what came
        back since the last event. A conversation that is swapped out has no map. The stream ends
        after `seconds`, or when the model is unloaded; watch again to see more.
        """
        engine = models.engine_of(model)
        view = CacheView(user_of(request.scope), Window(first, last, columns), conversation)
        viewers.enter()
        try:
            told = {**await engine.look(about), "text": show_text}
        except BaseException:
            viewers.leave()
            raise
        return _Watching(
            viewers, viewers.events(request, engine, told, view, min(seconds, most_seconds))
        )

    @router.get("/v1/kv/text")
    async def text(
        request: Request,
        conversation: Name | None = None,
        first: Annotated[int, Query(ge=0, le=LAST_POSITION)] = 0,
        count: Annotated[int, Query(ge=1, le=MOST_TOKENS)] = 1024,
        model: Name | None = None,
    ) -> dict[str, Any]:
        """Return tokens of a conversation, and how many KV heads hold or have frozen each of them.

        Only available if the server shows texts; `text` in the stream's first event says so.
        """
        if not show_text:
            raise RequestError(
                403, "this server does not show what texts say; start it with --show-text true"
            )
        look = partial(
            held_tokens, user=user_of(request.scope), name=conversation, first=first, count=count
        )
        return (await models.engine_of(model).look(look)).to_json()

    return router


class _Viewers:
    def __init__(self) -> None:
        self._count = 0

    def enter(self) -> None:
        """Count a viewer before the first await, so that the limit holds; raises RequestError
        (503).
        """
        if self._count >= MOST_VIEWERS:
            raise RequestError(503, f"{MOST_VIEWERS} watch already; close one of their pages")
        self._count += 1

    def leave(self) -> None:
        self._count -= 1

    async def events(
        self,
        request: Request,
        engine: Engine,
        model: dict[str, Any],
        view: CacheView,
        seconds: float,
    ) -> AsyncIterator[str]:
        """Yield events until `seconds` have passed, the viewer disconnects, or the server shuts
        down.
        """
        try:
            told = time.monotonic()
            end = told + seconds
            yield _event("model", model)
            while time.monotonic() < end and not await request.is_disconnected():
                picture = await engine.look(view.take)
                now = time.monotonic()
                if picture is not None:
                    yield _event("kv", await asyncio.to_thread(_json, engine, picture))
                    told = now
                elif now - told > _PING_INTERVAL:
                    yield ": ping\n\n"
                    told = now
                spent = 0.0 if picture is None else picture.seconds
                pause = max(INTERVAL, spent / MOST_SHARE)
                await asyncio.sleep(max(0.0, min(pause, end - time.monotonic())))
        except RequestError:  # The server shuts down, or the model is unloaded.
            return


class _Watching(StreamingResponse):
    """Send events to a viewer, and stop counting the viewer at the end, even if nothing
    was sent.
    """

    def __init__(self, viewers: _Viewers, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._viewers = viewers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._viewers.leave()


def _json(engine: Engine, picture: Picture) -> dict[str, Any]:
    return {**picture.to_json(), "requests": engine.waiting}


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
