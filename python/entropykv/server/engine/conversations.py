"""Keep conversations on disk, so that any replica can continue any of them, one at a time.

The session is saved after every turn, before the client receives the end of the answer. Therefore
nothing is left to save when a replica stops or crashes.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from entropykv.errors import EntropyKVError, SettingsError
from entropykv.server.engine.prefix_cache import PrefixCache
from entropykv.server.http.users import Caller

_logger = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


class ConversationHolder(Protocol):
    """Define what holds the text of one conversation, such as an EntropyLlama."""

    @property
    def n_tokens(self) -> int:
        """Return how many tokens have been read."""

    def load_session(self, path: Path) -> Any:
        """Load a saved session; raises SessionFileError or PoolError."""

    def save_session(self, path: Path) -> Any:
        """Save what has been read; raises EntropyKVError."""


@dataclass(frozen=True)
class CachedConversation:
    """Hold a caller's conversation in the prefix cache of a pool."""

    prefix_cache: PrefixCache
    caller: Caller

    @property
    def n_tokens(self) -> int:
        """Return how many tokens the prefix cache has of the conversation; 0 if it has none."""
        return self.prefix_cache.length_of(self.caller)

    def load_session(self, path: Path) -> None:
        """Replace the conversation in the prefix cache by the content of a file."""
        self.prefix_cache.load(self.caller, path)

    def save_session(self, path: Path) -> None:
        """Save the conversation to a file; no request can use it meanwhile."""
        self.prefix_cache.save(self.caller, path)


class Conversations:
    """Keep sessions in a directory that replicas may share; the least recently used are removed
    first.

    `max_bytes` limits all files together. Raises SettingsError if the directory cannot be used.
    """

    def __init__(
        self, directory: str | os.PathLike[str], max_bytes: int, *, several: bool = False
    ) -> None:
        """Make the directory if it does not exist; only its owner can read the conversations.

        `several`: each conversation has its own holder; otherwise all share one, which holds the
        latest of them.
        """
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._several = several
        self._held: dict[Caller, _Stamp] = {}
        """For each conversation, the version of the file that its holder has continued from."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"{directory}: sessions cannot be kept there ({error.strerror}); give another "
                "directory"
            ) from error

    def path(self, caller: Caller) -> Path:
        """Return the file path of a caller's named conversation.

        Names may contain any characters, so the file name is a digest. It differs for every user.
        """
        name, user = (caller.name or "").encode(), caller.user.encode()
        digest = hashlib.blake2b(name, key=user, digest_size=16).hexdigest()
        return self._directory / f"{digest}.session"

    def enter(self, holder: ConversationHolder, caller: Caller) -> None:
        """Load a caller's conversation into the holder, unless the holder has it already."""
        path = self.path(caller)
        stamp = _stamp(path)
        if stamp is None or (self._held.get(caller) == stamp and holder.n_tokens > 0):
            return
        self._drop(caller)
        try:
            holder.load_session(path)
        # Continue without it, because the request contains the whole text.
        except EntropyKVError as error:
            _logger.warning("%s", error)
        else:
            self._held[caller] = stamp

    def leave(self, holder: ConversationHolder, caller: Caller) -> None:
        """Save a conversation after its turn; an error only means that it must be read again."""
        self._drop(caller)
        if holder.n_tokens == 0:  # The generation failed; the file of the previous turn is better.
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
        """Note that the shared holder has read something that is not a conversation."""
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
            if stamp is not None:  # Check again, because another replica may remove files, too.
                files.append((stamp, path))
        total = sum(size for (_, size, _), _ in files)
        for (_, size, _), path in sorted(files):
            if total <= self._max_bytes:
                return
            with suppress(OSError):  # Windows keeps a file that another replica reads.
                path.unlink(missing_ok=True)
                total -= size


def _stamp(path: Path) -> _Stamp | None:
    """Return what distinguishes two versions of a file, beginning with the modification time."""
    try:
        status = path.stat()
    except OSError:  # Windows also refuses the names of files that are being removed.
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
