"""Write new files beside their place and rename them into it, and read texts that users name."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from entropykv.errors import EntropyKVError


@contextmanager
def new_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Give an empty file beside `target` that becomes it in the end, on the disk too.

    Where anything goes wrong, it is removed and `target` stays as it was. Raises OSError where it
    cannot be written.
    """
    target = Path(target)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb"):
            pass
    except ValueError as error:  # the name has a null byte
        raise OSError(errno.EINVAL, str(error)) from error
    try:
        yield part
        _sync(part)
        os.replace(part, target)
        with suppress(OSError):  # not every file system can sync a directory
            _sync(target.parent)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: str | os.PathLike[str], refusal: type[EntropyKVError]) -> str:
    """Return the content of a UTF-8 file; raises `refusal`, in one sentence, for anything else."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise refusal(f"{path}: {error.strerror}; give a text file") from None
    except UnicodeDecodeError:
        raise refusal(f"{path}: not a text in UTF-8; convert it first") from None


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    """Open a regular file to read it; raises OSError for all else: a pipe would wait for ever."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # the name has a null byte
        raise OSError(0, str(error)) from error
    if stat.S_ISDIR(mode):
        raise OSError(0, "is a directory")
    if not stat.S_ISREG(mode):
        raise OSError(0, "is not a regular file")
    with open(path, "rb") as file:
        yield file
