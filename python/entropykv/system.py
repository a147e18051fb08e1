"""Do what every operating system does in its own way: locks, memory, files, signals, terminals.

Other modules call these functions and name no operating system. `WINDOWS` is read at every call, so
that tests can set it. On Windows, read_at(), write_at() and lock() move the position of the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, TextIO

WINDOWS = os.name == "nt"
"""Whether this is Windows."""

_LOCKED_BYTE = 0x7FFF_FFFE
"""The offset of the byte that is locked on Windows: its C library takes offsets of 31 bits, and
lets the holder of the lock read and write there.
"""
_STREAMS = (
    ("stdin", os.O_RDONLY, "utf-8-sig", "strict"),
    ("stdout", os.O_RDONLY, "utf-8", "replace"),
    ("stderr", os.O_WRONLY, "utf-8", "backslashreplace"),
)
"""The standard streams: how the null device takes the place of a closed one, the encoding, and what
becomes of what it cannot encode. Nothing can be written to the output that takes stdout's place.
"""
_SHOWS_ESCAPES = 4
"""The bit ENABLE_VIRTUAL_TERMINAL_PROCESSING of a console's mode."""
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])", re.IGNORECASE)
_NOT_IN_NAMES = re.compile(r'[<>:"|?*\x00-\x1f]')


def file_flags(*names: str) -> int:
    """Return flags for os.open(), such as "O_NOFOLLOW"; a system's missing flags count as 0."""
    return sum(getattr(os, name, 0) for name in {*names})


def private_file_flags() -> int:
    """Return the flags of os.open() for a new file that only this process uses.

    Windows removes such a file when its process ends, and lets it be removed before.
    """
    return (
        os.O_RDWR
        | os.O_CREAT
        | os.O_EXCL
        | file_flags("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY", "O_NOINHERIT", "O_TEMPORARY")
    )


def existing_file_flags() -> int:
    """Return the flags of os.open() for a file of any kind; opening a pipe does not wait."""
    return os.O_RDWR | file_flags(
        "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_NOINHERIT"
    )


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read up to `size` bytes from `offset`, fewer at the end; raises OSError if that fails."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)


def write_at(descriptor: int, data: bytes, offset: int) -> int:
    """Write bytes at `offset`; returns how many were written. Raises OSError if none can be."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.write(descriptor, data)


def set_times(
    path: str | os.PathLike[str], descriptor: int, *, used_ns: int, changed_ns: int
) -> None:
    """Set the times of an open file, even if another file has got its name. On Windows, no file
    gets the name of an open one. Raises OSError if the times cannot be set.
    """
    target = descriptor if os.utime in os.supports_fd else path
    os.utime(target, ns=(used_ns, changed_ns))


def number_of(descriptor: int) -> int:
    """Return the number by which the extension knows an open file; on Windows, its handle's."""
    return int(_msvcrt().get_osfhandle(descriptor)) if WINDOWS else descriptor


def lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file until it is closed; returns False if another process holds the lock.

    Any number of processes may hold a `shared` lock, while none holds another one. On Windows, a
    `shared` lock does nothing: it would keep other processes from removing the file, and Windows
    removes no open file. Raises OSError if the file system has no locks.
    """
    try:
        if WINDOWS and shared:
            return True
        if WINDOWS:
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            _msvcrt().locking(descriptor, _msvcrt().LK_NBLCK, 1)
        else:
            fcntl: Any = importlib.import_module("fcntl")
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except PermissionError:  # Windows raises this for another process's lock.
        if WINDOWS:
            return False
        raise
    return True


def cache_folder() -> Path:
    """Return the folder of this package below the user's cache directory; it may not exist."""
    if WINDOWS:
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "entropykv"


