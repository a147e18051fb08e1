"""Write new files under a temporary name and rename them, and read text files of users."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from entropykv import system
from entropykv.errors import EntropyKVError


@contextmanager
def new_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty file beside `target`; at the end, it is synced to disk and renamed to
    `target`.

    On an error, it is removed and `target` is unchanged. Raises OSError if it cannot be written.
    """
    target = Path(target)
    obstacle = system.name_obstacle(target)
    if obstacle is not None:
        raise OSError(errno.EINVAL, obstacle)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb"):
            pass
    except ValueError as error:  # The name has a null byte.
        raise OSError(errno.EINVAL, str(error)) from error
    try:
        yield part
        system.sync(part)
        os.replace(part, target)
        system.sync_folder(target.parent)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def read_text(path: str | os.PathLike[str], refusal: type[EntropyKVError]) -> str:
    """Return the content of a UTF-8 file; raises `refusal`, in one sentence, if it cannot
    be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise refusal(f"{path}: {error.strerror}; give a text file") from None
    except UnicodeDecodeError:
        raise refusal(f"{path}: not a text in UTF-8; convert it first") from None


class NotRegularError(OSError):
    """Says that a path names a folder, a pipe or a device, where a file is needed."""


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    """Open a regular file for reading; raises NotRegularError for any other, because opening a pipe
    would wait for its writer, and a device may have no end.
    """
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # The name has a null byte.
        raise OSError(0, str(error)) from error
    if stat.S_ISDIR(mode):
        raise NotRegularError(0, "is a directory")
    if not stat.S_ISREG(mode):
        raise NotRegularError(0, "is not a regular file")
    with open(path, "rb") as file:
        yield file
