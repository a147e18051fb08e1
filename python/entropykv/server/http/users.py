"""Distinguish users by their API keys; no user sees anything of another one.

Every key is a user. Requests with the same key see the same conversations, whatever these are
named; without any key, all requests belong to one user.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from entropykv.errors import SettingsError
from entropykv.server.http.errors import RequestError
from entropykv.server.options import ServerOptions
from entropykv.server.page.files import page_files

_SCHEME = b"Bearer "
_DIGEST_BYTES = 16
_MOST_KEYS = 1000
"""The most keys in a file, because every request is compared with all of them."""
ALL = ""
"""The id of the only user of a server without keys."""
_PUBLIC = frozenset({"/health", "/v1/health", "/docs", "/openapi.json", *page_files()})
"""Paths that need no key: health, documentation, and the page, which asks the user for the key."""


@dataclass(frozen=True)
class Caller:
    """Hold the user of a request, and the name of the conversation that it continues."""

    user: str = ALL
    """The id of the API key in the request."""
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
        """Return the keys that the options name; raises SettingsError for a file without any."""
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
        """Return the user whose key is in the header Authorization; None without a valid key.

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
        # Windows editors write a byte order mark.
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
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

    Unless the operator has decided, only if requests can come from this machine alone.
    """
    if server.show_text is not None:
        return server.show_text
    return len(keys) == 0 and _is_loopback(server.host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def note_user(scope: Scope, user: str) -> None:
    """Record the user of a request, for the routes."""
    scope.setdefault("state", {})["user"] = user


def user_of(scope: Scope) -> str:
    """Return the id of the user of a request."""
    user: str = scope.get("state", {}).get("user", ALL)
    return user


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
