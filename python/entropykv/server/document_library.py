"""Know the documents of a server: their files, what is being read, and which are in use.

A document is a file NAME.kv that session/document.py has written, in a folder of its user below the
directory of --documents; with several models, each has a folder with those of its users. Several
servers may share the directory: files appear complete or not at all, and a lock says which are
being read.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from entropykv import system
from entropykv.errors import SessionFileError, SettingsError
from entropykv.server.errors import RequestError
from entropykv.session.document import is_being_read, remove_partial
from entropykv.session.document_folder import (
    PARTIAL,
    SUFFIX,
    folder_of,
    last_use,
    make_folder,
    note_use,
    partial_of,
    stamp_of,
)
from entropykv.session.file import DocumentNote, open_session
from entropykv.session.object_storage import FileStamp

MOST_DOCUMENTS = 256
"""The most documents of one user; each is as large as the entries that it keeps."""
MOST_READINGS = 16
"""The most documents of a model that are read or wait for it; their texts are in memory."""
MOST_DOCUMENT_NAME = 128
_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MOST_DOCUMENT_NAME - 1}}}", re.ASCII)
_MOST_FAILURES = 256
"""How many failed readings are remembered; the oldest are forgotten first."""
_MOST_SUMMARIES = 4096

Status = Literal["queued", "reading", "ready", "interrupted", "failed"]


@dataclass(frozen=True)
class DocumentId:
    """Name a document: its model, the user whom it belongs to, and its name."""

    model: str
    user: str
    name: str


@dataclass
class Reading:
    """Hold a document that is being read, or waits for it, or could not be read."""

    id: DocumentId
    text: str
    names: Sequence[str]
    """The files that the text came from."""
    system: str | None = None
    """The system message before the text, which only `entropykv read` can begin with."""
    status: Status = "queued"
    n_read: int = 0
    n_tokens: int = 0
    error: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end the reading after its current micro-batch."""
    is_unwanted: bool = False
    """True if it was deleted: then nothing of it is kept."""
    ended: list[Any] = field(default_factory=list)
    """Functions that are called when it has ended."""


@dataclass(frozen=True)
class _Summary:
    """Hold what the header of a document's file says, without its text."""

    n_read: int
    n_tokens: int
    n_entries: int


