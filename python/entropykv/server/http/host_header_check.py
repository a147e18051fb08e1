"""Refuse requests for other host names, which web pages could send through a browser.

A page of evil.example may let its name resolve to 127.0.0.1 (DNS rebinding). Then the browser
considers the server a part of that page, which may read all answers. But the Host header still says
evil.example.
"""

from __future__ import annotations

import ipaddress
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from entropykv.server.http.errors import RequestError


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
