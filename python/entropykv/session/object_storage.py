"""Keep the files of documents in object storage (S3, Google Cloud Storage, and others of fsspec).

A document there has an address such as s3://bucket/folder/book.kv. A machine reads a document from
a copy on its own disk. If the file in the storage has changed since, the copy is fetched again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from entropykv import system
from entropykv.errors import (
    MissingExtraError,
    SessionFileError,
    SettingsError,
    StorageError,
    reason_of,
)
from entropykv.file_locks import lock_if_possible, remove_unlocked
from entropykv.files import FileStamp, stamp_of
from entropykv.session.file import DIGEST_BYTES, SessionReader

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_COPIED = ".copied"
"""The ending of a file that is being copied from a storage, or to a directory (file://)."""
_HEADER_BLOCK = 1 << 18
"""How many bytes are read at a time from a file of which only the header is wanted."""


def is_address(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is the address of a file in object storage."""
    return _ADDRESS.match(os.fspath(path)) is not None


class ObjectStorage:
    """Store, fetch and remove files below an address; any thread may call it.

    Keys are paths below the address, with slashes. All functions raise StorageError if the storage
    refuses or does not answer.
    """

    def __init__(self, address: str) -> None:
        """Use the storage of an address.

        Raises SettingsError for an impossible address, and MissingExtraError without fsspec or its
        package for this storage.
        """
        self.address = address.rstrip("/")
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415  (An optional dependency.)
            from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415

            # Listings are not kept: other machines change the storage, too.
            self._files, self._root = url_to_fs(self.address, use_listings_cache=False)
            self._is_of_files = isinstance(self._files, LocalFileSystem)
        except ImportError as error:
            raise MissingExtraError(
                f"{address}: object storage needs {error.name or 'a package'}; install "
                "entropykv[storage], and the package of fsspec for this storage (s3fs, gcsfs)"
            ) from None
        except Exception as error:
            raise SettingsError(f"{address}: cannot be used ({reason_of(error, 200)})") from None

    def stamp(self, key: str) -> FileStamp | None:
        """Return a stamp that differs between two versions of a file; None if there is no file."""
        with self._answers(key):
            try:
                path = self._path(key)
                size = self._files.info(path)["size"]
                digest = hashlib.blake2b(str(self._files.ukey(path)).encode(), digest_size=7)
            except FileNotFoundError:
                return None
            return int.from_bytes(digest.digest(), "big"), int(size), 0

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder; none if there is no such folder."""
        with self._answers(folder):
            try:
                found = self._files.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
            names = [each["name"].rpartition("/")[2] for each in found if each["type"] == "file"]
            return [name for name in names if not name.endswith(_COPIED)]

    @contextmanager
    def opened(self, key: str) -> Iterator[SessionReader]:
        """Yield a reader of a document's header: see open_session()."""
        with (
            self._answers(key),
            self._files.open(self._path(key), "rb", block_size=_HEADER_BLOCK) as file,
        ):
            yield SessionReader(cast(io.BufferedReader, file), key)

    def fetch(self, key: str, path: Path) -> FileStamp | None:
        """Copy a file to the disk, where it appears complete; returns the stamp of the copy, or
        None if there is no such file.
        """
        with self._answers(key):
            try:
                with _replaced(path, 0o600) as part:
                    self._files.get_file(self._path(key), str(part))
                    return stamp_of(part)
            except FileNotFoundError:
                return None

    def ends_as(self, key: str, path: Path) -> bool:
        """Tell whether a document in the storage ends with the same digest as the file at `path` on
        the disk.
        """
        with self._answers(key), path.open("rb") as file:
            file.seek(-min(DIGEST_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return bool(self._files.cat_file(self._path(key), start=-DIGEST_BYTES) == file.read())

    def store(self, path: Path, key: str) -> None:
        """Copy a file from the disk to the storage, where it appears complete.

        Object storage replaces a file as a whole. In a directory (file://), readers would see a
        half-written file, so there the copy is made beside the old file and renamed.
        """
        with self._answers(key):
            target = self._path(key)
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            if self._is_of_files:
                with _replaced(Path(target), 0o666) as part:
                    self._files.put_file(str(path), str(part))
                    system.sync(part)
            else:
                self._files.put_file(str(path), target)

    def remove(self, key: str) -> None:
        """Remove a file, if there is one."""
        with self._answers(key), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}" if key else str(self._root)

    @contextmanager
    def _answers(self, key: str) -> Iterator[None]:
        """Turn the errors of the storage, which may be of any kind, into StorageError."""
        try:
            yield
        except SessionFileError:
            raise
        except Exception as error:
            raise StorageError(
                f"{self.address}/{key}: the storage refuses or does not answer "
                f"({reason_of(error, 200)})"
            ) from error


@contextmanager
def _replaced(path: Path, mode: int) -> Iterator[Path]:
    """Yield a new file beside `path`, which gets the name `path` at the end, or is removed after an
    error.

    `mode`: the permissions of the new file, without those that the umask forbids. Files that killed
    processes have left half-copied are removed first. Raises OSError if a file cannot be made.
    """
    remove_unlocked(path.parent, f"{glob.escape(path.name)}.*{_COPIED}")
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_COPIED}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | system.file_flags("O_CLOEXEC")
    descriptor = os.open(part, flags, mode)
    try:
        lock_if_possible(descriptor)
        yield part
    except BaseException:
        system.remove_and_close(part, descriptor)
        raise
    system.rename_and_close(part, path, descriptor)
