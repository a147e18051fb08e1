"""Keep conversations on disk, so that any replica can continue any of them, one at a time.

The session is saved after every turn, before the client receives the end of the answer. Therefore
nothing is left to save when a replica stops or crashes.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from entropykv.errors import EntropyKVError, SettingsError
from entropykv.files import FileStamp, make_folder, remove_oldest, stamp_of
from entropykv.server.engine.prefix_cache import PrefixCache
from entropykv.server.http.users import Caller

_logger = logging.getLogger(__name__)


class Conversations:
    """Keep sessions in a directory that replicas may share; the least recently used are removed
    first.

    `max_bytes` limits all files together. Raises SettingsError if the directory cannot be used.
    """

    def __init__(
        self, directory: str | os.PathLike[str], max_bytes: int, prefix_cache: PrefixCache
    ) -> None:
        """Make the directory if it does not exist; only its owner can read the conversations.

        `prefix_cache`: holds them between two requests.
        """
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._prefix_cache = prefix_cache
        self._held: dict[Caller, FileStamp] = {}
        """For each conversation, the version of the file that the prefix cache holds."""
        try:
            make_folder(self._directory)
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

    def enter(self, caller: Caller) -> None:
        """Load a caller's conversation, unless the prefix cache holds it already."""
        path, held = self.path(caller), self._prefix_cache
        stamp = stamp_of(path)
        if stamp is None or (self._held.get(caller) == stamp and held.length_of(caller) > 0):
            return
        self._held.pop(caller, None)
        try:
            held.load(caller, path)
        # Continue without it, because the request contains the whole text.
        except EntropyKVError as error:
            _logger.warning("%s", error)
        else:
            self._held[caller] = stamp

    def leave(self, caller: Caller) -> None:
        """Save a conversation after its turn; an error only means that it must be read again."""
        self._held.pop(caller, None)
        path = self.path(caller)
        try:
            if self._prefix_cache.save(caller, path) is None:
                return  # The generation failed; the file of the previous turn is better.
        except EntropyKVError as error:
            _logger.warning("%s", error)
            return
        stamp = stamp_of(path)
        if stamp is not None:
            self._held[caller] = stamp
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        stamps = [(stamp_of(path), path) for path in self._directory.glob("*.session")]
        # Another replica may remove files, too.
        files = [(stamp[0], stamp[1], path) for stamp, path in stamps if stamp is not None]

        def remove(path: Path) -> bool:
            path.unlink(missing_ok=True)
            return True

        remove_oldest(files, self._max_bytes, remove)
