"""Check that all replicas see the documents of one directory, or of one storage.

Any replica may answer a request about a document, so that each must see what the others have read.
Whether a path names the same directory on several machines cannot be known from the path. So the
process that starts the replicas leaves a mark there, which each of them looks for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from entropykv import system
from entropykv.errors import EntropyKVError, SettingsError
from entropykv.file_locks import lock_if_possible, remove_unlocked
from entropykv.files import make_folder
from entropykv.session.object_storage import ObjectStorage, is_address

_MARK = ".replicas-"
"""The beginning of a mark's name, which no document can have."""


@contextmanager
def marked(place: str) -> Iterator[str]:
    """Leave a mark in the directory, or at the address, while the block runs; yields its name.

    Raises SettingsError if it cannot be written, and the errors of ObjectStorage.
    """
    name = f"{_MARK}{secrets.token_hex(8)}"
    with _stored(place, name) if is_address(place) else _written(Path(place), name):
        yield name


def check_shared(place: str, mark: str) -> None:
    """Raise SettingsError if this machine does not see the mark, and the errors of
    ObjectStorage.
    """
    if is_address(place):
        is_seen = ObjectStorage(place).stamp(mark) is not None
    else:
        is_seen = (Path(place) / mark).exists()
    if not is_seen:
        raise SettingsError(
            f"{place}: replicas on {socket.gethostname()} do not see the documents that the others "
            "keep there; give a directory that all nodes share, or an address in object storage "
            "(--documents)"
        )


@contextmanager
def _written(folder: Path, name: str) -> Iterator[None]:
    """Write the mark as a locked file while the block runs; marks of processes that were killed are
    removed.
    """
    try:
        make_folder(folder)
        remove_unlocked(folder, f"{_MARK}*")
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise SettingsError(
            f"{folder}: documents cannot be kept there ({error.strerror}); give another directory "
            "(--documents)"
        ) from None
    try:
        lock_if_possible(descriptor)
        yield
    finally:
        system.remove_and_close(folder / name, descriptor)


@contextmanager
def _stored(address: str, name: str) -> Iterator[None]:
    storage = ObjectStorage(address)
    with tempfile.TemporaryDirectory(prefix="entropykv-") as directory:
        mark = Path(directory) / name
        mark.write_bytes(b"replicas look for this")
        storage.store(mark, name)
    try:
        yield
    finally:
        # A mark that cannot be removed takes only a few bytes.
        with contextlib.suppress(EntropyKVError):
            storage.remove(name)
