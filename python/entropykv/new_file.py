"""Files that are written beside their place and renamed into it: never half a file."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def new_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Give an empty file beside `target` that becomes it in the end, on the disk too.

    Where anything goes wrong, it is removed and `target` stays as it was. OSError where it cannot
    be written.
    """
    target = Path(target)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb"):
            pass
    except ValueError as error:  # a null byte
        raise OSError(errno.EINVAL, str(error)) from error
    try:
        yield part
        _sync(part)
        os.replace(part, target)
        with suppress(OSError):  # not every file system knows it of directories
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
