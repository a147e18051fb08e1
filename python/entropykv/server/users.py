"""Tell users apart by their API keys, and say what one of them may see of the others: nothing.

Every key is a user. Whoever has the same key sees the same conversations, by whatever names they
are called; without any key, all are one user.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.types import Scope

from entropykv.errors import SettingsError
from entropykv.server.options import ServerOptions

_SCHEME = b"Bearer "
_DIGEST_BYTES = 16
_MOST_KEYS = 1000
"""The most keys of a file: every request is compared with all of them."""
ALL = ""
"""The id of the one user of a server without keys."""


@dataclass(frozen=True)
class Caller:
    """Hold who asks, and what they call the conversation that they go on with."""

    user: str = ALL
    """The id of the API key that the request bears."""
    name: str | None = None
    """What X-Session-Id, or the field `user`, says; None: the text tells which one it is."""

    def tenant(self, *, shared_prefixes: bool) -> Caller:
        """Return whose texts this one's may begin with, without being read again.

        That is the key, or without shared prefixes the key and the name.
        """
        return replace(self, name=None) if shared_prefixes else self


SOMEBODY = Caller()
"""Who asks at a server without keys, and calls no conversation by a name."""


class Keys:
    """Know the API keys of a server, and which user each of them is."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Take the keys; the same one twice is one user."""
        self._digests = list(dict.fromkeys(_digest(key.encode("utf-8")) for key in keys))

    @classmethod
    def of(cls, server: ServerOptions) -> Keys:
        """Return the keys that options name; raises SettingsError for a file without any."""
        keys = [] if server.api_key is None else [server.api_key]
        if server.api_key_file is not None:
            keys += _keys_in(server.api_key_file)
        return cls(keys)

    def __len__(self) -> int:
        """Return how many users there are; 0: whoever asks is the same one."""
        return len(self._digests)

    def user_of(self, authorization: bytes) -> str | None:
        """Return the user whose key the header Authorization has; None: it has no right one.

        All keys are compared, each of them in constant time: seconds tell nothing of a key.
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
    """Return the keys of a file, one a line; blank lines and those that begin with # are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()  # Windows begins it so
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise SettingsError(
            f"{path}: the keys cannot be read ({reason}); give a text file with one key a line "
            "(--api-key-file)"
        ) from None
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:  # without this, an empty file would let everyone in
        raise SettingsError(f"{path}: there is no key in it; write one a line (--api-key-file)")
    if len(keys) > _MOST_KEYS:
        raise SettingsError(
            f"{path}: {len(keys)} keys are more than {_MOST_KEYS}, with which each request is "
            "compared; give some of them to another server (--api-key-file)"
        )
    return keys


def shows_text(server: ServerOptions, keys: Keys) -> bool:
    """Tell whether routes and the page show what texts in the cache say.

    Unless the operator has said so, only where nobody but this machine's users can ask at all.
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
    """Note whose request it is, for the routes."""
    scope.setdefault("state", {})["user"] = user


def user_of(scope: Scope) -> str:
    """Return the id of the user whose request it is."""
    user: str = scope.get("state", {}).get("user", ALL)
    return user
