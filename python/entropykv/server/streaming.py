"""Answer with a generation, whole or as server-sent events, as long as the client is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from entropykv.server.engine import Engine
from entropykv.server.errors import RequestError
from entropykv.server.loading import ServedLlama
from entropykv.server.request_log import note_tokens

_PATIENCE = 5.0
"""Seconds that a stream may take to say 200 or an error: long enough to see a bad request."""
_PING_INTERVAL = 15.0
_END = object()
_CLIENT_GONE = 499


async def whole(
    request: Request,
    engine: Engine,
    call: Callable[[ServedLlama], Any],
    conversation: str | None = None,
) -> Response:
    """Return the response of a call, which stops where the client goes."""
    note = note_tokens(request.scope)
    done, answer = await _unless_gone(
        request.receive, engine.generate(call, note=note, conversation=conversation)
    )
    return JSONResponse(answer) if done else Response(status_code=_CLIENT_GONE)


async def stream(
    request: Request,
    engine: Engine,
    call: Callable[[ServedLlama], Any],
    conversation: str | None = None,
    *,
    ping: bool,
) -> Response:
    """Return the chunks of a call as events; raises RequestError if it fails before the first."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[Any] = asyncio.Queue()

    def emit(chunk: Any) -> None:
        loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    note = note_tokens(request.scope)
    work = asyncio.ensure_future(engine.generate(call, emit, note, conversation))

    def ended(task: asyncio.Task[Any]) -> None:
        chunks.put_nowait(_END)
        # Otherwise asyncio logs it where the client is gone.
        _ = task.cancelled() or task.exception()

    work.add_done_callback(ended)
    events = _Events(chunks, work, ping=ping)
    try:
        there, _ = await _unless_gone(request.receive, events.wait_for_first())
    except BaseException:
        work.cancel()
        raise
    if not there:
        work.cancel()
        return Response(status_code=_CLIENT_GONE)
    return events


class _Events(Response):
    media_type = "text/event-stream"

    def __init__(self, chunks: asyncio.Queue[Any], work: asyncio.Task[Any], *, ping: bool) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._work = work
        self._ping_interval = _PING_INTERVAL if ping else None
        self._first: Any = None

    async def wait_for_first(self) -> None:
        """Wait until there is a chunk, or it takes long; raises what the work raises before."""
        self._first = await self._next(_PATIENCE)
        if self._first is _END:
            self._work.result()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await _unless_gone(receive, self._write(send))
        finally:
            self._work.cancel()

    async def _write(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        item = self._first
        while item is not _END:
            await self._send(send, ": ping\n\n" if item is None else _event(item))
            item = await self._next(self._ping_interval)
        await self._send(send, f"data: {self._last()}\n\n", more=False)

    def _last(self) -> str:
        error = self._work.exception()
        return json.dumps(error.body) if isinstance(error, RequestError) else "[DONE]"

    @staticmethod
    async def _send(send: Send, text: str, *, more: bool = True) -> None:
        body = text.encode("utf-8")
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _next(self, seconds: float | None) -> Any:
        """Return the next chunk or the end; None where there is none for so many seconds."""
        # Not wait_for(): before Python 3.12 a chunk that comes with a cancellation is lost.
        chunk = asyncio.ensure_future(self._chunks.get())
        try:
            done, _ = await asyncio.wait({chunk}, timeout=seconds)
            return chunk.result() if done else None
        finally:
            chunk.cancel()


def _event(item: Any) -> str:
    """Return an item as a server-sent event; those of the Responses API have a name."""
    name = f"event: {item['type']}\n" if "type" in item else ""
    return f"{name}data: {json.dumps(item)}\n\n"


async def _unless_gone(receive: Receive, coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Return whether the client stayed until the coroutine was done, and what that returned."""
    work = asyncio.ensure_future(coroutine)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return (True, work.result()) if work.done() else (False, None)
    finally:
        gone.cancel()
        work.cancel()
        await asyncio.gather(gone, work, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
