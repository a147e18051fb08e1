"""Know which documents are being read, wait for it, or are being deleted, but not their files.

A reading is *queued*, then *reading*, and leaves this table when its file is complete or it was
stopped; *failed* readings stay, so that clients learn why. Deleting takes a reading out of the
table at once, so that its name is free for another one. The deletion then has an entry of its own
until the files are gone, and three rules keep the two apart:

- Whoever deletes a document removes its files, and nobody else; if a thread is reading it, that
  thread does so after it has stopped.
- Until then, the document does not exist for any request, and a newer reading of the same name
  waits.
- No document is deleted while a request of this process uses it or waits for it.

The text of a reading is also in a file (AcceptedText), which belongs to the reading: it is
removed within the lock of the table, so that the file of a newer reading of the same name is never
removed instead.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from entropykv import system
from entropykv.errors import DocumentBusyError
from entropykv.file_locks import lock_patiently
from entropykv.files import new_file, open_regular, remove_left_overs
from entropykv.server.http.errors import RequestError
from entropykv.session.document import MOST_NAMES, MOST_TEXT_BYTES
from entropykv.session.document_folder import DocumentFolder, text_file_of

_MOST_LINE_BYTES = 1 << 20
"""The longest first line, which has names of files and a system message."""
_UTF8 = ("utf-8", "surrogatepass")
"""How texts are encoded: JSON can have lone surrogates, which strict UTF-8 cannot."""


@dataclass(frozen=True)
class Accepted:
    """Hold a text, the files that it came from, and its system message."""

    text: str
    names: list[str]
    system: str | None = None


class AcceptedText:
    """Own the file of a text that was accepted until it is removed, or released for another server,
    so that no crash loses the text.

    The file has one line of JSON (the files that the text came from, its system message, its
    bytes), and then the text in UTF-8. The server that reads the text, or lets it wait, holds a
    lock on the file. If that server dies, another one continues.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Own an open file; `descriptor` is -1 if another process has taken it meanwhile."""
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def write(cls, path: Path, accepted: Accepted) -> AcceptedText:
        """Write the file, which is on the disk when this returns; raises OSError if that fails.

        Files that processes have left which were killed while they wrote the same text are removed.
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
    except OSError:  # Without locks in the file system, only one server can use the directory.
        return descriptor
    os.close(descriptor)
    return -1


MOST_READINGS = 16
"""The most documents of a model that are read or wait for it; their texts are in memory."""
MOST_DOCUMENT_NAME = 128
_MOST_FAILURES = 256
"""How many failed readings are remembered; the oldest are forgotten first."""

Status = Literal["queued", "reading", "ready", "interrupted", "failed"]


@dataclass(frozen=True)
class DocumentId:
    """Name a document: its model, the user whom it belongs to, and its name."""

    model: str
    user: str
    name: str


@dataclass
class Removal:
    """Follow the deletion of a document; any thread may wait for its end."""

    is_known: bool
    """Whether there was a reading or its text, even if no other files are found."""
    ended: threading.Event = field(default_factory=threading.Event)
    refusal: Exception | None = None
    """Why the document is still there after the end; None: it is gone."""


@dataclass(eq=False)
class Reading:
    """Hold a document that is being read, or waits for it, or could not be read."""

    id: DocumentId
    text: str
    names: Sequence[str]
    """The files that the text came from."""
    system: str | None = None
    """The system message before the text, which only readings of `entropykv read` have."""
    status: Status = "queued"
    n_read: int = 0
    n_tokens: int = 0
    error: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end the reading after its current micro-batch."""
    kept: AcceptedText | None = None
    """The file of the document's text; None before it was written, and after the end."""
    removal: Removal | None = None
    """The deletion for which the reading was stopped, so that nothing of the document is kept;
    None: there is no deletion.
    """
    ended: list[Any] = field(default_factory=list)
    """Functions that are called when the reading has ended."""

    def end(self) -> None:
        """Release the memory of the text, and call the functions in `ended`."""
        self.text = ""
        for function in self.ended:
            function()
        self.ended.clear()


