"""Receive requests in front of replicas under Ray Serve, and pass each to one of them.

Ray Serve's own proxy sees no bodies. The front receives the whole body, within the server's limits,
so that the router can tell requests with the same document or the same beginning (affinity.py). It
has no model and checks no key: the replica's app does all the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from entropykv.server.engine.admission import Admission, Limits, unless_gone
from entropykv.server.http.access import session_in
from entropykv.server.http.bodies import Bodies
from entropykv.server.http.errors import RequestError
from entropykv.server.replicas.affinity import affinity_of

_PASSED = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string",
           "root_path", "headers", "client", "server")  # fmt: skip
"""The parts of an ASGI scope that a replica gets."""
MOST_TRIES = 3
"""How many replicas a request is sent to if they die before they answer."""

Answer = Callable[..., Any]
"""Sends (scope, body, affinity) to a replica; returns an async iterator of ASGI messages, which has
`cancel()`.
"""


class Front:
    """Pass requests to replicas (ASGI app)."""

    def __init__(self, answer: Answer, died: type[Exception]) -> None:
        """Pass requests to replicas by `answer`; `died`: what its iterator raises if a replica has
        died.
        """
        self._answer = answer
        self._died = died

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive a request with its body, and pass it to a replica."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            body = await _body_of(scope, receive)
            await unless_gone(receive, self._pass(scope, body, send))

    async def _pass(self, scope: Scope, body: bytes, send: Send) -> None:
        passed = {name: scope[name] for name in _PASSED if name in scope}
        headers = dict(scope["headers"])
        user = headers.get(b"authorization", b"").decode("latin-1")
        kind = headers.get(b"content-type", b"").decode("latin-1")
        affinity = affinity_of(session_in(scope["headers"]), user, body, scope["path"], kind)
        begun = False
        for _ in range(MOST_TRIES):
            messages = self._answer(passed, body, affinity)
            try:
                async for message in messages:
                    begun = True
                    await send(message)
                return
            except self._died:
                if begun:  # The client has a part of the answer, which no other can continue.
                    raise
            finally:
                messages.cancel()
        error = RequestError(503, "the replicas that had this request died; try again later")
        await error.response()(scope, _nothing, send)


def front_app(answer: Answer, died: type[Exception], limits: Limits) -> ASGIApp:
    """Return the ASGI app that receives requests, bounds the sizes of their bodies by `limits`, and
    passes each to a replica by `answer`. `died`: what the iterator of `answer` raises if the
    replica has died.
    """
    return Bodies(Front(answer, died), Admission(limits, 0))


async def answer_whole(
    app: ASGIApp, scope: dict[str, Any], body: bytes
) -> AsyncGenerator[dict[str, Any], None]:
    """Run an app on a request that has arrived; yields its messages.

    If the iterator is closed or cancelled, the app is told that the client has disconnected, and
    may end in its own time, as with a client of its own.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=64)
    gone = asyncio.Event()
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if rest:
            return rest.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not gone.is_set():
            await messages.put(message)

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            if not gone.is_set():
                await messages.put(None)

    task = asyncio.ensure_future(run())
    try:
        while (message := await messages.get()) is not None:
            yield dict(message)
        await task
    finally:
        gone.set()
        while not messages.empty():  # Let a waiting send() go on.
            messages.get_nowait()
        if not task.done():
            _ENDING.add(task)
            task.add_done_callback(_ENDING.discard)


_ENDING: set[asyncio.Task[None]] = set()
"""Requests whose client has gone: the event loop itself would not keep their tasks."""


async def _body_of(scope: Scope, receive: Receive) -> bytes:
    """Return the body that Bodies has received."""
    if scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return b""
    message = await receive()
    body: bytes = message.get("body", b"")
    return body


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
