"""Keep the files of documents below a directory, which several processes may share.

A process that uses a document holds a shared lock on its file, and only a process that gets an
exclusive lock removes it. So a document in use stays, whichever process uses it.

The documents themselves may be in object storage. Then the directory has copies of those that this
machine uses, each with a small file that says which version it is a copy of. It also identifies the
copy itself: if several processes fetch a document while it is being replaced, the copy of one
version may end up beside the small file of another, and then it is fetched again.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from entropykv import system
from entropykv.errors import DocumentBusyError, SessionFileError, StorageError
from entropykv.file_locks import is_at, lock_if_possible
from entropykv.files import FileStamp, make_folder, remove_oldest, stamp_of
from entropykv.session.file import SessionReader, open_session
from entropykv.session.object_storage import ObjectStorage, is_address

SUFFIX = ".kv"
"""The ending of the file of a document."""
PARTIAL = ".partial"
"""The ending of a document that was not read to its end, or not stored yet."""
TEXT = ".text"
"""The ending of a text that a server has accepted and not read yet."""
_LOCK_ATTEMPTS, _LOCK_INTERVAL = 50, 0.02
"""How often locking a file is tried that another process is about to remove, and the seconds
between two attempts.
"""

_ORIGIN = ".origin"
"""The ending of the file that says which version in the storage a document is a copy of."""


@dataclass
class _Use:
    """Count the uses of a document in this process, which has one lock for all of them."""

    count: int = 0
    descriptor: int = -1
    """The open file that has the shared lock; -1: none yet."""


class DocumentFolder:
    """Keep track of the documents below a directory and of their uses in this process; any thread
    may call the methods.
    """

    def __init__(
        self, directory: Path, limit_bytes: int | None, storage: ObjectStorage | None = None
    ) -> None:
        """Make the directory if it does not exist; only its owner can read it.

        `limit_bytes`: the most bytes of all complete documents in the directory, and of the texts
        that wait to be read; None: no limit. `storage`: the object storage that has the documents;
        None: they are only in the directory. Raises OSError if the directory cannot be made.
        """
        self.directory = directory
        self._limit_bytes = limit_bytes
        self._storage = storage
        self._lock = threading.Lock()
        self._uses: dict[Path, _Use] = {}
        make_folder(directory)

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files in a folder, none if it cannot be read; with storage, of
        the documents in the storage, and of the partial files and texts in the folder.

        Raises StorageError if the object storage does not answer, as all methods that ask it do.
        """
        names = []
        with suppress(OSError):
            names = [each.name for each in os.scandir(folder) if each.is_file()]
        if self._storage is None:
            return names
        not_stored = [name for name in names if name.endswith((PARTIAL, TEXT))]
        return [*not_stored, *self._storage.names(self._key(folder))]

    def stamp(self, path: Path) -> FileStamp | None:
        """Return a stamp that differs between versions of a document; None if it does not exist."""
        return stamp_of(path) if self._storage is None else self._storage.stamp(self._key(path))

    @contextmanager
    def opened(self, path: Path) -> Iterator[SessionReader]:
        """Yield a reader of the header of a document or partial file: see open_session()."""
        storage = self._storage if path.name.endswith(SUFFIX) else None
        with open_session(path) if storage is None else storage.opened(self._key(path)) as reader:
            yield reader

    def keep(self, path: Path) -> None:
        """Keep a document that was written: copy it to the storage, if there is one, and remove the
        least recently used documents, but none in use, until all together are within the limit.

        Raises SessionFileError if the document alone is larger than the limit, after removing it.
        If the storage refuses the document, it becomes a partial file, whose reading can go on.
        """
        self._make_room(path)
        if self._storage is None:
            return
        key = self._key(path)
        try:
            # Without a lock, another process could take it for a copy of a document that was
            # removed from the storage, and remove it.
            with _locked_for_reading(path):
                copy = stamp_of(path)
                self._storage.store(path, key)
                stamp = self._storage.stamp(key)
                # Another machine may have replaced the document between store() and stamp().
                if self._storage.ends_as(key, path):
                    self._note_origin(path, stamp, copy)
        except StorageError:
            os.replace(path, partial_of(path))
            raise

    def fetch(self, path: Path) -> bool:
        """Make sure that the directory has the current version of a document; returns False, and
        removes a former copy, if there is no such document.
        """
        if self._storage is None:
            return path.exists()
        key = self._key(path)
        stamp = self._storage.stamp(key)
        if stamp is None:
            with suppress(OSError):  # Another machine has removed the document.
                _removed(path)
            return False
        copy = stamp_of(path)
        if copy is not None and self._origin_of(path) == _origin_text(stamp, copy):
            return True
        make_folder(path.parent)
        copy = self._storage.fetch(key, path)
        if copy is None:
            return False
        self._note_origin(path, stamp, copy)
        self._make_room(path)
        return True

    def _key(self, path: Path) -> str:
        key = path.relative_to(self.directory).as_posix()
        return "" if key == "." else key

    @staticmethod
    def _origin_of(path: Path) -> str | None:
        try:
            return _origin(path).read_text(encoding="utf-8")
        except OSError:
            return None

    @staticmethod
    def _note_origin(path: Path, stamp: FileStamp | None, copy: FileStamp | None) -> None:
        _origin(path).write_text(_origin_text(stamp, copy), encoding="utf-8")

    @contextmanager
    def in_use(self, path: Path) -> Iterator[None]:
        """Count a use of a document in the `with` block: this process does not remove it to make
        room for others. After hold(), no other process removes it either.
        """
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
        """Lock the file of a document in use, so that no process removes it; returns False if there
        is no such document.

        Raises DocumentBusyError if another process has locked it for longer than a removal takes.
        """
        is_fetched = False
        for _ in range(_LOCK_ATTEMPTS):
            if not is_fetched and not self.fetch(path):
                return False
            is_fetched = True
            with self._lock:
                use = self._uses[path]
                if use.descriptor >= 0 and is_at(path, use.descriptor):
                    return True
                try:
                    descriptor = os.open(path, os.O_RDONLY | system.file_flags("O_CLOEXEC"))
                except OSError:
                    is_fetched = False  # Another process has just removed the file.
                    continue
                if lock_if_possible(descriptor, shared=True) and is_at(path, descriptor):
                    _close(use.descriptor)
                    use.descriptor = descriptor
                    return True
                os.close(descriptor)
            time.sleep(_LOCK_INTERVAL)  # Another process is removing or replacing the file.
        raise DocumentBusyError(
            f"{path}: another process is removing or replacing this document; try again later"
        )

    def is_in_use(self, path: Path) -> bool:
        """Tell whether this process uses a document, or waits for it."""
        with self._lock:
            return path in self._uses

    def remove(self, path: Path) -> bool:
        """Remove a document, if there is one; returns False if a process of this machine holds it.

        A document is held by a process that has called hold(), not by one that only waits for it.
        Raises OSError if a file cannot be removed.
        """
        with self._lock:
            use = self._uses.get(path)
            if (use is not None and use.descriptor >= 0) or not _removed(path):
                return False
        if self._storage is not None:
            self._storage.remove(self._key(path))
        return True

    def make_room_for_text(self, path: Path, n_bytes: int) -> None:
        """Remove the least recently used documents for a text that will be read into `path`.

        `n_bytes`: the size of the text. Raises SessionFileError if this text and those that wait
        exceed the limit even without documents.
        """
        limit = self._limit_bytes
        if limit is None:
            return
        waiting = self._bytes_of_texts(path) + n_bytes
        if waiting > limit:
            raise SessionFileError(
                f"it and other texts that wait take {waiting / 2**20:.1f} MiB, and all documents "
                f"may take {limit / 2**20:.1f} MiB (--documents-limit); send it later, or raise "
                "the limit"
            )
        self._drop_beyond(limit - waiting, path)

    def _make_room(self, newest: Path) -> None:
        if self._limit_bytes is None:
            return
        size = newest.stat().st_size
        if size > self._limit_bytes:
            newest.unlink(missing_ok=True)
            raise SessionFileError(
                f"the document takes {size / 2**20:.1f} MiB, and all may take "
                f"{self._limit_bytes / 2**20:.1f} MiB (--documents-limit); give a smaller KV "
                "budget or a higher limit"
            )
        self._drop_beyond(self._limit_bytes - self._bytes_of_texts(newest), newest)

    def _bytes_of_texts(self, without: Path) -> int:
        """Return the bytes of all texts that wait to be read, without the one that will be read
        into `without`.
        """
        total = 0
        for path in self.directory.rglob(f"*{SUFFIX}{TEXT}"):
            with suppress(OSError):
                total += path.stat().st_size if path != text_file_of(without) else 0
        return total

    def _drop_beyond(self, limit_bytes: int, newest: Path) -> None:
        """Remove the least recently used documents until all take at most `limit_bytes`, but none
        in use, and not `newest`.
        """
        files = []
        for path in self.directory.rglob(f"*{SUFFIX}"):
            with suppress(OSError):  # Another process may remove the file meanwhile.
                files.append((last_use(path) or 0.0, path.stat().st_size, path))

        def remove(path: Path) -> bool:
            with self._lock:
                return path != newest and path not in self._uses and _removed(path)

        remove_oldest(files, limit_bytes, remove)


