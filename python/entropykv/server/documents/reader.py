"""Read documents in the background, one at a time, while the model answers requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from contextlib import closing

from entropykv.errors import DocumentBusyError, EntropyKVError
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.readings import DocumentId, Reading, not_there
from entropykv.server.http.access import Caller
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.session.document import read_document

_logger = logging.getLogger("entropykv.server")
_CHECK_INTERVAL = 0.05
"""Seconds between two checks whether a document is ready."""


class _StoppedError(Exception):
    """Raised between two micro-batches of a reading that was told to stop."""


class DocumentReader:
    """Read the documents of one model in a thread of its own, as a further sequence of the pool."""

    def __init__(self, model: LoadedModel, library: DocumentLibrary) -> None:
        """Start the thread, and go on with the readings that an earlier server of this model has
        left.
        """
        self.library = library
        self.model = model.name
        self._loaded = model
        self._current: Reading | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="entropykv-documents", daemon=True)
        self._thread.start()
        for reading in library.interrupted(self.model):
            # Readings beyond a limit begin when a request asks for their document.
            with contextlib.suppress(RequestError):
                library.begin(reading)

    async def until_ready(self, document: DocumentId) -> None:
        """Wait until a document was read, and let a reading that was interrupted go on.

        Raises RequestError if there is none or reading failed, and the errors of library.begin().
        """
        while True:
            status = await asyncio.to_thread(self._looked_at, document)
            if status == "ready":
                return
            await asyncio.sleep(_CHECK_INTERVAL)

    def _looked_at(self, document: DocumentId) -> str:
        status = self.library.status(document)
        if status is None:
            raise not_there(document.name)
        if status["status"] == "failed":
            raise RequestError(
                409,
                f"the document {document.name!r} could not be read: {status['error']}",
                param="document",
            )
        if status["status"] == "interrupted":
            reading = self.library.resumed(document)
            if reading is not None:
                self.library.begin(reading)
        return str(status["status"])

    def close(self) -> None:
        """Stop the thread, and wait for its end; what it has read stays in a partial file."""
        self._closing.set()
        self.library.readings.wake()
        current = self._current
        if current is not None:
            current.stop.set()
        self._thread.join()

    def _run(self) -> None:
        while (
            reading := self.library.readings.wait_for_next(self.model, self._closing)
        ) is not None:
            self._current = reading
            try:
                error = self._outcome_of(reading)
                self._current = None
                removal = self.library.end(reading, error)
            except (_StoppedError, DocumentBusyError):
                self._current = None
                removal = self.library.end(reading, goes_on=True)
            if removal is not None and removal.refusal is not None:
                _logger.warning("a deleted document cannot be removed: %s", removal.refusal)
        self.library.leave(self.model)

    def _outcome_of(self, reading: Reading) -> str | None:
        """Read a document; returns the sentence that says why it failed, or None.

        Raises _StoppedError, or DocumentBusyError if another process is reading it.
        """
        try:
            self._read(reading)
        except (_StoppedError, DocumentBusyError):
            raise
        except RequestError as refusal:
            return str(refusal.detail)
        except EntropyKVError as failure:  # Clients must not learn the paths of files.
            folder = str(self.library.path(reading.id).parent)
            said = str(failure).replace(f"{folder}/", "").replace(folder, "")
            return said.removeprefix(": ")
        except Exception:  # An error of any kind must not affect the next document.
            _logger.exception("a document cannot be read")
            return "reading it failed; the server's log says why"
        return None

    def _read(self, reading: Reading) -> None:
        """Read a document from its start, or from where an earlier reading has stopped."""
        self._check(reading)
        self._loaded.control_tokens.check(reading.text.encode("utf-8", "replace"))
        caller = Caller(reading.id.user)
        tenant = caller.tenant(shared_prefixes=self._loaded.shared_prefixes)

        def progress(done: int, total: int) -> None:
            reading.n_read, reading.n_tokens = done, total
            self._check(reading)

        with closing(self._loaded.pool.session(tenant=tenant)) as session:
            session.name, session.is_document = reading.id.name, True
            read_document(
                session,
                reading.text,
                self.library.path(reading.id),
                names=reading.names,
                system=reading.system,
                progress=progress,
            )
        self.library.keep(reading.id)

    def _check(self, reading: Reading) -> None:
        if reading.stop.is_set() or self._closing.is_set():
            raise _StoppedError