class DocumentLibrary:
    """Find, count and remove the documents below a directory; any thread may call it."""

    def __init__(
        self, directory: str | os.PathLike[str], limit_bytes: int | None, *, several: bool
    ) -> None:
        """Make the directory if it does not exist; only its owner can read it.

        It may be an address in object storage: see folder_of(). `limit_bytes`: the most bytes of
        all complete documents on the disk; None: no limit. `several`: whether each model has a
        folder of its own. Raises SettingsError and MissingExtraError.
        """
        self._several = several
        self._lock = threading.Lock()
        self._readings: dict[Path, Reading] = {}
        self._summaries: dict[Path, tuple[FileStamp, _Summary]] = {}
        try:
            self._files = folder_of(directory, limit_bytes)
        except OSError as error:
            raise SettingsError(
                f"{directory}: documents cannot be kept there ({error.strerror}); give another "
                "directory (--documents)"
            ) from None

    # --- names and files --------------------------------------------------------------------------

    def folder(self, model: str, user: str) -> Path:
        """Return the folder of a user's documents of a model."""
        folder = self._files.directory
        if self._several:
            name = quote(model, safe="")
            folder = folder / (f"%2E{name[1:]}" if name.startswith(".") else name)
        return folder / user if user else folder

    def path(self, document: DocumentId) -> Path:
        """Return the file of a document; raises RequestError (400) for an impossible name."""
        name = document.name
        if not _NAME.fullmatch(name):
            raise RequestError(
                400,
                f"a document has a name of up to {MOST_DOCUMENT_NAME} letters, digits, dots, "
                "dashes and underscores, without a folder, that begins with no dot",
                param="name",
            )
        if (obstacle := system.name_obstacle(name + SUFFIX)) is not None:
            raise RequestError(400, f"name: {obstacle}; give another", param="name")
        return self.folder(document.model, document.user) / (name + SUFFIX)

    def names(self, model: str, user: str) -> list[str]:
        """Return the names of a user's documents of a model, in alphabetical order."""
        folder = self.folder(model, user)
        with self._lock:
            names = {path.name for path in self._readings if path.parent == folder}
        names |= {name.removesuffix(PARTIAL) for name in self._files.names(folder)}
        kept = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
        return sorted(name for name in kept if _NAME.fullmatch(name))

    # --- what there is to say of one --------------------------------------------------------------

    def status(self, document: DocumentId) -> dict[str, Any] | None:
        """Return what clients are told of a document; None if there is none of this name."""
        path = self.path(document)
        with self._lock:
            reading = self._readings.get(path)
            if reading is not None and reading.status != "failed":
                counts = {"tokens_read": reading.n_read, "tokens": reading.n_tokens}
                return self._told(document, reading.status, **counts)
        if (stamp := self._files.stamp(path)) is not None:
            return self._of_file(document, path, "ready", stamp)
        if reading is not None:
            return self._told(document, "failed", error=reading.error)
        partial = partial_of(path)
        is_read, stamp = is_being_read(path), stamp_of(partial)
        if stamp is not None:
            return self._of_file(document, partial, "reading" if is_read else "interrupted", stamp)
        return self._told(document, "reading") if is_read else None

    def _of_file(
        self, document: DocumentId, path: Path, status: Status, stamp: FileStamp
    ) -> dict[str, Any]:
        try:
            summary = self._summary(path, stamp)
        except SessionFileError as error:
            said = str(error).replace(str(path), document.name)  # Clients learn no paths.
            return self._told(document, "failed", error=said, bytes=stamp[1])
        used = last_use(path)
        return self._told(
            document,
            status,
            tokens_read=summary.n_read,
            tokens=summary.n_tokens,
            entries=summary.n_entries,
            bytes=stamp[1],
            used_at=None if used is None else int(used),
        )

    @staticmethod
    def _told(document: DocumentId, status: Status, **facts: Any) -> dict[str, Any]:
        told = {"tokens_read": 0, "tokens": 0, "entries": 0, "bytes": 0, "used_at": None}
        head = {"id": document.name, "object": "document", "model": document.model}
        return {**head, "status": status, **told, "error": None, **facts}

    def _summary(self, path: Path, stamp: FileStamp) -> _Summary:
        """Return what the header of a file says; raises SessionFileError if it is no document."""
        known = self._summaries.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        with self._files.opened(path) as reader:
            contents = reader.contents
        if contents.document is None:
            raise SessionFileError(f"{path}: is a saved session, not a document")
        summary = _Summary(contents.position, contents.document.n_tokens, contents.n_entries)
        if len(self._summaries) >= _MOST_SUMMARIES:
            self._summaries.clear()
        self._summaries[path] = stamp, summary
        return summary

    # --- reading ----------------------------------------------------------------------------------

    def begin(self, reading: Reading) -> bool:
        """Record a reading; returns False if the same document is ready or being read.

        Raises RequestError for another document of the same name (409), for too many of the user
        (400), and for too many that wait (429).
        """
        path = self.path(reading.id)
        make_folder(path.parent)
        status = self.status(reading.id)
        told = None if status is None else status["status"]
        if told in ("ready", "reading", "queued"):
            if self._text_of(path) == reading.text:
                return False
            raise RequestError(
                409,
                f"there is a document {reading.id.name!r} of another text already; delete it "
                "first, or give another name",
                param="name",
            )
        if told is None and len(self.names(reading.id.model, reading.id.user)) >= MOST_DOCUMENTS:
            raise RequestError(
                400,
                f"{MOST_DOCUMENTS} documents are kept, and there may be no more; delete one of "
                "them",
                param="name",
            )
        return self._enqueue(path, reading)

    def _enqueue(self, path: Path, reading: Reading) -> bool:
        with self._lock:
            former = self._readings.get(path)
            if former is not None and former.status != "failed":  # Another thread was faster.
                return False
            waiting = [
                each
                for each in self._readings.values()
                if each.id.model == reading.id.model and each.status != "failed"
            ]
            if len(waiting) >= MOST_READINGS:
                raise RequestError(
                    429,
                    f"{MOST_READINGS} documents are being read or wait for it; try again later",
                    retry_after=30,
                )
            self._readings.pop(path, None)
            self._readings[path] = reading
        return True

    def _text_of(self, path: Path) -> str | None:
        with self._lock:
            reading = self._readings.get(path)
        if reading is not None and reading.status != "failed":
            return reading.text
        note = None
        if self._files.fetch(path):
            note = _note_of(path)
        note = note or _note_of(partial_of(path))
        return None if note is None else note.text

    def end(self, reading: Reading, error: str | None = None) -> None:
        """Record that a reading has ended; `error` is the sentence that says why it failed."""
        path = self.path(reading.id)
        with self._lock:
            reading.text = ""
            if error is None or reading.is_unwanted:
                self._readings.pop(path, None)
            else:
                reading.status, reading.error = "failed", error
                failed = [p for p, each in self._readings.items() if each.status == "failed"]
                for each in failed[:-_MOST_FAILURES]:
                    del self._readings[each]
        for function in reading.ended:
            function()

    def is_reading(self, reading: Reading) -> bool:
        """Tell whether a reading waits or goes on."""
        with self._lock:
            return any(each is reading for each in self._readings.values())

    def interrupted(self, model: str) -> list[Reading]:
        """Return readings that go on with what is left of interrupted ones of a model."""
        users = [""]
        with suppress(OSError):
            users += [each.name for each in os.scandir(self.folder(model, "")) if each.is_dir()]
        found = []
        for user in users:
            for name in self.names(model, user):
                document = DocumentId(model, user, name)
                if not partial_of(self.path(document)).exists():
                    continue  # Its header need not be read.
                status = self.status(document)
                if status is not None and status["status"] == "interrupted":
                    reading = self.resumed(document)
                    found += [] if reading is None else [reading]
        return found

    def resumed(self, document: DocumentId) -> Reading | None:
        """Return a reading that goes on with what is left of an interrupted one; None without."""
        note = _note_of(partial_of(self.path(document)))
        return None if note is None else Reading(document, note.text, note.names, note.system)

    # --- use and room -----------------------------------------------------------------------------

    @contextmanager
    def in_use(self, document: DocumentId) -> Iterator[Path]:
        """Keep a document from being removed; yields its file, which hold() looks for."""
        path = self.path(document)
        with self._files.in_use(path):
            yield path

    def hold(self, document: DocumentId) -> None:
        """Keep a document in use from being removed by other processes, too, and note its use.

        Raises RequestError (404) if it has been removed meanwhile.
        """
        path = self.path(document)
        if not self._files.hold(path):
            raise not_there(document.name)
        note_use(path)

    def remove(self, document: DocumentId) -> Reading | None:
        """Remove a document, or return its reading, which now stops and removes what it has read.

        Raises RequestError if there is none (404), or if it is in use (409).
        """
        path = self.path(document)
        with self._lock:
            if self._files.is_in_use(path):
                raise _in_use(document)
            reading = self._readings.get(path)
            if reading is not None and reading.status != "failed":
                reading.is_unwanted = True
                reading.stop.set()
                return reading
            self._readings.pop(path, None)
            is_there = self._files.stamp(path) is not None or partial_of(path).exists()
            if not is_there and reading is None:
                raise not_there(document.name)
            self.discard(document)
        return None

    def discard(self, document: DocumentId) -> None:
        """Remove the files of a document, complete or not.

        Raises RequestError if it is in use (409), or if they cannot be removed (500).
        """
        path = self.path(document)
        try:
            remove_partial(path)
            is_removed = self._files.remove(path)
        except SessionFileError:
            raise _in_use(document) from None
        except OSError as error:
            raise RequestError(
                500, f"{document.name}: it cannot be removed ({error.strerror})"
            ) from None
        if not is_removed:
            raise _in_use(document)

    def keep(self, document: DocumentId) -> None:
        """Keep a document that was read, and make room for it: see DocumentFolder.keep()."""
        self._files.keep(self.path(document))


def not_there(name: str) -> RequestError:
    """Return the error for a document that does not exist."""
    return RequestError(
        404,
        f"there is no document {name[:MOST_DOCUMENT_NAME]!r} of yours; send its text to POST "
        "/v1/documents",
        param="document",
        code="document_not_found",
    )


def _in_use(document: DocumentId) -> RequestError:
    return RequestError(
        409,
        f"the document {document.name!r} is in use; delete it after the requests that ask it",
        code="document_in_use",
    )


def _note_of(path: Path) -> DocumentNote | None:
    try:
        with open_session(path) as reader:
            return reader.contents.document
    except SessionFileError:
        return None
