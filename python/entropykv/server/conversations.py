"""Keep conversations on disk, so that any replica can go on with any of them, one at a time.

After every turn, and before the client has the end of the answer, its session is saved: there is
nothing left to save when a replica stops, however it stops.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from entropykv.errors import EntropyKVError, SettingsError
from entropykv.server.prefix_cache import PrefixCache
from entropykv.server.users import Caller

_logger = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


class HoldsOne(Protocol):
    """Hold what one conversation has read, as an EntropyLlama does."""

    @property
    def n_tokens(self) -> int:
        """Return how many tokens it holds."""

    def load_session(self, path: Path) -> Any:
        """Hold what a file has; raises SessionFileError or PoolError."""

    def save_session(self, path: Path) -> Any:
        """Write what is held; raises EntropyKVError."""


@dataclass(frozen=True)
class OnShelf:
    """Hold a caller's conversation on the prefix_cache of a pool."""

    prefix_cache: PrefixCache
    caller: Caller

    @property
    def n_tokens(self) -> int:
        """Return how many tokens it has; 0 where the prefix_cache does not have it."""
        return self.prefix_cache.length_of(self.caller)

    def load_session(self, path: Path) -> None:
        """Put what a file has in the place of what the prefix_cache has."""
        self.prefix_cache.load(self.caller, path)

    def save_session(self, path: Path) -> None:
        """Write it to a file; nobody takes it meanwhile."""
        self.prefix_cache.save(self.caller, path)


class Conversations:
    """Keep sessions in a directory that replicas may share; the least recently used go first.

    `max_bytes` bounds all files together. Raises SettingsError where the directory cannot be used.
    """

    def __init__(
        self, directory: str | os.PathLike[str], max_bytes: int, *, several: bool = False
    ) -> None:
        """Make the directory where it is not there; only its owner can read what was said.

        `several`: each conversation has a holder of its own; otherwise all share one, which holds
        the last of them.
        """
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._several = several
        self._held: dict[Caller, _Stamp] = {}
        """The version of each conversation's file that its holder goes on from."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"{directory}: sessions cannot be kept there ({error.strerror}); give another "
                "directory"
            ) from error

    def path(self, caller: Caller) -> Path:
        """Return where a caller's conversation is, which has a name.

        Names may hold anything, so the file has their digest, and that of the same name is another
        one for every user.
        """
        name, user = (caller.name or "").encode(), caller.user.encode()
        digest = hashlib.blake2b(name, key=user, digest_size=16).hexdigest()
        return self._directory / f"{digest}.session"

    def enter(self, holder: HoldsOne, caller: Caller) -> None:
        """Make the holder hold what a caller's conversation has read, if it does not."""
        path = self.path(caller)
        stamp = _stamp(path)
        if stamp is None or (self._held.get(caller) == stamp and holder.n_tokens > 0):
            return
        self._drop(caller)
        try:
            holder.load_session(path)
        except EntropyKVError as error:  # it goes on without, since the request has the whole text
            _logger.warning("%s", error)
        else:
            self._held[caller] = stamp

    def leave(self, holder: HoldsOne, caller: Caller) -> None:
        """Save a conversation that was just read on; an error costs reading it again, no more."""
        self._drop(caller)
        if holder.n_tokens == 0:  # the generation failed, and what the turn before saved is better
            return
        path = self.path(caller)
        try:
            holder.save_session(path)
        except EntropyKVError as error:
            _logger.warning("%s", error)
            return
        stamp = _stamp(path)
        if stamp is not None:
            self._held[caller] = stamp
        self._remove_oldest()

    def forget(self) -> None:
        """Note that the one holder has read something that is no conversation."""
        self._held.clear()

    def _drop(self, caller: Caller) -> None:
        if self._several:
            self._held.pop(caller, None)
        else:
            self._held.clear()

    def _remove_oldest(self) -> None:
        files = []
        for path in self._directory.glob("*.session"):
            stamp = _stamp(path)
            if stamp is not None:  # look again, since another replica may remove files, too
                files.append((stamp, path))
        total = sum(size for (_, size, _), _ in files)
        for (_, size, _), path in sorted(files):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def _stamp(path: Path) -> _Stamp | None:
    """Return what differs between two versions of a file, the time of writing first."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
