"""A document whose deletion was confirmed is gone, and its name is free for a new text at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from entropykv import system
from entropykv.errors import StorageError
from entropykv.server import ModelOptions
from entropykv.server.documents import reader as document_reader
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.readings import Accepted, AcceptedText, DocumentId, Reading, Removal
from entropykv.server.engine.engine import Engine
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loading import load_model
from entropykv.session.document import read_document
from entropykv.session.document_folder import DocumentFolder, text_file_of
from entropykv.session.file import open_session
from entropykv.session.object_storage import ObjectStorage

TEXT = "the quick brown fox jumps over the lazy dog. " * 12
OTHER = "a cat sleeps all day. " * 12
BOOK = DocumentId("any", "", "book")
SECONDS = 60


class Gate:
    """Hold a thread at a point that a test names, until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self._open.wait(SECONDS)

    def open(self) -> None:
        self._open.set()


class Reader:
    """Read documents with a real model; a test can hold the reading of a text at two points."""

    engine: Engine

    def __init__(self, library: DocumentLibrary) -> None:
        self.library = library
        self.within: dict[str, Gate] = {}
        """By text, the gate before every micro-batch."""
        self.behind: dict[str, Gate] = {}
        """By text, the gate when the complete file has just appeared."""

    def post(self, name: str, text: str = TEXT) -> Reading:
        reading = Reading(DocumentId("any", "", name), text, [name])
        assert self.library.begin(reading)
        return reading

    def read_document(
        self,
        session: Any,
        text: str,
        path: Path,
        *,
        progress: Callable[..., object],
        **options: Any,
    ) -> None:
        def held(done: int, total: int) -> None:
            if (gate := self.within.get(text)) is not None:
                gate.wait()
            progress(done, total)

        read_document(session, text, path, progress=held, **options)
        if (gate := self.behind.get(text)) is not None:
            gate.wait()

    def until(self, document: DocumentId, *wanted: str) -> None:
        ended = threading.Event()
        for _ in range(SECONDS * 100):
            status = self.library.status(document)
            if status is not None and status["status"] in wanted:
                return
            ended.wait(0.01)
        raise AssertionError(f"{document.name} is {status}")


@contextmanager
def reading_into(
    place: Path | str | DocumentLibrary, model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reader]:
    known = isinstance(place, DocumentLibrary)
    reader = Reader(place if known else DocumentLibrary(place, None, several=False))
    monkeypatch.setattr(document_reader, "read_document", reader.read_document)
    options = ModelOptions(
        model=str(model), model_alias="any", n_ctx=1024, kv_budget="512", n_threads=1,
        n_threads_batch=1,
    )  # fmt: skip
    reader.engine = Engine(load_model(options, documents=True), documents=reader.library)
    try:
        yield reader
    finally:
        for gate in (*reader.within.values(), *reader.behind.values()):
            gate.open()
        reader.engine.close()


