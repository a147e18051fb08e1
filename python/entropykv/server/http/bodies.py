"""Receive the whole body of a request, then parse it once, within limits.

No other part of the app waits for the bytes of a body. Therefore a slow upload blocks neither a
lane nor the turn of a conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from entropykv.server.dialects.fields import MOST_DEPTH, MOST_NAME, check_names, check_values
from entropykv.server.engine.admission import Admission, Body, note_arrival
from entropykv.server.http.access import session_in
from entropykv.server.http.errors import RequestError, invalid

_SMALL = 16 << 10
"""The largest body in bytes that can be parsed in a fraction of a millisecond, whatever it
contains.
"""
_READER = ThreadPoolExecutor(1, thread_name_prefix="entropykv-body")
"""Parses larger bodies, one at a time, so that at most one of them competes with the event loop for
the interpreter.
"""


class Bodies:
    """Pass a request on once its body has arrived (ASGI middleware); refuse a body that is too long
    or too slow.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        """Wrap an app."""
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; requests whose method has no body are passed on unchanged."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        note_arrival(scope)
        with self._admission.body() as body:
            try:
                if not await self._received(scope, receive, body):
                    return
            except RequestError as error:
                # uvicorn discards the rest of the body.
                await error.response()(scope, receive, send)
                return
            await self._app(scope, _replayed(body.whole(), receive), send)

    async def _received(self, scope: Scope, receive: Receive, body: Body) -> bool:
        """Receive the body; returns False if the client has disconnected. Raises RequestError for a
        name of a conversation that is too long, a body that is too long or slow, and too many bytes
        of all bodies.
        """
        headers = dict(scope["headers"])
        if len(session_in(scope["headers"]) or "") > MOST_NAME:
            raise RequestError(
                400, f"X-Session-Id: it may have {MOST_NAME} bytes", param="X-Session-Id"
            )
        length = headers.get(b"content-length", b"")
        self._admission.check_body(int(length) if length.isdigit() and len(length) < 20 else 0)
        seconds = self._admission.limits.client_seconds
        try:
            return await asyncio.wait_for(_receive_all(receive, body), seconds)
        except asyncio.TimeoutError:
            raise RequestError(
                408,
                f"the request's body took longer than {seconds:g} seconds to arrive; send it "
                "faster, or start the server with more --client-seconds",
            ) from None


async def _receive_all(receive: Receive, body: Body) -> bool:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return False
        body.add(message.get("body", b""))
        if not message.get("more_body", False):
            return True


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first gives the body as one message, and then the client's
    messages.
    """
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return rest.pop() if rest else await receive()

    return replayed


class BodyRoute(APIRoute):
    """Parse the body of a route with read_body(); FastAPI still describes it in /openapi.json.

    FastAPI itself would parse and validate it in the event loop, and report every error in it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which gets a validated body."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

        class CheckedRequest(Request):
            @property
            def headers(self) -> Headers:
                # curl -d calls JSON a form, and FastAPI would not parse it then.
                if not hasattr(self, "_headers"):
                    others = [each for each in self.scope["headers"] if each[0] != b"content-type"]
                    self._headers = Headers(raw=[*others, (b"content-type", b"application/json")])
                return self._headers

            async def json(self) -> Any:
                if not hasattr(self, "_json"):
                    ignores = getattr(self.app.state, "ignores_unknown_fields", False)
                    self._json = await _read(model, await self.body(), ignores)
                return self._json

        async def checked(request: Request) -> Response:
            return await handle(CheckedRequest(request.scope, request.receive))

        return checked


async def _read(model: type[BaseModel], body: bytes, ignores: bool) -> BaseModel:
    if len(body) <= _SMALL:
        return read_body(model, body, ignores_unknown=ignores)
    read = partial(read_body, model, body, ignores_unknown=ignores)
    return await asyncio.get_running_loop().run_in_executor(_READER, read)


def read_body(model: type[BaseModel], body: bytes, *, ignores_unknown: bool = False) -> BaseModel:
    """Parse a JSON body as an object of the pydantic class `model`; raises RequestError (400),
    which names the field, if it is none.

    `ignores_unknown`: see check_names().
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise RequestError(
                400, f"the body has more than {MOST_DEPTH} objects and lists within each other"
            ) from None
        raise RequestError(400, f"the body is not JSON: {error}") from None
    check_values(value)
    if isinstance(value, dict):
        check_names(model, value, ignores_unknown=ignores_unknown)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False)) from None
