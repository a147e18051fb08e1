"""Check the API key of every request before its body is read."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from entropykv.server.errors import RequestError
from entropykv.server.web_files import page_files

_PUBLIC = frozenset({"/health", "/v1/health", "/docs", "/openapi.json", *page_files()})
"""Paths that need no key: health, documentation, and the page, which asks for the key."""


class Gate:
    """Answer 401 without the right key (ASGI)."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        """Wrap an app; without a key, let everyone in."""
        self._app = app
        self._credentials = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            # A body would be held for a stranger, among those that --max-bodies allows.
            if scope["path"] not in _PUBLIC or scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                self._check_key(headers.get(b"authorization", b""))
        except RequestError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_key(self, given: bytes) -> None:
        if self._credentials is not None and not hmac.compare_digest(given, self._credentials):
            raise RequestError(
                401,
                "this server wants its API key; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )
