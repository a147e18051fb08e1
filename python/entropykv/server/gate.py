"""Check every request before its body is read: the API key, and the limit of its size."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from entropykv.server.errors import RequestError
from entropykv.server.users import Keys, note_user
from entropykv.server.web_files import page_files

_PUBLIC = frozenset({"/health", "/v1/health", "/docs", "/openapi.json", *page_files()})
"""Paths that need no key: health, documentation, and the page, which asks for the key."""


class Gate:
    """Answer 401 without a right key, and 413 for a body above `max_body` bytes (ASGI)."""

    def __init__(self, app: ASGIApp, keys: Keys, max_body: int) -> None:
        """Wrap an app; without a key, let everyone in."""
        self._app = app
        self._keys = keys
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on with a body that cannot become too long."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            if scope["path"] not in _PUBLIC:
                note_user(scope, self._user_of(headers.get(b"authorization", b"")))
            length = headers.get(b"content-length", b"")
            self._check_size(int(length) if length.isdigit() else 0)
        except RequestError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _user_of(self, authorization: bytes) -> str:
        user = self._keys.user_of(authorization)
        if user is None:
            raise RequestError(
                401,
                "this server wants its API key; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        return user

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes > self._max_body:
            raise RequestError(
                413,
                f"the request's body has more than {self._max_body} bytes; shorten it or start "
                "the server with a larger --max-body",
            )

    def _counted(self, receive: Receive) -> Receive:
        """Pass on a body without a content-length, and refuse it where it gets too long."""
        n_bytes = 0

        async def counted() -> Message:
            nonlocal n_bytes
            message = await receive()
            if message["type"] == "http.request":
                n_bytes += len(message.get("body", b""))
                self._check_size(n_bytes)
            return message

        return counted
