"""Keep track of the documents of a server: their files, what is being read, and which are in use.

A document is a file NAME.kv that session/document.py has written, in a folder of its user below the
directory of --documents; with several models, each has a folder with those of its users. Several
servers may share the directory: files appear complete or not at all, and a lock says which are
being read. What this server reads and deletes is in the tables of readings.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from entropykv import system
from entropykv.errors import (
    DocumentBusyError,
    EntropyKVError,
    SessionFileError,
    SettingsError,
)
from entropykv.file_locks import is_locked
from entropykv.files import FileStamp, make_folder, stamp_of
from entropykv.server.documents.readings import (
    MOST_DOCUMENT_NAME,
    Accepted,
    AcceptedText,
    DocumentId,
    Reading,
    Readings,
    Removal,
    Status,
    bytes_of,
    in_use,
    not_there,
    of_another_text,
    read_accepted,
)
from entropykv.server.http.errors import RequestError
from entropykv.server.models.catalog import model_folder
from entropykv.session.document import is_being_read, remove_partial
from entropykv.session.document_folder import (
    PARTIAL,
    SUFFIX,
    TEXT,
    folder_of,
    last_use,
    note_use,
    partial_of,
    text_file_of,
)
from entropykv.session.file import DocumentNote, open_session

MOST_DOCUMENTS = 256
"""The most documents of one user; each is as large as the entries that it keeps."""
_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MOST_DOCUMENT_NAME - 1}}}", re.ASCII)
_MOST_SUMMARIES = 4096


class DocumentLibrary:
    """Keep track of the documents below a directory; any thread may call it.

    A method that takes a DocumentId raises the RequestError of path() for an impossible name.
    """

    def __init__(
        self, directory: str | os.PathLike[str], limit_bytes: int | None, *, several: bool
    ) -> None:
        """Make the directory if it does not exist; only its owner can read it.

        It may be an address in object storage: see folder_of(). `limit_bytes`: the most bytes of
        all complete documents on the disk, and of the texts that wait, together; None: no limit.
        `several`: whether each model has a folder of its own. Raises SettingsError for a place
        where documents cannot be kept, and MissingExtraError without the package of an object
        storage.
        """
        self._several = several
        self._summaries: dict[Path, tuple[FileStamp, dict[str, int]]] = {}
        try:
            self._files = folder_of(directory, limit_bytes)
        except OSError as error:
            raise SettingsError(
                f"{directory}: documents cannot be kept there ({error.strerror}); give another "
                "directory (--documents)"
            ) from None
        self.readings = Readings(self._files)
        """What is being read and deleted; DocumentReader takes its work from here."""

    def folder(self, model: str, user: str) -> Path:
        """Return the folder of a user's documents of a model."""
        folder = self._files.directory
        if self._several:
            folder /= model_folder(model)
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
        names = self.readings.names(folder) | {
            name.removesuffix(PARTIAL).removesuffix(TEXT) for name in self._files.names(folder)
        }
        kept = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
        return sorted(name for name in kept if _NAME.fullmatch(name))

    def status(self, document: DocumentId) -> dict[str, Any] | None:
        """Return what clients get to know of a document; None if there is none of this name."""
        path = self.path(document)
        reading = self.readings.find(path)
        if reading is not None and reading.status != "failed":
            counts = {"tokens_read": reading.n_read, "tokens": reading.n_tokens}
            return self._told(document, reading.status, **counts)
        if self.readings.is_leaving(path):
            return None
        if (stamp := self._files.stamp(path)) is not None:
            return self._of_file(document, path, "ready", stamp)
        if reading is not None:
            return self._told(document, "failed", error=reading.error)
        partial, text = partial_of(path), text_file_of(path)
        if is_being_read(path):
            state: Status = "reading"
        else:
            state = "queued" if is_locked(text) else "interrupted"
        if (stamp := stamp_of(partial)) is not None:
            return self._of_file(document, partial, state, stamp)
        is_there = state != "interrupted" or text.exists()
        return self._told(document, state) if is_there else None

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
            **summary,
            bytes=stamp[1],
            used_at=None if used is None else int(used),
        )

    @staticmethod
    def _told(document: DocumentId, status: Status, **facts: Any) -> dict[str, Any]:
        told = {"tokens_read": 0, "tokens": 0, "entries": 0, "bytes": 0, "used_at": None}
        head = {"id": document.name, "object": "document", "model": document.model}
        return {**head, "status": status, **told, "error": None, **facts}

    def _summary(self, path: Path, stamp: FileStamp) -> dict[str, int]:
        """Return the counts in the header of a file for clients; raises SessionFileError if it
        cannot be read or is not a document.
        """
        known = self._summaries.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        with self._files.opened(path) as reader:
            contents = reader.contents
        if contents.document is None:
            raise SessionFileError(f"{path}: is a saved session, not a document")
        summary = {
            "tokens_read": contents.position,
            "tokens": contents.document.n_tokens,
            "entries": contents.n_entries,
        }
        if len(self._summaries) >= _MOST_SUMMARIES:
            self._summaries.clear()
        self._summaries[path] = stamp, summary
        return summary

    def begin(self, reading: Reading) -> bool:
        """Record a reading; returns False if the same document is ready, is being read or waits.

        When it returns True, the text is on the disk, where it stays until it was read. Raises
        RequestError for an impossible name, or if the user has too many documents (400), for
        another text under the same name (409), if too many documents wait (429), and without room
        for the text (507); OSError if the folder cannot be made.
        """
        path = self.path(reading.id)
        make_folder(path.parent)
        status = self.status(reading.id)
        told = None if status is None else status["status"]
        if told in ("ready", "reading", "queued"):
            if self._text_of(path) == reading.text:
                return False
            raise of_another_text(reading.id.name)
        if told is None and len(self.names(reading.id.model, reading.id.user)) >= MOST_DOCUMENTS:
            raise RequestError(
                400,
                f"{MOST_DOCUMENTS} documents are kept, and there may be no more; delete one of "
                "them",
                param="name",
            )
        if not self.readings.add(path, reading):
            return False
        kept = None
        try:
            kept = self._kept(path, reading)
        except DocumentBusyError:
            return False
        finally:
            if kept is None:
                self.readings.withdraw(path)
        self.readings.accept(reading, kept)
        return True

    def _kept(self, path: Path, reading: Reading) -> AcceptedText:
        """Write the text of a reading to the disk, or take over the file that a server has left.

        Raises RequestError (507) without room for the text, and DocumentBusyError if another server
        has taken the file over.
        """
        accepted = Accepted(reading.text, [*reading.names], reading.system)
        file = text_file_of(path)
        if read_accepted(file) == accepted and (left := AcceptedText.take(file)) is not None:
            return left
        try:
            self._files.make_room_for_text(path, len(bytes_of(accepted)))
            return AcceptedText.write(file, accepted)
        except SessionFileError as error:
            raise RequestError(507, f"text: {error}", param="text") from None
        except OSError as error:
            raise RequestError(
                507, f"the text cannot be kept until it is read ({error.strerror}); try again later"
            ) from None

    def _text_of(self, path: Path) -> str | None:
        if (text := self.readings.text_of(path)) is not None:
            return text
        note = None
        if self._files.fetch(path):
            note = _note_of(path)
        if note is None and (accepted := read_accepted(text_file_of(path))) is not None:
            return accepted.text
        note = note or _note_of(partial_of(path))
        return None if note is None else note.text

    def end(
        self, reading: Reading, error: str | None = None, *, goes_on: bool = False
    ) -> Removal | None:
        """Record that a reading has ended; `error` is the sentence that says why it failed; None:
        it did not.

        `goes_on`: whether it was stopped and can go on later, here or at another server. Returns
        the Removal of a document that was deleted meanwhile, whose files are then removed;
        otherwise None.
        """
        path = self.path(reading.id)
        removal = self.readings.end(path, reading, error, goes_on=goes_on)
        if removal is not None:
            self._carry_out(removal, reading.id, path)
        reading.end()
        return removal

    def leave(self, model: str) -> None:
        """End the queued readings of a model, which no thread reads any more; the next server, or
        the next thread of this model, continues them.
        """
        for reading in self.readings.leave(model):
            reading.end()

    def interrupted(self, model: str) -> list[Reading]:
        """Return readings that continue the interrupted ones of a model, and remove the texts that
        are left of documents which are ready.
        """
        users = [""]
        with suppress(OSError):
            users += [each.name for each in os.scandir(self.folder(model, "")) if each.is_dir()]
        found = []
        for user in users:
            for name in self.names(model, user):
                document = DocumentId(model, user, name)
                path = self.path(document)
                if not (partial_of(path).exists() or text_file_of(path).exists()):
                    continue  # Nothing was interrupted, so the header need not be read.
                status = self.status(document)
                if status is not None and status["status"] == "interrupted":
                    reading = self.resumed(document)
                    found += [] if reading is None else [reading]
                elif status is not None and status["status"] == "ready":
                    _remove_text_of_ready(path)
        return found

    def resumed(self, document: DocumentId) -> Reading | None:
        """Return a reading that continues an interrupted one; None if there is none.

        A text that was accepted is preferred to a partial file, because it is newer.
        """
        path = self.path(document)
        if (accepted := read_accepted(text_file_of(path))) is not None:
            return Reading(document, accepted.text, accepted.names, accepted.system)
        note = _note_of(partial_of(path))
        return None if note is None else Reading(document, note.text, note.names, note.system)

    @contextmanager
    def in_use(self, document: DocumentId) -> Iterator[Path]:
        """Keep a document from being deleted; yields its file, which hold() looks for.

        Raises RequestError (404) if it is being deleted already.
        """
        path = self.path(document)
        with self.readings.in_use(document, path):
            yield path

    def hold(self, document: DocumentId) -> bool:
        """Keep a document in use from being removed by other processes, too, and note its use.

        Returns False if it is not there, or not read to its end. Raises RequestError (503) if
        another process does not let go of its file.
        """
        path = self.path(document)
        reading = self.readings.find(path)
        if reading is not None and reading.status != "failed":
            return False
        try:
            if not self._files.hold(path):
                return False
        except DocumentBusyError:
            raise RequestError(
                503,
                f"another process is removing or replacing the document {document.name!r}; try "
                "again later",
                retry_after=1,
            ) from None
        note_use(path)
        return True

    def remove(self, document: DocumentId) -> Removal:
        """Delete a document, or stop its reading, whose thread then removes its files.

        The deletion that is returned ends when the files are gone, or with a refusal, such as a
        RequestError (404) without any files. Raises RequestError for a document that is being
        deleted (404), and for one that a request or another server uses (409).
        """
        path = self.path(document)
        removal, reading, is_ours = self.readings.remove(document, path)
        if is_ours:
            self._carry_out(removal, document, path)
        if reading is not None and reading.removal is None:
            reading.end()
        return removal

    def _carry_out(self, removal: Removal, document: DocumentId, path: Path) -> None:
        """Remove the files of a document that is being deleted, and end the deletion."""
        refusal: Exception | None = RequestError(500, f"{document.name}: it cannot be removed")
        try:
            if not removal.is_known and not self._has_files(path):
                raise not_there(document.name)
            self._remove_files(document, path)
            refusal = None
        except (RequestError, EntropyKVError) as error:
            refusal = error
        finally:
            self.readings.finish(path, removal, refusal)

    def _has_files(self, path: Path) -> bool:
        return partial_of(path).exists() or self._files.stamp(path) is not None

    def _remove_files(self, document: DocumentId, path: Path) -> None:
        """Remove the files of a document, complete or not.

        Raises RequestError if another process uses it (409), or if they cannot be removed (500).
        """
        try:
            remove_partial(path)
            is_removed = self._files.remove(path)
        except DocumentBusyError:
            raise in_use(document.name) from None
        except (SessionFileError, OSError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            reason = cause.strerror if isinstance(cause, OSError) else "its lock cannot be taken"
            raise RequestError(500, f"{document.name}: it cannot be removed ({reason})") from None
        if not is_removed:
            raise in_use(document.name)

    def keep(self, document: DocumentId) -> None:
        """Keep a document that was read, and make room for it: see DocumentFolder.keep()."""
        self._files.keep(self.path(document))


def _remove_text_of_ready(path: Path) -> None:
    """Remove the text of a document that another server has read."""
    with suppress(DocumentBusyError):
        if (left := AcceptedText.take(text_file_of(path))) is not None:
            left.remove()


def _note_of(path: Path) -> DocumentNote | None:
    try:
        with open_session(path) as reader:
            return reader.contents.document
    except SessionFileError:
        return None