def remove_and_close(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Remove a file that is open, and close it; returns whether it was removed. Raises nothing.

    A lock is held until the file is removed, so that no other process takes the file before.
    Windows removes only files that are closed, and none that another process has taken since.
    """
    if WINDOWS:
        _close(descriptor)
    removed = False
    with contextlib.suppress(OSError):
        os.unlink(path)
        removed = True
    if not WINDOWS:
        _close(descriptor)
    return removed


def rename_and_close(
    path: str | os.PathLike[str], target: str | os.PathLike[str], descriptor: int
) -> None:
    """Rename a file that is open, replacing `target`, and close it in any case; raises OSError if
    it cannot be renamed.

    A lock is held until the file has its new name, except on Windows, which renames only files that
    are closed.
    """
    if WINDOWS:
        _close(descriptor)
    try:
        os.replace(path, target)
    finally:
        if not WINDOWS:
            _close(descriptor)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def sync(path: str | os.PathLike[str]) -> None:
    """Have the system write a file to the disk; raises OSError if it cannot."""
    descriptor = os.open(path, os.O_RDWR)  # Windows syncs no file that is open for reading.
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Write the names in a folder to the disk where the system and the file system can do so."""
    if WINDOWS:
        return  # Windows writes names by itself, and opens no folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def name_obstacle(path: str | os.PathLike[str]) -> str | None:
    """Return why this system cannot have a file of this name; None if it can.

    Windows would open a device for "NUL.gguf", write "a:b" into a hidden part of the file "a", and
    drop a dot at the end.
    """
    if not WINDOWS:
        return None
    for part in PurePath(os.path.splitdrive(os.fspath(path))[1].replace("\\", "/")).parts:
        if part in ("/", ".", ".."):
            continue
        if _NOT_IN_NAMES.search(part):
            return f'{part!r} has a character that Windows has in no name: < > : " | ? *'
        if part.endswith((".", " ")):
            return f"{part!r} ends with a dot or a space, which Windows would drop"
        if _DEVICES.fullmatch(part.split(".")[0].rstrip(" ")):
            return f"{part!r} is the name of a device of Windows"
    return None


def c_function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library that Python uses; None if it has none of this name.

    Windows has none of the functions that callers ask for.
    """
    if WINDOWS:
        return None
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function


def peak_rss_bytes() -> int:
    """Return the largest memory of this process so far, in bytes."""
    if WINDOWS:
        return _peak_on_windows()
    status = Path("/proc/self/status")
    # VmHWM covers only this program, whereas getrusage() also includes its parent before exec.
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    resource: Any = importlib.import_module("resource")
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory() -> int | None:
    """Return the bytes of memory that processes may still take; None where the system does not say
    it in a file.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


class _MemoryCounters(ctypes.Structure):
    """Repeat PROCESS_MEMORY_COUNTERS of Windows."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("page_faults", ctypes.c_uint32),
        ("peak", ctypes.c_size_t),
        ("others", ctypes.c_size_t * 7),
    )


def _peak_on_windows() -> int:
    kernel = _kernel32()
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    counters = _MemoryCounters(size=ctypes.sizeof(_MemoryCounters))
    process = ctypes.c_void_p(kernel.GetCurrentProcess())
    kernel.K32GetProcessMemoryInfo(process, ctypes.byref(counters), counters.size)
    return int(counters.peak)


def keep_address(listener: socket.socket) -> None:
    """Set the option with which a socket gets the address of a server that has just ended, but not
    of one that runs.

    On Windows that is the default, and SO_REUSEADDR would share the address of a running server.
    """
    option = getattr(socket, "SO_EXCLUSIVEADDRUSE") if WINDOWS else socket.SO_REUSEADDR  # noqa: B009
    listener.setsockopt(socket.SOL_SOCKET, option, 1)


def ending_signals() -> tuple[int, ...]:
    """Return the signals by which others end a process: SIGTERM, and on Windows SIGBREAK, which
    Ctrl-Break and a window that is closed send.
    """
    names = ("SIGTERM", "SIGBREAK")
    return tuple(int(getattr(signal, name)) for name in names if hasattr(signal, name))


def shows_escapes(stream: TextIO) -> bool:
    """Tell whether a stream is a terminal that shows escape sequences, such as those of colours.

    On Windows, this function first tells the console to show them.
    """
    if not stream.isatty():
        return False
    return not WINDOWS or _console_shows_escapes(stream)


def _console_shows_escapes(stream: TextIO) -> bool:
    kernel = _kernel32()
    console = ctypes.c_void_p(number_of(stream.fileno()))
    mode = ctypes.c_uint32()
    if not kernel.GetConsoleMode(console, ctypes.byref(mode)):
        return False
    return bool(kernel.SetConsoleMode(console, mode.value | _SHOWS_ESCAPES))


def prepare_streams() -> None:
    """Read and write UTF-8 on standard streams, whatever the locale says, and open closed ones.

    Input may begin with a byte order mark; what is not UTF-8 raises UnicodeDecodeError. A character
    that cannot be written, half of a surrogate pair, becomes a question mark. If a stream stayed
    closed, a file would get its number, and whatever a library prints. An output that was closed
    cannot be written to, which raises OSError, while notes on stderr go nowhere.
    """
    for descriptor, (name, flags, encoding, errors) in enumerate(_STREAMS):
        if not _is_open(descriptor):
            # The null device gets the lowest free number, which is `descriptor`.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            opened = open(os.open(os.devnull, flags), mode)  # noqa: SIM115  (until the end)
            setattr(sys, name, opened)
            setattr(sys, f"__{name}__", opened)
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors=errors)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _msvcrt() -> Any:
    return importlib.import_module("msvcrt")


def _kernel32() -> Any:
    return getattr(ctypes, "WinDLL")("kernel32")  # noqa: B009  (only Windows has it)
