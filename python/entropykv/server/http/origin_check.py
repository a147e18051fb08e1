"""Refuse what web pages of other origins ask a browser to send.

A page of evil.example can let a browser send a form or a text to 127.0.0.1 without asking first. It
cannot read the answer, but it could store documents and use the model. Browsers say where such a
request comes from; other clients do not send these headers.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from entropykv.server.http.errors import RequestError

_SAFE = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
_THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""The origins of web pages that this machine serves."""


def origins_of(option: str | None) -> tuple[list[str], str | None]:
    """Return the origins that --cors-origins names, and a regular expression of further ones."""
    origins = [each.strip() for each in (option or "").split(",") if each.strip()]
    return origins, _THIS_MACHINE if "localhost" in origins else None


class OriginCheck:
    """Answer requests of web pages that may not use the server with 403 (ASGI middleware)."""

    def __init__(self, app: ASGIApp, origins: list[str], pattern: str | None) -> None:
        """Wrap an app; `origins` are further pages that may use it (`*`: all), and `pattern` is
        a regular expression of such origins.
        """
        self._app = app
        self._origins = frozenset(origins)
        self._pattern = None if pattern is None else re.compile(pattern)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] == "http" and scope["method"] not in _SAFE:
            headers = dict(scope["headers"])
            origin = headers.get(b"origin", b"").decode("latin-1")
            if not self._allows(origin, headers):
                error = RequestError(
                    403,
                    f"the web page {origin[:100] or 'of another origin'} may not use this server; "
                    "start it with --cors-origins and this origin",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, origin: str, headers: dict[bytes, bytes]) -> bool:
        site = headers.get(b"sec-fetch-site", b"")
        if site in (b"same-origin", b"none"):
            return True
        if not site and (not origin or urlsplit(origin).netloc == _host(headers)):
            return True
        if "*" in self._origins or origin in self._origins:
            return True
        return self._pattern is not None and self._pattern.fullmatch(origin) is not None


def _host(headers: dict[bytes, bytes]) -> str:
    return headers.get(b"host", b"").decode("latin-1")
