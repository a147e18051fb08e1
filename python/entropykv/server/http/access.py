"""Decide who may ask: hosts and origins, as browsers name them, and users by their API keys.

A page of evil.example may let its name resolve to 127.0.0.1 (DNS rebinding). Then the browser
considers the server a part of that page, which may read all answers. But the Host header still says
evil.example.

Even without DNS rebinding, such a page can let a browser send a form or a text to 127.0.0.1 without
asking first. It cannot read the answer, but it could store documents and use the model. Browsers
say where such a request comes from; other clients do not send these headers.

Every key is a user, and no user sees texts of another one. Requests with the same key see the
same conversations, whatever these are named; without any key, all requests belong to one user.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from entropykv.errors import SettingsError
from entropykv.files import limited_text
from entropykv.server.http.errors import RequestError
from entropykv.server.options import ServerOptions
from entropykv.server.page.files import page_files

_SAFE = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
_THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""The origins of web pages that this machine serves."""
_SCHEME = b"Bearer "
_DIGEST_BYTES = 16
_MOST_KEYS = 1000
"""The most keys in a file, because every request is compared with all of them."""
SESSION_HEADER = "x-session-id"
"""The header that names a conversation; without it, most requests do so by the field `user`."""
ALL = ""
"""The id of the only user of a server without keys."""
_PUBLIC = frozenset({"/health", "/v1/health", "/docs", "/openapi.json", *page_files()})
"""Paths that need no key: health, documentation, and the page, which asks the user for the key."""


class _Check(ABC):
    """Refuse requests before their bodies are read (ASGI middleware)."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an app."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] == "http":
            try:
                self.check(scope)
            except RequestError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    @abstractmethod
    def check(self, scope: Scope) -> None:
        """Raise RequestError for a request that is not allowed."""


class HostHeaderCheck(_Check):
    """Answer 403 to requests with a Host header that is not allowed."""

    def __init__(self, app: ASGIApp, host: str, allowed: str | None) -> None:
        """Wrap an app that listens on `host`; `allowed`: further names, separated by commas.

        A name that begins with *. allows all its subdomains, and * allows every name.
        """
        super().__init__(app)
        given = [name.strip().lower() for name in (allowed or "").split(",") if name.strip()]
        self._names = {"localhost", host.lower(), *given}
        self._endings = tuple(name[1:] for name in given if name.startswith("*."))
        if not _is_loopback(host):
            self._names.add(socket.gethostname().lower())

    def check(self, scope: Scope) -> None:
        """Raise RequestError (403) for a Host that is not allowed."""
        given = dict(scope["headers"]).get(b"host")
        if given is not None and not self._allows(given.decode("latin-1")):
            shown = given.decode("latin-1")[:100]
            raise RequestError(
                403,
                f"this server is not called {shown!r}; use its address, or start it with "
                "--allowed-hosts and this name",
            )

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
    """Return the origins that --cors-origins names, and a regular expression of further ones, or
    None.
    """
    origins = [each.strip() for each in (option or "").split(",") if each.strip()]
    return origins, _THIS_MACHINE if "localhost" in origins else None


class OriginCheck(_Check):
    """Answer 403 to requests of web pages that may not use the server."""

    def __init__(self, app: ASGIApp, origins: list[str], pattern: str | None) -> None:
        """Wrap an app; `origins` are further pages that may use it (`*`: all), and `pattern` is
        a regular expression of such origins.
        """
        super().__init__(app)
        self._origins = frozenset(origins)
        self._pattern = None if pattern is None else re.compile(pattern)

    def check(self, scope: Scope) -> None:
        """Raise RequestError (403) if a page asks for a change that it may not make."""
        if scope["method"] in _SAFE:
            return
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not self._allows(origin, headers):
            raise RequestError(
                403,
                f"the web page {origin[:100] or 'of another origin'} may not use this server; "
                "start it with --cors-origins and this origin",
            )

    def _allows(self, origin: str, headers: dict[bytes, bytes]) -> bool:
        site, host = headers.get(b"sec-fetch-site", b""), headers.get(b"host", b"")
        if site in (b"same-origin", b"none"):
            return True
        if not site and (not origin or urlsplit(origin).netloc == host.decode("latin-1")):
            return True
        if "*" in self._origins or origin in self._origins:
            return True
        return self._pattern is not None and self._pattern.fullmatch(origin) is not None


@dataclass(frozen=True)
class Caller:
    """Hold the user of a request, and the name of the conversation that it continues."""

    user: str = ALL
    """The id of the API key in the request, which stands for the user; ALL on a server without
    keys.
    """
    name: str | None = None
    """The value of X-Session-Id, or of the field `user`; None: the text itself identifies the
    conversation.
    """

    def tenant(self, *, shared_prefixes: bool) -> Caller:
        """Return the tenant, whose texts this request may reuse as prefixes.

        The tenant is the key, or, without shared prefixes, the key and the name.
        """
        return replace(self, name=None) if shared_prefixes else self


SOMEBODY = Caller()
"""The caller at a server without keys, for a conversation without a name."""


class Keys:
    """Hold the API keys of a server, and the user of each."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Take the keys; duplicates are one user."""
        self._digests = list(dict.fromkeys(_digest(key.encode("utf-8")) for key in keys))

    @classmethod
    def of(cls, server: ServerOptions) -> Keys:
        """Return the keys that the options name; raises SettingsError for a file that cannot be
        read, and for one with no or too many keys.
        """
        keys = [] if server.api_key is None else [server.api_key]
        if server.api_key_file is not None:
            keys += _keys_in(server.api_key_file)
        return cls(keys)

    def __len__(self) -> int:
        """Return how many users there are; 0: the server has no keys, and everybody is the same
        user.
        """
        return len(self._digests)

    def user_of(self, authorization: bytes) -> str | None:
        """Return the user whose key is in the header Authorization; None without a valid key. A
        server without keys has only the user ALL.

        All keys are compared in constant time, so that the time reveals nothing about a key.
        """
        if not self._digests:
            return ALL
        given = _digest(authorization[len(_SCHEME) :])
        found = None
        for digest in self._digests:
            if hmac.compare_digest(digest, given):
                found = digest.hex()
        return found if authorization.startswith(_SCHEME) else None


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_DIGEST_BYTES, person=b"entropykv user").digest()


