"""Keep the files of documents below a directory, which several processes may share.

A process that uses a document holds a shared lock on its file, and only a process that gets an
exclusive lock removes it. So a document in use stays, whichever process uses it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from entropykv import system
from entropykv.errors import SessionFileError

SUFFIX = ".kv"
"""The ending of the file of a document."""
_LOCK_ATTEMPTS, _LOCK_INTERVAL = 50, 0.02
"""How often, and after how many seconds, a file is tried that another process is about to
remove.
"""

FileStamp = tuple[int, int, int]
"""Distinguishes two versions of a file: nanoseconds of its last change, bytes, and inode."""


@dataclass
class _Use:
    """Count who uses a document in this process; the process has one lock for all of them."""

    count: int = 0
    descriptor: int = -1
    """The open file that has the shared lock; -1: none yet."""


class DocumentFolder:
    """Know the documents below a directory, and who uses them; any thread may call it."""

    def __init__(self, directory: Path, limit_bytes: int | None) -> None:
        """Make the directory if it does not exist; only its owner can read it.

        `limit_bytes`: the most bytes of all complete documents; None: no limit. Raises OSError.
        """
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._uses: dict[Path, _Use] = {}
        make_folder(directory)

    @contextmanager
    def in_use(self, path: Path) -> Iterator[None]:
        """Keep a document from being removed by this process, and by others after hold()."""
        with self._lock:
            use = self._uses.setdefault(path, _Use())
            use.count += 1
        try:
            yield
        finally:
            with self._lock:
                use.count -= 1
                if not use.count:
                    del self._uses[path]
                    _close(use.descriptor)

    def hold(self, path: Path) -> bool:
        """Lock the file of a document in use against all processes; returns False if there is
        none.
        """
        for _ in range(_LOCK_ATTEMPTS):
            with self._lock:
                use = self._uses[path]
                if use.descriptor >= 0 and _is_at(path, use.descriptor):
                    return True
                try:
                    descriptor = os.open(path, os.O_RDONLY | system.file_flags("O_CLOEXEC"))
                except OSError:
                    return False
                if _is_locked(descriptor, shared=True) and _is_at(path, descriptor):
                    _close(use.descriptor)
                    use.descriptor = descriptor
                    return True
                os.close(descriptor)
            time.sleep(_LOCK_INTERVAL)  # Another process is removing or replacing it.
        return False

    def is_in_use(self, path: Path) -> bool:
        """Tell whether this process uses a document."""
        with self._lock:
            return path in self._uses

    def remove(self, path: Path) -> bool:
        """Remove the file of a document, if there is one; returns False if it is in use.

        Raises OSError.
        """
        with self._lock:
            return path not in self._uses and _removed(path)

    def make_room(self, newest: Path) -> None:
        """Remove the least recently used documents beyond the limit, but none that is in use.

        Raises SessionFileError if the newest one alone is larger than the limit, after removing it.
        """
        if self.limit_bytes is None:
            return
        size = newest.stat().st_size
        if size > self.limit_bytes:
            newest.unlink(missing_ok=True)
            raise SessionFileError(
                f"the document takes {size / 2**20:.1f} MiB, and all may take "
                f"{self.limit_bytes / 2**20:.1f} MiB (--documents-limit); give a smaller KV budget "
                "or a higher limit"
            )
        files = []
        for path in self.directory.rglob(f"*{SUFFIX}"):
            with suppress(OSError):  # Another process may remove it meanwhile.
                files.append((last_use(path) or 0.0, path.stat().st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit_bytes:
                return
            with suppress(OSError):
                if path != newest and self.remove(path):
                    total -= size


def make_folder(path: Path) -> None:
    """Make a folder and those above it; only its owner can read it. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def stamp_of(path: Path) -> FileStamp | None:
    """Return what distinguishes two versions of a file; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def last_use(path: Path) -> float | None:
    """Return when a document was written or used last, in seconds; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return max(status.st_atime, status.st_mtime)


def note_use(path: Path) -> None:
    """Record the time of a use in the file itself, for all processes that share it."""
    with suppress(OSError):
        status = os.stat(path)
        os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))


def _removed(path: Path) -> bool:
    """Remove a file that no process has locked; returns False if one has. Raises OSError."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | system.file_flags("O_CLOEXEC"))
        except FileNotFoundError:
            return True
        if not _is_locked(descriptor):
            os.close(descriptor)
            return False
        if not _is_at(path, descriptor):  # Another process has removed or replaced it.
            os.close(descriptor)
            continue
        if not system.remove_and_close(path, descriptor):
            path.unlink(missing_ok=True)  # Raises the reason.
        return True


def _is_locked(descriptor: int, *, shared: bool = False) -> bool:
    """Lock a file; returns False if a process has a lock that excludes this one.

    A file system without locks has one server, whose uses are counted in the process.
    """
    try:
        return system.lock(descriptor, shared=shared)
    except OSError:
        return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Tell whether an open file is the one that the path names now."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
