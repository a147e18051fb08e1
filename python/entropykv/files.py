"""Write new files under a temporary name and rename them, read texts and JSON of others, tell
versions of a file apart, and remove the oldest of many files.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from entropykv import system
from entropykv.errors import ContextError, EntropyKVError

NOT_UTF8 = "not a text in UTF-8; convert it first, for example with `iconv -f latin1 -t utf-8`"
_UTF8 = "utf-8-sig"
"""UTF-8 with or without the byte order mark that editors of Windows put before it."""
MOST_CHARACTERS = 1 << 28
"""The most characters of a text that is read: a device may have no end."""
_TOO_LONG = f"is longer than {MOST_CHARACTERS >> 20} MiB"
_TOKEN_BYTES = 4
"""How many random bytes are in the name of a file that is being written."""
FileStamp = tuple[int, int, int]
"""Distinguishes two versions of a file: see stamp_of(); the second number is the file's bytes."""


def stamp_of(path: Path) -> FileStamp | None:
    """Return when a file was changed last in nanoseconds, its bytes and its inode; None if there is
    no file, or none that can be examined.
    """
    try:
        status = path.stat()
    except OSError:  # Windows also refuses the names of files that are being removed.
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder that only its owner can read, and those above it, unless they exist; raises
    OSError if that is impossible.
    """
    Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)


def remove_oldest(
    files: Iterable[tuple[float, int, Path]], most_bytes: int, remove: Callable[[Path], bool]
) -> None:
    """Remove files, those with the earliest time first, until the others have at most `most_bytes`.

    `files`: time, bytes and path of each. `remove` may leave a file, and then returns False.
    """
    oldest = sorted(files)
    total = sum(size for _, size, _ in oldest)
    for _, size, path in oldest:
        if total <= most_bytes:
            return
        with suppress(OSError):  # Windows keeps a file that another process reads.
            total -= size if remove(path) else 0


@contextmanager
def new_file(target: str | os.PathLike[str], *, private: bool = False) -> Iterator[Path]:
    """Yield an empty file beside `target`; at the end, it is synced to disk and renamed to
    `target`.

    `private`: whether only its owner can read the file, whatever the umask allows; Windows has no
    such mode, and its folders decide. On an error, the new file is removed and `target` is
    unchanged. A process that is killed leaves the new file behind: see remove_left_overs(). Raises
    OSError if it cannot be written, and NotRegularError for a pipe or a device, which the new file
    would replace.
    """
    target = Path(target)
    obstacle = system.name_obstacle(target)
    if obstacle is not None:
        raise OSError(errno.EINVAL, obstacle)
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise NotRegularError(0, "is not a regular file")
    part = target.parent / f".{target.name}.{secrets.token_hex(_TOKEN_BYTES)}.part"
    try:  # An interrupt may come as soon as the file is there.
        try:
            with open(part, "xb", opener=partial(os.open, mode=0o600 if private else 0o666)):
                pass
        except ValueError as error:  # The name has a null byte.
            raise OSError(errno.EINVAL, str(error)) from error
        yield part
        system.sync(part)
        os.replace(part, target)
        system.sync_folder(target.parent)
    finally:
        with suppress(OSError, ValueError):
            part.unlink(missing_ok=True)


def remove_left_overs(target: str | os.PathLike[str]) -> None:
    """Remove the files that killed processes have left beside `target` while they wrote it.

    The caller makes sure that no other process writes `target` meanwhile.
    """
    target = Path(target)
    part = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}\.part")
    with suppress(OSError):
        left = [each.name for each in os.scandir(target.parent) if part.fullmatch(each.name)]
        for name in left:
            (target.parent / name).unlink(missing_ok=True)


def json_of(text: str | bytes) -> Any:
    """Return what a text says as JSON; None if it is not JSON, or too deeply nested to be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def limited_text(path: str | os.PathLike[str]) -> str:
    """Return the content of a UTF-8 file, without a byte order mark. Raises UnicodeDecodeError, and
    OSError, also for more than MOST_CHARACTERS characters.
    """
    with open(path, encoding=_UTF8) as file:
        text = file.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise OSError(errno.EFBIG, _TOO_LONG)
    return text


def read_text(path: str | os.PathLike[str], refusal: type[EntropyKVError]) -> str:
    """Return the content of a UTF-8 file, without a byte order mark; raises `refusal`, in one
    sentence, if it cannot be read.
    """
    try:
        return limited_text(path)
    except OSError as error:
        raise refusal(f"{path}: {error.strerror}; give a text file") from None
    except UnicodeDecodeError:
        raise refusal(f"{path}: {NOT_UTF8}") from None


def read_standard_input() -> str:
    """Return the text of standard input; raises ContextError for bytes that are no text, and for
    more than MOST_CHARACTERS characters.
    """
    try:
        text = sys.stdin.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise ContextError(f"standard input: {NOT_UTF8}") from None
    if len(text) > MOST_CHARACTERS:
        raise ContextError(f"standard input: {_TOO_LONG}; give a shorter text")
    return text


class NotRegularError(OSError):
    """Raised for a path to a folder, a pipe or a device where a regular file is needed."""


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    """Open a regular file for reading; raises NotRegularError for any other, because opening a pipe
    would wait for its writer, and a device may have no end, and OSError if it cannot be opened.
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
