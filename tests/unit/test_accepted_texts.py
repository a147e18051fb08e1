"""A text that a server accepted stays on the disk until it was read, and belongs to one server."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from entropykv.errors import DocumentBusyError, SessionFileError
from entropykv.file_locks import is_locked
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.readings import (
    Accepted,
    AcceptedText,
    DocumentId,
    Reading,
    bytes_of,
    read_accepted,
)
from entropykv.server.http.errors import RequestError
from entropykv.session.document_folder import DocumentFolder
from tests.support.command import line_of, python_process
from tests.support.systems import is_there

OTHER_SERVER = """
import sys
from pathlib import Path
from entropykv.server.documents.readings import AcceptedText

kept = AcceptedText.take(Path(sys.argv[1]))
print(kept is not None, flush=True)
sys.stdin.readline()
"""
BOOK = DocumentId("", "", "book")


@contextmanager
def taken_elsewhere(path: Path) -> Iterator[None]:
    """Let another process own a text; the process is killed at the end."""
    with python_process(OTHER_SERVER, path) as other:
        assert line_of(other) == "True"
        yield


@pytest.mark.parametrize(
    "accepted",
    [
        Accepted("A cat.\n", ["a.txt"]),
        Accepted("\ud800 é \u0001 \r\n" * 3, ["ü.txt", "b"], "Answer\nbriefly."),
    ],
)
def test_a_text_comes_back_as_it_was_sent(tmp_path: Path, accepted: Accepted) -> None:
    # This file is left by a process that was killed while it wrote.
    (tmp_path / ".x.01234567.part").touch()
    kept = AcceptedText.write(tmp_path / "x", accepted)
    assert read_accepted(tmp_path / "x") == accepted
    if is_there("os.fchmod"):
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600
    kept.remove()
    assert read_accepted(tmp_path / "x") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]\nx",
        b'{"names": [], "system": null, "bytes": 2}\nx',
        b'{"names": 1, "system": null, "bytes": 1}\nx',
        b'{"names": [1], "system": null, "bytes": 1}\nx',
        b'{"names": [], "system": 1, "bytes": 1}\nx',
        b'{"names": [], "system": null, "bytes": 1}\n\xff',
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_damaged_file_has_no_text(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert read_accepted(tmp_path / "x") is None


@pytest.mark.needs("fcntl.flock")
def test_a_text_has_one_server_until_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "book.kv.text"
    path.write_bytes(bytes_of(Accepted("A cat.", ["a"])))
    assert not is_locked(path)
    with taken_elsewhere(path):
        assert is_locked(path)
        with pytest.raises(DocumentBusyError, match="another server reads this text"):
            AcceptedText.take(path)
    assert not is_locked(path)
    kept = AcceptedText.take(path)
    assert kept is not None
    assert is_locked(path)
    kept.release()
    assert not is_locked(path)
    assert path.exists()


@pytest.mark.needs("fcntl.flock")
def test_what_waits_at_another_server_is_queued_and_what_a_dead_one_left_is_interrupted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "book.kv.text"
    path.write_bytes(bytes_of(Accepted("A cat.", ["a"])))
    library = DocumentLibrary(tmp_path, None, several=False)
    with taken_elsewhere(path):
        status = library.status(BOOK)
        assert status is not None
        assert status["status"] == "queued"
        assert library.interrupted("") == []
        assert not library.begin(Reading(BOOK, "A cat.", ["a"])), "it was accepted twice"
        for call in (
            lambda: library.remove(BOOK),
            lambda: library.begin(Reading(BOOK, "A dog.", ["a"])),
        ):
            with pytest.raises(RequestError) as refused:
                call()
            assert refused.value.status_code == 409
    status = library.status(BOOK)
    assert status is not None
    assert status["status"] == "interrupted"
    (reading,) = library.interrupted("")
    assert (reading.text, reading.names) == ("A cat.", ["a"])
    assert library.names("", "") == ["book"]
    assert library.remove(BOOK).refusal is None
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_not_accepted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = DocumentLibrary(tmp_path, None, several=False)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fails)
        with pytest.raises(RequestError, match="No space left on device") as refused:
            library.begin(Reading(BOOK, "A cat.", ["a"]))
    assert refused.value.status_code == 507
    assert list(tmp_path.iterdir()) == []
    assert library.status(BOOK) is None
    assert library.begin(Reading(BOOK, "A dog.", ["a"]))


def test_texts_that_wait_are_counted_by_the_limit_of_documents(tmp_path: Path) -> None:
    folder = DocumentFolder(tmp_path, 3000)
    for name in "ab":
        (tmp_path / f"{name}.kv").write_bytes(b"x" * 1000)
    folder.make_room_for_text(tmp_path / "c.kv", 1000)
    assert len(list(tmp_path.glob("*.kv"))) == 2
    (tmp_path / "c.kv.text").write_bytes(b"x" * 1000)
    # The waiting text of c.kv does not count, because this one replaces it.
    folder.make_room_for_text(tmp_path / "c.kv", 1000)
    assert len(list(tmp_path.glob("*.kv"))) == 2
    folder.make_room_for_text(tmp_path / "d.kv", 1000)
    assert len(list(tmp_path.glob("*.kv"))) == 1
    with pytest.raises(SessionFileError, match="--documents-limit"):
        folder.make_room_for_text(tmp_path / "d.kv", 2500)
    (tmp_path / "d.kv").write_bytes(b"x" * 2500)
    folder.keep(tmp_path / "d.kv")
    assert [path.name for path in tmp_path.glob("*.kv")] == ["d.kv"]
    library = DocumentLibrary(tmp_path, 3000, several=False)
    with pytest.raises(RequestError, match="--documents-limit") as refused:
        library.begin(Reading(BOOK, "x" * 2500, ["a"]))
    assert refused.value.status_code == 507
    assert (tmp_path / "c.kv.text").exists()
