"""Locks on files: they say that a living process uses a file, since a killed one loses its locks.

Where a file system has no locks, it is assumed that one process at a time uses a file.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from entropykv import system

_ATTEMPTS, _INTERVAL = 4, 0.02


def lock_if_possible(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file; returns False if a process has a lock that excludes this one.

    Without locks in the file system, returns True. `shared`: see system.lock().
    """
    try:
        return system.lock(descriptor, shared=shared)
    except OSError:
        return True


def lock_patiently(descriptor: int) -> bool:
    """Lock an open file, although is_locked() of another process may have locked it for a moment.

    Returns False if another process keeps a lock. Raises OSError if the file system has no locks.
    """
    for _ in range(_ATTEMPTS):
        if system.lock(descriptor):
            return True
        time.sleep(_INTERVAL)
    return False


def is_locked(path: Path) -> bool:
    """Tell whether a living process has locked a file; False if it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDWR | system.file_flags("O_CLOEXEC"))
    except OSError:
        return False
    try:
        return not lock_if_possible(descriptor)
    finally:
        os.close(descriptor)


def is_at(path: Path, descriptor: int) -> bool:
    """Tell whether an open file is the one that the path names now."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def remove_unlocked(folder: Path, pattern: str) -> None:
    """Remove the files in `folder` that match a glob pattern, and that no living process has
    locked.

    A file system without locks keeps them. Raises nothing.
    """
    for left in folder.glob(pattern):
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDWR | system.file_flags("O_CLOEXEC"))
            try:
                is_left = system.lock(descriptor)
            except OSError:
                is_left = False
            if is_left:
                system.remove_and_close(left, descriptor)
            else:
                os.close(descriptor)
