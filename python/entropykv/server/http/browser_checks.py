"""Refuse what web pages of others let a browser send, by its headers Host and Origin.

A page of evil.example may let its name resolve to 127.0.0.1 (DNS rebinding). Then the browser
considers the server a part of that page, which may read all answers. But the Host header still says
evil.example.

Even without DNS rebinding, such a page can let a browser send a form or a text to 127.0.0.1 without
asking first. It cannot read the answer, but it could store documents and use the model. Browsers
say where such a request comes from; other clients do not send these headers.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from entropykv.server.http.errors import RequestError

_SAFE = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
_THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""The origins of web pages that this machine serves."""


class HostHeaderCheck:
    """Answer requests with a Host header that is not allowed with 403 (ASGI middleware)."""

    def __init__(self, app: ASGIApp, host: str, allowed: str | None) -> None:
        """Wrap an app that listens on `host`; `allowed`: further names, separated by commas.

        A name that begins with *. allows all its subdomains, and * allows every name.
        """
        self._app = app
        given = [name.strip().lower() for name in (allowed or "").split(",") if name.strip()]
        self._names = {"localhost", host.lower(), *given}
        self._endings = tuple(name[1:] for name in given if name.startswith("*."))
        if not _is_loopback(host):
            self._names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"host")
            if given is not None and not self._allows(given.decode("latin-1")):
                shown = given.decode("latin-1")[:100]
                error = RequestError(
                    403,
                    f"this server is not called {shown!r}; use its address, or start it with "
                    "--allowed-hosts and this name",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, given: str) -> bool:
        """Tell whether a Host is allowed; addresses always are, because they need no name
        resolution.
        """
        name = _without_port(given).lower().rstrip(".")
        return (
            "*" in self._names
            or name in self._names
            or name.endswith((".localhost", *self._endings))
            or _address(name) is not None
        )


def _without_port(given: str) -> str:
    """Return the name or address in a Host header, without port and without IPv6 brackets."""
    if given.startswith("["):
        return given[1:].partition("]")[0]
    return given.rpartition(":")[0] if given.count(":") == 1 else given


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


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
