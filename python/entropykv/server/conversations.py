"""Keep conversations on disk, so that any replica can go on with any of them, one at a time.

After every turn, and before the client has the end of the answer, its session is saved: there is
nothing left to save when a replica stops, however it stops.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from entropykv.errors import EntropyKVError, SettingsError
from entropykv.llama.entropy_llama import EntropyLlama

_logger = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


class Conversations:
    """Keep sessions in a directory that replicas may share; the least recently used go first.

    `max_bytes` bounds all files together. Raises SettingsError where the directory cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int) -> None:
        """Make the directory where it is not there; only its owner can read what was said."""
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._held: tuple[str, _Stamp] | None = None
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"{directory}: sessions cannot be kept there ({error.strerror}); give another "
                "directory"
            ) from error

    def path(self, name: str) -> Path:
        """Return where a conversation is: names may hold anything, so the file has their digest."""
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        return self._directory / f"{digest}.session"

    def enter(self, llama: EntropyLlama, name: str) -> None:
        """Make the model hold what a conversation has read, if it does not."""
        path = self.path(name)
        stamp = _stamp(path)
        if stamp is None or self._held == (name, stamp):
            return
        self._held = None
        try:
            llama.load_session(path)
        except EntropyKVError as error:  # it goes on without, since the request has the whole text
            _logger.warning("%s", error)
        else:
            self._held = (name, stamp)

    def leave(self, llama: EntropyLlama, name: str) -> None:
        """Save a conversation that was just read on; an error costs reading it again, no more."""
        self._held = None
        if llama.n_tokens == 0:  # the generation failed, and what the turn before saved is better
            return
        path = self.path(name)
        try:
            llama.save_session(path)
        except EntropyKVError as error:
            _logger.warning("%s", error)
            return
        stamp = _stamp(path)
        self._held = None if stamp is None else (name, stamp)
        self._remove_oldest()

    def forget(self) -> None:
        """Note that the model has read something that is no conversation."""
        self._held = None

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
