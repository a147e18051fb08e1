"""Check the API key of every request before its body is read."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from entropykv.server.http.errors import RequestError
from entropykv.server.http.users import Keys, note_user
from entropykv.server.page.files import page_files

_PUBLIC = frozenset({"/health", "/v1/health", "/docs", "/openapi.json", *page_files()})
"""Paths that need no key: health, documentation, and the page, which asks the user for the key."""


class ApiKeyCheck:
    """Answer requests without a valid API key with 401 (ASGI middleware)."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        """Wrap an app; if there are no keys, all requests pass."""
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            # Refuse before the body is read: otherwise it would be held for somebody without a key,
            # and count as one of --max-bodies.
            if scope["path"] not in _PUBLIC or scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                note_user(scope, self._user_of(_authorization(headers)))
        except RequestError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _user_of(self, authorization: bytes) -> str:
        user = self._keys.user_of(authorization)
        if user is None:
            raise RequestError(
                401,
                "this server wants its API key; send it as Authorization: Bearer KEY, or as "
                "X-Api-Key: KEY",
                code="invalid_api_key",
            )
        return user


def _authorization(headers: dict[bytes, bytes]) -> bytes:
    """Return the header with the key; clients of Anthropic's interface have another one."""
    other = headers.get(b"x-api-key")
    return headers.get(b"authorization", b"" if other is None else b"Bearer " + other)