class Readings:
    """Hold the readings and deletions of a server by the paths of their files; any thread may call
    it.
    """

    def __init__(self, files: DocumentFolder) -> None:
        """Start without readings; `files` counts who uses a document."""
        self._files = files
        self._changed = threading.Condition()
        """The lock of this condition is held while the tables are used and the file of a text is
        removed, but never while a document is written or the storage is waited for.
        """
        self._of: dict[Path, Reading] = {}
        """The readings in the order in which they are read."""
        self._removals: dict[Path, Removal] = {}

    def find(self, path: Path) -> Reading | None:
        """Return the reading of a document, which waits, goes on, or has failed; None if there is
        none.
        """
        with self._changed:
            return self._of.get(path)

    def is_leaving(self, path: Path) -> bool:
        """Tell whether a document is being deleted, and not read anew."""
        with self._changed:
            return path in self._removals and path not in self._of

    def names(self, folder: Path) -> set[str]:
        """Return the names of the files of documents that wait, are read, or could not be read."""
        with self._changed:
            return {path.name for path in self._of if path.parent == folder}

    def text_of(self, path: Path) -> str | None:
        """Return the text of a reading that waits or goes on; None if there is none."""
        with self._changed:
            reading = self._of.get(path)
            return None if reading is None or reading.status == "failed" else reading.text

    def add(self, path: Path, reading: Reading) -> bool:
        """Add a reading, which accept() will queue; returns False if the same document waits or is
        being read already.

        Raises RequestError if the document that waits or is being read has another text (409), and
        if too many wait (429).
        """
        with self._changed:
            former = self._of.get(path)
            if former is not None and former.status != "failed":
                if former.text != reading.text:
                    raise of_another_text(reading.id.name)
                return False
            waiting = [
                each
                for each in self._of.values()
                if each.id.model == reading.id.model and each.status != "failed"
            ]
            if len(waiting) >= MOST_READINGS:
                raise RequestError(
                    429,
                    f"{MOST_READINGS} documents are being read or wait for it; try again later",
                    retry_after=30,
                )
            # Otherwise the reading would get the place of the failed one in the order.
            self._of.pop(path, None)
            self._of[path] = reading
        return True

    def accept(self, reading: Reading, kept: AcceptedText) -> None:
        """Queue a reading whose text is on the disk."""
        with self._changed:
            reading.kept = kept
            self._changed.notify_all()

    def withdraw(self, path: Path) -> None:
        """Take a reading out whose text could not be written."""
        with self._changed:
            del self._of[path]

    def wait_for_next(self, model: str, closing: threading.Event) -> Reading | None:
        """Wait for a queued reading of a model, which now begins; None after `closing`, see wake().

        A reading waits on while another document of its name is being deleted.
        """
        with self._changed:
            while not closing.is_set():
                for path, reading in self._of.items():
                    is_queued = reading.status == "queued" and reading.kept is not None
                    if reading.id.model == model and is_queued and path not in self._removals:
                        reading.status = "reading"
                        return reading
                self._changed.wait()
        return None

    def wake(self) -> None:
        """Let wait_for_next() look at `closing` again."""
        with self._changed:
            self._changed.notify_all()

    def end(
        self, path: Path, reading: Reading, error: str | None, *, goes_on: bool = False
    ) -> Removal | None:
        """End the reading of the document at `path`. Returns the Removal of a document that was
        deleted meanwhile, whose files the caller then removes before it calls finish(); else None.

        `error`: the sentence that says why reading failed; None if it did not fail. `goes_on`: True
        if the reading was stopped and can continue later, so that the file of its text stays.
        """
        with self._changed:
            _let_go(reading, goes_on=goes_on)
            if reading.removal is None and error is None:
                del self._of[path]
            elif reading.removal is None:
                reading.status, reading.error = "failed", error
                failed = [p for p, each in self._of.items() if each.status == "failed"]
                for each in failed[:-_MOST_FAILURES]:
                    del self._of[each]
            return reading.removal

    def leave(self, model: str) -> list[Reading]:
        """Take out and return the queued readings of a model; the files of their texts stay."""
        with self._changed:
            left = {
                path: each
                for path, each in self._of.items()
                if each.id.model == model and each.status == "queued" and each.kept is not None
            }
            for path, each in left.items():
                _let_go(each, goes_on=True)
                del self._of[path]
        return list(left.values())

    @contextmanager
    def in_use(self, document: DocumentId, path: Path) -> Iterator[None]:
        """Keep a document from being deleted in the `with` block; raises RequestError (404) if its
        deletion has begun.
        """
        with ExitStack() as use:
            with self._changed:
                if self.is_leaving(path):
                    raise not_there(document.name)
                use.enter_context(self._files.in_use(path))
            yield

    def remove(self, document: DocumentId, path: Path) -> tuple[Removal, Reading | None, bool]:
        """Begin to delete a document, which does not exist for requests from now on.

        Returns the deletion, the reading that was taken out of the table or None, and whether the
        caller must remove the files and call finish(); otherwise another thread does. Raises
        RequestError if the document is in use (409), or being deleted already (404).
        """
        with self._changed:
            if self.is_leaving(path):
                raise not_there(document.name)
            if self._files.is_in_use(path):
                raise in_use(document.name)
            reading = self._of.get(path)
            is_known = reading is not None
            if reading is None or reading.status == "failed":
                is_known |= self._removes_left_text(document, path)
            elif reading.kept is None:  # A request is just writing its text to the disk.
                raise in_use(document.name)
            else:
                _let_go(reading, goes_on=False)
            self._of.pop(path, None)
            if (going_on := self._removals.get(path)) is not None:
                return going_on, reading, False  # The newer reading had written only its text.
            removal = self._removals[path] = Removal(is_known)
            if reading is None or reading.status != "reading":
                return removal, reading, True
            reading.removal = removal
            reading.stop.set()
            return removal, reading, False

    @staticmethod
    def _removes_left_text(document: DocumentId, path: Path) -> bool:
        """Remove the text that a server has left; returns False if there is none.

        Raises RequestError (409) if the server is running.
        """
        try:
            left = AcceptedText.take(text_file_of(path))
        except DocumentBusyError:
            raise in_use(document.name) from None
        if left is not None:
            left.remove()
        return left is not None

    def finish(self, path: Path, removal: Removal, refusal: Exception | None) -> None:
        """End a deletion; `refusal` says why the document is still there."""
        with self._changed:
            del self._removals[path]
            removal.refusal = refusal
            removal.ended.set()
            self._changed.notify_all()


def _let_go(reading: Reading, *, goes_on: bool) -> None:
    """Remove the file of a reading's text, or leave it to the server that continues."""
    kept, reading.kept = reading.kept, None
    if kept is not None and goes_on:
        kept.release()
    elif kept is not None:
        kept.remove()


def no_documents() -> RequestError:
    """Return the error for requests for documents at a server that keeps none."""
    return RequestError(501, "documents are not kept by this server; start it with --documents DIR")


def not_there(name: str) -> RequestError:
    """Return the error for a document that does not exist."""
    return RequestError(
        404,
        f"there is no document {name[:MOST_DOCUMENT_NAME]!r} of yours; send its text to POST "
        "/v1/documents",
        param="document",
        code="document_not_found",
    )


def of_another_text(name: str) -> RequestError:
    """Return the error for a new document whose name another one has."""
    return RequestError(
        409,
        f"there is a document {name!r} of another text already; delete it first, or give another "
        "name",
        param="name",
    )


def in_use(name: str) -> RequestError:
    """Return the error for a document that cannot be deleted now."""
    return RequestError(
        409,
        f"the document {name!r} is in use; delete it when no request asks it and no other server "
        "reads it",
        code="document_in_use",
    )
