"""Keep a text that a server has accepted on the disk until it was read, so that no crash loses it.

The file has one line of JSON (the files that the text came from, its system message, its bytes),
and then the text in UTF-8. The server that reads the text, or lets it wait, holds a lock on the
file. If that server dies, another one continues.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from entropykv import system
from entropykv.errors import DocumentBusyError
from entropykv.file_locks import lock_patiently
from entropykv.files import new_file, open_regular, remove_left_overs
from entropykv.session.document import MOST_NAMES, MOST_TEXT_BYTES

_MOST_LINE_BYTES = 1 << 20
"""The longest first line, which has names of files and a system message."""
_UTF8 = ("utf-8", "surrogatepass")
"""JSON can have lone surrogates, which UTF-8 alone cannot."""


@dataclass(frozen=True)
class Accepted:
    """Hold a text, the files that it came from, and its system message."""

    text: str
    names: list[str]
    system: str | None = None


class AcceptedText:
    """Own the file of a text until it is removed, or released for another server."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Own an open file; `descriptor` is -1 if another process has taken it meanwhile."""
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def write(cls, path: Path, accepted: Accepted) -> AcceptedText:
        """Write the file, which is on the disk when this returns; raises OSError.

        What a process has left that was killed while it wrote the same text is removed.
        """
        data = bytes_of(accepted)
        remove_left_overs(path)
        with new_file(path, private=True) as part:
            part.write_bytes(data)
        return cls(path, _locked(path))

    @classmethod
    def take(cls, path: Path) -> AcceptedText | None:
        """Take over the file of a server that has ended; None if there is none.

        Raises DocumentBusyError if the server is running.
        """
        descriptor = _locked(path)
        if descriptor >= 0:
            return cls(path, descriptor)
        if not path.exists():
            return None
        raise DocumentBusyError(f"{path}: another server reads this text; wait for it")

    def remove(self) -> None:
        """Remove the file, whose text was read or is not wanted any more."""
        if self._descriptor >= 0:
            system.remove_and_close(self.path, self._descriptor)
        self._descriptor = -1

    def release(self) -> None:
        """Leave the file to the next server that looks for it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def bytes_of(accepted: Accepted) -> bytes:
    """Return what the file of a text contains."""
    text = accepted.text.encode(*_UTF8)
    head = {"names": accepted.names[:MOST_NAMES], "system": accepted.system, "bytes": len(text)}
    return json.dumps(head).encode() + b"\n" + text


def read_accepted(path: Path) -> Accepted | None:
    """Return the text in a file; None if there is none, or if the file is damaged."""
    try:
        with open_regular(path) as file:
            head = json.loads(file.readline(_MOST_LINE_BYTES))
            data = file.read(MOST_TEXT_BYTES + 1)
        names, said, size = head["names"], head["system"], head["bytes"]
        text = data.decode(*_UTF8)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not are_names or not isinstance(said, str | None) or size != len(data):
        return None
    return Accepted(text, names, said)


def _locked(path: Path) -> int:
    """Open and lock a file; returns -1 if there is none, or if another process has locked it."""
    try:
        descriptor = os.open(path, os.O_RDWR | system.file_flags("O_CLOEXEC"))
    except OSError:
        return -1
    try:
        if lock_patiently(descriptor):
            return descriptor
    except OSError:  # A file system without locks has one server.
        return descriptor
    os.close(descriptor)
    return -1
