"""Define the routes of cache viewers: pictures of the cache as events, and the text that
it holds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from entropykv.server.dialects.fields import MOST_TOKENS as LAST_POSITION
from entropykv.server.dialects.fields import Name
from entropykv.server.engine.engine import Engine
from entropykv.server.http.errors import RequestError
from entropykv.server.http.users import user_of
from entropykv.server.models.registry import ModelRegistry
from entropykv.server.page.kv_pictures import CacheView, Picture, Window, about
from entropykv.server.page.kv_text import held_tokens

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
