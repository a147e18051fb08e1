"""Define the routes of cache viewers: pictures of the cache as events, and the text in it."""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import dataclasses
import json
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from entropykv.server.dialects.fields import MOST_TOKENS as LAST_POSITION
from entropykv.server.dialects.fields import Name
from entropykv.server.dialects.streaming import PING_INTERVAL, STREAM_HEADERS
from entropykv.server.engine.engine import Engine
from entropykv.server.http.access import Caller, user_of
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.server.models.registry import ModelRegistry, until_answered
from entropykv.session.session import Session
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


def figures_of(name: str, session: Session) -> dict[str, Any]:
    """Return the figures of a conversation between two steps, as JSON; `name` is its id in routes.

    The entries of a conversation that is swapped out are those that will return.
    """
    stats, status = session.stats(), session.cache.pool_status()
    is_out = status.is_swapped_out
    return {
        "id": name,
        "name": session.name,
        "document": session.is_document,
        "position": session.position,
        "state": status.state,
        "idle_seconds": round(status.idle_seconds, 1),
        "given_up": status.given_up,
        "swapped_out": is_out,
        "swapped_bytes": status.swapped_bytes,
        "entries": status.swapped_entries if is_out else stats.entries_kept,
        "entries_full": stats.entries_full,
        "frozen_entries": stats.frozen_entries,
        "budget": 0 if is_out else stats.kv_bytes_budget,
        "bytes": status.pages_bytes if is_out else stats.kv_bytes_now,
        "bytes_full": stats.kv_bytes_full,
        "frozen_bytes": stats.frozen_bytes,
        **{counter: getattr(stats, counter) for counter in _COUNTERS},
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
    """Return what does not change while a model is loaded: settings, and the KV heads of each
    layer.
    """
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
        columns for a text of `position` tokens.
        """
        last = position if self.last is None else min(self.last, position)
        first = min(self.first, last)
        per_column = 1
        while per_column * self.columns < last - first:
            per_column *= 2
        return first, per_column, max(1, -(-(last - first) // per_column))


@dataclasses.dataclass(frozen=True)
class Picture:
    """Hold everything that is shown at one moment."""

    told: dict[str, Any]
    """The figures of the pool and of the conversations, as JSON, and where the map begins."""
    planes: Sequence[Shares]
    """Three arrays (rows, columns) of the shares of a column's positions that are held, are frozen,
    and have returned since the last picture: see SessionCache.map(). Empty if the selected
    conversation is swapped out, or if there is none.
    """
    seconds: float
    """The CPU seconds that it took to take the picture."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the page, in which the planes are concatenated, deflated and
        base64-encoded.
        """
        told = {"time": time.time(), **self.told}
        if self.planes:
            packed = zlib.compress(b"".join(plane.tobytes() for plane in self.planes), 1)
            rows, columns = self.planes[0].shape
            packed_map = {"rows": rows, "columns": columns}
            planes = base64.b64encode(packed).decode("ascii")
            told["map"] = {**told["map"], **packed_map, "planes": planes}
        return told


class CacheView:
    """Take pictures for one viewer; they show no conversations of other users."""

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
        """Return a picture, or None if no conversation of the user has changed since the last one;
        without any conversation, None if the pool has not.
        """
        start = time.thread_time()
        with between_steps(model):
            sessions = conversations(model, self._user)
            found = [figures_of(name, session) for name, session in sessions.items()]
            pool = pool_figures(model, self._user)
            seen = [{**each, "idle_seconds": 0.0} for each in found], None if found else pool
            if seen == self._seen:
                return None
            self._seen = seen
            place, planes = self._map(sessions)
        told = {"pool": pool, "conversations": found, "map": place}
        return Picture(told, planes, time.thread_time() - start)

    def _map(self, sessions: dict[str, Session]) -> tuple[dict[str, Any] | None, Sequence[Shares]]:
        """Return where the map of the chosen conversation begins, and its planes."""
        name = self._chosen(sessions)
        if name is None or sessions[name].cache.pool_status().is_swapped_out:
            return None, ()
        session = sessions[name]
        first, per_column, n_columns = self._window.fit(session.position)
        if self._look is None or self._look[0] is not session:
            self._look = session, session.cache.map()
        place = {"id": name, "first": first, "per_column": per_column}
        return place, self._look[1](first, per_column, n_columns)

    def _chosen(self, sessions: dict[str, Session]) -> str | None:
        """Return the requested conversation, or None if it is gone; if none was requested, the last
        one shown, or else the one used last.
        """
        if self._wanted is not None:
            return self._wanted if self._wanted in sessions else None
        if self._look is not None:
            for name, session in sessions.items():
                if session is self._look[0]:
                    return name

        def idle_seconds(name: str) -> float:
            return sessions[name].cache.pool_status().idle_seconds

        return min(sessions, key=idle_seconds, default=None)


def held_tokens(
    model: LoadedModel, user: str, name: str | None, first: int, count: int
) -> dict[str, Any]:
    """Return the tokens of a range of positions as JSON, and how many KV heads hold, or have
    frozen, each of them; raises RequestError for an unknown conversation.

    `name` is the conversation's id; None means the user's first one. A character of several tokens
    is in the text of the last of them. If the conversation is swapped out, no KV head is counted.
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
        tokens = session.tokens[first : first + count]
        heads = sum(len(layer) for layer in session.cache.budgets())
        held, frozen, _ = session.cache.map()(first, 1, max(len(tokens), 1))
        swapped_out = session.cache.pool_status().is_swapped_out
        position = session.position
    scale = heads if len(held) == 1 else 1
    n_held, n_frozen = (
        (scale * np.count_nonzero(plane, axis=0))[: len(tokens)].tolist()
        for plane in (held, frozen)
    )
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(session.token_bytes(token, special=True)) for token in tokens]
    return {
        "position": position,
        "first": first,
        "heads": heads,
        "texts": texts,
        "held": n_held,
        "frozen": n_frozen,
        "swapped_out": swapped_out,
    }