def folder_of(place: str | os.PathLike[str], limit_bytes: int | None) -> DocumentFolder:
    """Return the folder for a directory, or for an address in object storage; `limit_bytes`: as in
    DocumentFolder.

    The copies of what is stored at an address are in the user's cache directory. Raises OSError if
    the directory cannot be made, and the errors of ObjectStorage().
    """
    if not is_address(place):
        return DocumentFolder(Path(place), limit_bytes)
    storage = ObjectStorage(os.fspath(place))
    name = hashlib.blake2b(storage.address.encode(), digest_size=16).hexdigest()
    return DocumentFolder(system.cache_folder() / "documents" / name, limit_bytes, storage)


@contextmanager
def local_document(place: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the file of a document on the disk: its own, or the copy of one in object storage.

    A copy stays where it is while the block runs. Raises SessionFileError if there is no such
    document, and the errors of folder_of().
    """
    if not is_address(place):
        yield Path(place)
        return
    folder, path = _copy_of(place)
    with folder.in_use(path):
        if not folder.hold(path):
            raise SessionFileError(f"{place}: no such file; give the address of a document")
        yield path


@contextmanager
def written_document(place: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the file to write a document into; at the end, the document is stored if `place` is an
    address.

    An interrupted reading leaves its partial file on the disk. Raises the errors of folder_of() and
    DocumentFolder.keep().
    """
    if not is_address(place):
        yield Path(place)
        return
    folder, path = _copy_of(place)
    with folder.in_use(path):
        yield path
        folder.keep(path)


def _copy_of(address: str | os.PathLike[str]) -> tuple[DocumentFolder, Path]:
    """Return the folder and the file of the copy of a document in object storage."""
    parent, _, name = os.fspath(address).rpartition("/")
    folder = folder_of(parent, None)
    return folder, folder.directory / name


def partial_of(path: Path) -> Path:
    """Return the path of the partial file of a document, from which its reading can go on."""
    return path.with_name(path.name + PARTIAL)


def text_file_of(path: Path) -> Path:
    """Return the path of the file of the text that will be read into a document."""
    return path.with_name(path.name + TEXT)


def _origin(path: Path) -> Path:
    return path.with_name(path.name + _ORIGIN)


def _origin_text(stamp: FileStamp | None, copy: FileStamp | None) -> str:
    """Return the text for the small file beside a copy: the file with the stamp `copy` is a copy of
    the version with the stamp `stamp`.
    """
    return f"{stamp} {copy}"


def last_use(path: Path) -> float | None:
    """Return when a document was written or used last, in seconds since 1970; None if there is no
    such file.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return max(status.st_atime, status.st_mtime)


def note_use(path: Path) -> None:
    """Record that a document is used now, as a time stamp of its file, which all processes see."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | system.file_flags("O_CLOEXEC"))
        try:
            # The times are set through the descriptor: another process may have put a new file in
            # its place, whose times must stay.
            changed_ns = os.fstat(descriptor).st_mtime_ns
            system.set_times(path, descriptor, used_ns=time.time_ns(), changed_ns=changed_ns)
        finally:
            os.close(descriptor)


def _removed(path: Path) -> bool:
    """Remove the file of a document, and the small file that says of what it is a copy. Returns
    False if a process has locked the document. Raises OSError if a file cannot be removed.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | system.file_flags("O_CLOEXEC"))
        except FileNotFoundError:
            break
        if not lock_if_possible(descriptor):
            os.close(descriptor)
            return False
        if not is_at(path, descriptor):  # Another process has removed or replaced the file.
            os.close(descriptor)
            continue
        if not system.remove_and_close(path, descriptor):
            path.unlink(missing_ok=True)  # If this fails, its OSError says why.
        break
    _origin(path).unlink(missing_ok=True)
    return True


@contextmanager
def _locked_for_reading(path: Path) -> Iterator[None]:
    """Hold a shared lock on a file in the `with` block, so that _removed() does not remove it."""
    descriptor = os.open(path, os.O_RDONLY | system.file_flags("O_CLOEXEC"))
    try:
        lock_if_possible(descriptor, shared=True)
        yield
    finally:
        os.close(descriptor)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