def _keys_in(path: str) -> list[str]:
    """Return the keys of a file, one per line; blank lines and lines that begin with # are
    skipped.
    """
    try:
        lines = limited_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise SettingsError(
            f"{path}: the keys cannot be read ({reason}); give a text file with one key a line "
            "(--api-key-file)"
        ) from None
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:  # Without this check, an empty file would let everyone in.
        raise SettingsError(f"{path}: it contains no key; write one key per line (--api-key-file)")
    if len(keys) > _MOST_KEYS:
        raise SettingsError(
            f"{path}: {len(keys)} keys are more than {_MOST_KEYS}, with which each request is "
            "compared; give some of them to another server (--api-key-file)"
        )
    return keys


def shows_text(server: ServerOptions, keys: Keys) -> bool:
    """Tell whether routes and the page may show the texts in the cache.

    Unless the operator has decided, they may if there are no keys, and no request can come from
    another machine.
    """
    if server.show_text is not None:
        return server.show_text
    return len(keys) == 0 and _is_loopback(server.host)


def session_in(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the name of a conversation in the headers of an ASGI scope; None without one."""
    return dict(headers).get(SESSION_HEADER.encode(), b"").decode("latin-1") or None


def note_user(scope: Scope, user: str) -> None:
    """Record the user of a request, for the routes."""
    scope.setdefault("state", {})["user"] = user


def user_of(scope: Scope) -> str:
    """Return the id of the user of a request; ALL if none was recorded."""
    user: str = scope.get("state", {}).get("user", ALL)
    return user


class ApiKeyCheck(_Check):
    """Answer 401 to requests without a valid API key."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        """Wrap an app; if there are no keys, all requests pass."""
        super().__init__(app)
        self._keys = keys

    def check(self, scope: Scope) -> None:
        """Record the user of the request; raises RequestError (401) without a valid key, unless the
        path needs none.

        The body was not read yet: otherwise it would be held for somebody without a key, and count
        as one of --max-bodies.
        """
        if scope["path"] not in _PUBLIC or scope["method"] not in _SAFE:
            note_user(scope, self._user_of(_authorization(dict(scope["headers"]))))

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