INTERVAL = 0.25
"""The least seconds between two pictures."""
MOST_SHARE = 0.02
"""The largest fraction of time that may be spent on pictures for one viewer; slow ones are sent
less often.
"""
MOST_VIEWERS = 16
MOST_SECONDS = 3600
"""After how many seconds a stream ends at the latest, so that no viewer keeps a place for ever."""
MOST_COLUMNS = 2048
MOST_TOKENS = 4096
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events, until `seconds` have passed or the model is unloaded.",
        "content": {"text/event-stream": {}},
    }
}


def kv_stream_routes(
    models: ModelRegistry, *, show_text: bool, most_seconds: int = MOST_SECONDS
) -> APIRouter:
    """Return the routes of viewers; they cost no time while nobody watches.

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
        until_answered(request).enter_context(viewers.watching())
        told = {**await engine.look(about), "text": show_text}
        events = _events(request, engine, told, view, min(seconds, most_seconds))
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)

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
        return await models.engine_of(model).look(look)

    return router


class _Viewers:
    def __init__(self) -> None:
        self._count = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count a viewer in the `with` block; raises RequestError (503) for too many."""
        if self._count >= MOST_VIEWERS:
            raise RequestError(503, f"{MOST_VIEWERS} watch already; close one of their pages")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


async def _events(
    request: Request, engine: Engine, model: dict[str, Any], view: CacheView, seconds: float
) -> AsyncIterator[str]:
    """Yield events until `seconds` have passed, the viewer disconnects, or the model is freed."""
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
            elif now - told > PING_INTERVAL:
                yield ": ping\n\n"
                told = now
            spent = 0.0 if picture is None else picture.seconds
            pause = max(INTERVAL, spent / MOST_SHARE)
            await asyncio.sleep(max(0.0, min(pause, end - time.monotonic())))
    except RequestError:  # The server shuts down, or the model is unloaded.
        return


def _json(engine: Engine, picture: Picture) -> dict[str, Any]:
    return {**picture.to_json(), "requests": engine.waiting}


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
