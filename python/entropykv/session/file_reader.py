"""Read the file of a saved session without trusting it: session/file.py says what it looks like."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from entropykv.errors import SessionFileError
from entropykv.files import open_regular
from entropykv.session.file import (
    AGAIN,
    DIGEST_BYTES,
    MAGIC,
    PREFIX,
    VERSION,
    SavedContents,
    SavedSettings,
)

_MOST_HEADER_BYTES = 1 << 26
_MOST = 1 << 31  # of tokens, or of entries
_MOST_BYTES = 1 << 53


@contextmanager
def open_session(path: str | os.PathLike[str]) -> Iterator[SessionReader]:
    """Open a saved session and check its header; raises SessionFileError, naming the file."""
    try:
        with open_regular(path) as file:
            yield SessionReader(file, str(path))
    except FileNotFoundError:
        raise SessionFileError(f"{path}: no such file; give the path of a saved session") from None
    except OSError as error:
        raise SessionFileError(
            f"{path}: cannot be read ({error.strerror}); give the path of a saved session"
        ) from error


def reader_of(data: bytes) -> SessionReader:
    """Read a session that was saved into memory, as open_session() reads one from a file."""
    return SessionReader(io.BytesIO(data), "the saved state")


class SessionReader:
    """Read a saved session whose header is checked; sections() reads and checks the rest."""

    def __init__(self, file: io.BufferedReader | io.BytesIO, where: str) -> None:
        """Read the header; raises SessionFileError where it is not what write_session writes."""
        self.where = where
        self._file = file
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._size = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.settings, self.contents = self._header()

    def _header(self) -> tuple[SavedSettings, SavedContents]:
        prefix = self._file.read(PREFIX.size)
        self._digest.update(prefix)
        if not prefix or not prefix.startswith(MAGIC[: len(prefix)]):
            raise SessionFileError(
                f"{self.where}: is not a saved session; give a file of --save-session "
                "(Session.save)"
            )
        if len(prefix) < PREFIX.size:
            raise self._cut(PREFIX.size)
        _, version, size = PREFIX.unpack(prefix)
        if version != VERSION:
            raise SessionFileError(
                f"{self.where}: has version {version} of the format, but this entropykv reads "
                f"version {VERSION}; load it with the entropykv that saved it, or {AGAIN}"
            )
        if size > _MOST_HEADER_BYTES:
            raise self.damaged(f"a header of {size} bytes")
        header = self._read(size)
        self._check_digest("header")
        return self._parse(bytes(header))

    def _parse(self, header: bytes) -> tuple[SavedSettings, SavedContents]:
        try:
            data = json.loads(header)
            settings = SavedSettings(**data["settings"])
            contents = SavedContents(**data["contents"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self.damaged("a header that cannot be read") from error
        for name, value in (*vars(settings).items(), *vars(contents).items()):
            if not _is_possible(name, value):
                raise self.damaged(f"an impossible {name}")
        return settings, contents

    def sections(self) -> list[bytearray]:
        """Return tokens, logits and the store's sections, checked against the digest."""
        contents = self.contents
        sizes = [4 * contents.n_tokens, 4 * contents.n_logits, *contents.sections]
        expected = self._file.tell() + sum(sizes) + DIGEST_BYTES
        if self._size < expected:
            raise self._cut(expected)
        if self._size > expected:
            raise self.damaged(f"{self._size - expected} bytes too many")
        sections = [self._read(size) for size in sizes]
        self._check_digest("contents")
        return sections

    def _read(self, size: int) -> bytearray:
        if self._file.tell() + size > self._size:
            raise self._cut(self._file.tell() + size)
        data = bytearray(size)
        if self._file.readinto(data) != size:
            raise self._cut(self._size)
        self._digest.update(data)
        return data

    def _check_digest(self, what: str) -> None:
        expected = self._digest.digest()
        if self._read(DIGEST_BYTES) != expected:
            raise self.damaged(f"the digest of its {what} is another one")

    def _cut(self, expected: int) -> SessionFileError:
        return SessionFileError(
            f"{self.where}: is cut short, {self._size} of at least {expected} bytes; {AGAIN}"
        )

    def damaged(self, what: str) -> SessionFileError:
        """Return the error for a file that is not as it was written."""
        return SessionFileError(f"{self.where}: is damaged ({what}); {AGAIN}")


_TEXTS = {"entropykv", "llama_cpp_python", "model", "store", "kv_type", "policy", "kv_budget"}
_MAY_BE_NONE = {"chat", "freeze", "recent_window", "sequence_state"}
_LARGE = {"evicted": _MOST_BYTES, "sections": _MOST_BYTES}


def _is_possible(name: str, value: object) -> bool:
    """Tell whether a value of the header is of the kind that its field has."""
    if value is None:
        return name in _MAY_BE_NONE
    if name in _TEXTS or name == "freeze":
        return isinstance(value, str)
    if name == "fingerprint":
        return isinstance(value, dict)
    if name in ("chat", "recalls_now"):
        return isinstance(value, bool)
    rows = value if name in ("entries", "images") else [value if name == "sections" else [value]]
    most = _LARGE.get(name, _MOST)
    if not isinstance(rows, list) or not all(_are_counts(row, most) for row in rows):
        return False
    return name != "images" or all(len(row) == 3 for row in rows)


def _are_counts(values: object, most: int) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < most for value in values
    )