@pytest.fixture
def reader(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    with reading_into(tmp_path / "kept", tiny_llama, monkeypatch) as reader:
        yield reader


@pytest.fixture
def stored(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """Yield a Reader whose documents are in object storage."""
    pytest.importorskip("fsspec")
    monkeypatch.setattr(system, "cache_folder", lambda: tmp_path / "cache")
    with reading_into((tmp_path / "stored").as_uri(), tiny_llama, monkeypatch) as reader:
        yield reader


def files(reader: Reader) -> list[str]:
    return sorted(path.name for path in reader.library.folder("any", "").iterdir())


def status_of(call: Callable[[], object]) -> int:
    with pytest.raises(RequestError) as refused:
        call()
    return refused.value.status_code


@contextmanager
def asked(reader: Reader, document: DocumentId = BOOK) -> Iterator[None]:
    """Use a document as a request that names it does."""
    with reader.library.in_use(document):
        yield


def ask(reader: Reader) -> None:
    with asked(reader):
        pass


def held_reading(reader: Reader, point: str, name: str = "book") -> Gate:
    """Begin to read a document; return the gate (`within`, `behind`) where its thread waits."""
    gate = Gate()
    getattr(reader, point)[TEXT] = gate
    reader.post(name)
    assert gate.reached.wait(SECONDS)
    return gate


@pytest.mark.parametrize("point", ["within", "behind"])
def test_a_request_that_names_a_document_while_it_is_deleted_does_not_bring_it_back(
    reader: Reader, point: str
) -> None:
    gate = held_reading(reader, point)
    removal = reader.library.remove(BOOK)
    assert not removal.ended.is_set()
    assert reader.library.status(BOOK) is None
    assert status_of(lambda: ask(reader)) == 404
    assert status_of(lambda: reader.library.remove(BOOK)) == 404
    gate.open()
    assert removal.ended.wait(SECONDS)
    assert removal.refusal is None
    assert files(reader) == []
    assert reader.library.status(BOOK) is None


@pytest.mark.parametrize("point", ["within", "behind"])
def test_a_deleted_name_is_free_at_once_and_what_waits_for_the_new_text_gets_it(
    reader: Reader, point: str
) -> None:
    gate = held_reading(reader, point)
    removal = reader.library.remove(BOOK)
    reader.post("book", OTHER)
    status = reader.library.status(BOOK)
    assert status is not None
    assert status["status"] == "queued"
    with asked(reader):  # A request that uses the new text does not keep the old one.
        assert not reader.library.hold(BOOK)
        gate.open()
        assert removal.ended.wait(SECONDS)
        assert removal.refusal is None
        reader.until(BOOK, "ready")
        assert reader.library.hold(BOOK)
        with open_session(reader.library.path(BOOK)) as file:
            assert file.contents.document is not None
            assert file.contents.document.text == OTHER
    assert files(reader) == ["book.kv"]


def test_a_new_text_that_is_deleted_before_the_old_one_is_gone_is_not_read(reader: Reader) -> None:
    gate = held_reading(reader, "within")
    first = reader.library.remove(BOOK)
    newer = reader.post("book", OTHER)
    second = reader.library.remove(BOOK)
    assert newer.text == "", "the text stays in memory"
    gate.open()
    assert first.ended.wait(SECONDS)
    assert second.ended.wait(SECONDS)
    reader.post("last")
    reader.until(DocumentId("any", "", "last"), "ready")
    assert files(reader) == ["last.kv"]


def test_deleting_while_the_last_bytes_are_saved_removes_the_complete_file(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document that is deleted when its file is complete, but before the server has recorded
    that, leaves no file.
    """
    keep = DocumentFolder.keep
    removals = []

    def removed(folder: DocumentFolder, path: Path) -> None:
        keep(folder, path)
        assert path.exists()
        removals.append(reader.library.remove(BOOK))

    monkeypatch.setattr(DocumentFolder, "keep", removed)
    reader.post("book")
    gate = threading.Event()
    while not removals:
        gate.wait(0.01)
    assert removals[0].ended.wait(SECONDS)
    assert removals[0].refusal is None
    assert files(reader) == []


def test_a_document_that_waits_for_another_one_is_deleted_at_once(reader: Reader) -> None:
    held_reading(reader, "within", name="first")
    reader.post("book", OTHER)
    removal = reader.library.remove(BOOK)
    assert removal.ended.is_set()
    assert removal.refusal is None
    assert reader.library.status(BOOK) is None


def test_a_document_that_a_request_waits_for_is_not_deleted(reader: Reader) -> None:
    gate = held_reading(reader, "within")
    with asked(reader):
        assert status_of(lambda: reader.library.remove(BOOK)) == 409
        gate.open()
        reader.until(BOOK, "ready")


@pytest.mark.needs("fcntl.flock")
def test_deleting_is_refused_if_another_process_uses_the_file_that_has_just_appeared(
    reader: Reader,
) -> None:
    gate = held_reading(reader, "behind")
    removal = reader.library.remove(BOOK)
    with open(reader.library.path(BOOK), "rb") as file:
        assert system.lock(file.fileno(), shared=True)  # The other process holds such a lock.
        gate.open()
        assert removal.ended.wait(SECONDS)
        assert isinstance(removal.refusal, RequestError)
        assert removal.refusal.status_code == 409
    status = reader.library.status(BOOK)
    assert status is not None
    assert status["status"] == "ready"
    assert reader.library.remove(BOOK).refusal is None
    assert files(reader) == []


def test_a_storage_that_answers_slowly_delays_the_deleted_document_alone(
    stored: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new text under the deleted name waits for the deletion; other documents do not wait."""
    stored.post("book")
    stored.until(BOOK, "ready")
    remove, gate = ObjectStorage.remove, Gate()

    def slow(storage: ObjectStorage, key: str) -> None:
        if key == "book.kv":
            gate.wait()
        remove(storage, key)

    monkeypatch.setattr(ObjectStorage, "remove", slow)
    removals: list[Removal] = []
    deleting = threading.Thread(target=lambda: removals.append(stored.library.remove(BOOK)))
    deleting.start()
    try:
        assert gate.reached.wait(SECONDS)
        assert stored.library.status(BOOK) is None
        assert status_of(lambda: ask(stored)) == 404
        newer = stored.post("book", OTHER)
        stored.post("another")
        stored.until(DocumentId("any", "", "another"), "ready")
        assert newer.status == "queued"
    finally:
        gate.open()
        deleting.join(SECONDS)
    assert removals[0].refusal is None
    stored.until(BOOK, "ready")
    with asked(stored):
        assert stored.library.hold(BOOK)
        with open_session(stored.library.path(BOOK)) as file:
            assert file.contents.document is not None
            assert file.contents.document.text == OTHER


def test_a_storage_that_refuses_to_delete_keeps_the_document(
    stored: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.post("book")
    stored.until(BOOK, "ready")

    def refuses(*_: Any) -> None:
        raise StorageError("the line is dead")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStorage, "remove", refuses)
        removal = stored.library.remove(BOOK)
    assert removal.ended.is_set()
    assert isinstance(removal.refusal, StorageError)
    with asked(stored):
        assert stored.library.hold(BOOK)


def test_a_question_asks_the_storage_once(stored: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.post("book")
    stored.until(BOOK, "ready")
    asked_for: list[str] = []
    stamp = ObjectStorage.stamp

    def noted(storage: ObjectStorage, key: str) -> Any:
        asked_for.append(key)
        return stamp(storage, key)

    monkeypatch.setattr(ObjectStorage, "stamp", noted)
    with asked(stored):
        assert stored.library.hold(BOOK)
    assert asked_for == ["book.kv"]


@pytest.mark.needs("fcntl.flock")
def test_a_file_that_another_process_does_not_let_go_is_no_missing_document(reader: Reader) -> None:
    reader.post("book")
    reader.until(BOOK, "ready")
    with open(reader.library.path(BOOK), "rb") as file, asked(reader):
        assert system.lock(file.fileno())
        assert status_of(lambda: reader.library.hold(BOOK)) == 503
    with asked(reader):
        assert reader.library.hold(BOOK)


def test_what_waits_when_a_model_is_unloaded_is_read_when_it_is_loaded_again(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = DocumentId("any", "", "second")
    with reading_into(tmp_path, tiny_llama, monkeypatch) as reader:
        gate = held_reading(reader, "within")
        waiting = reader.post("second", OTHER)
        released = threading.Event()
        waiting.ended.append(released.set)
        assert reader.engine.documents is not None
        closing = threading.Thread(target=reader.engine.documents.close)
        closing.start()
        assert reader.engine.documents._closing.wait(SECONDS)
        gate.open()
        closing.join(SECONDS)
        assert released.is_set(), "the model stays in memory for it"
        for document in (BOOK, second):
            status = reader.library.status(document)
            assert status is not None
            assert status["status"] == "interrupted"
    with reading_into(reader.library, tiny_llama, monkeypatch) as reader:
        for document in (BOOK, second):
            reader.until(document, "ready")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["book.kv", "second.kv"]


def test_threads_that_send_and_delete_one_name_leave_what_was_sent_last(reader: Reader) -> None:
    statuses: set[int] = set()

    def send_and_delete(number: int) -> None:
        for turn in range(40):
            reading = Reading(BOOK, f"{number} {turn} {OTHER}", ["book"])
            try:
                if turn % 2:
                    reader.library.begin(reading)
                else:
                    reader.library.remove(BOOK).ended.wait(SECONDS)
            except RequestError as refusal:
                statuses.add(refusal.status_code)

    threads = [threading.Thread(target=send_and_delete, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert statuses <= {404, 409}, "a request was refused for another reason"
    while (status := reader.library.status(BOOK)) is not None:
        with suppress(RequestError):
            assert reader.library.remove(BOOK).ended.wait(SECONDS), status
    assert files(reader) == []
    reader.post("book")
    reader.until(BOOK, "ready")
    assert files(reader) == ["book.kv"]


def test_the_text_of_a_document_that_is_ready_is_removed_by_the_next_start(reader: Reader) -> None:
    """The text of a complete document is removed by the next start, if the server was killed
    between saving the last byte and removing the text.
    """
    reader.post("book")
    reader.until(BOOK, "ready")
    AcceptedText.write(text_file_of(reader.library.path(BOOK)), Accepted(TEXT, [])).release()
    assert files(reader) == ["book.kv", "book.kv.text"]
    assert DocumentLibrary(reader.library.folder("", ""), None, several=False).interrupted("") == []
    assert files(reader) == ["book.kv"]
