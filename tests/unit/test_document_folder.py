"""Processes that share a directory of documents never remove one that another process uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from entropykv.errors import SessionFileError
from entropykv.session.document_folder import DocumentFolder, last_use, note_use
from tests.support.command import line_of, python_process

OTHER_PROCESS = """
import sys
from pathlib import Path
from entropykv.session.document_folder import DocumentFolder

path = Path(sys.argv[1])
folder = DocumentFolder(path.parent, None)
with folder.in_use(path):
    print(folder.hold(path), flush=True)
    sys.stdin.readline()
"""


def write(folder: Path, name: str, used: int, size: int = 1000) -> Path:
    path = folder / f"{name}.kv"
    path.write_bytes(b"x" * size)
    os.utime(path, (used, used))
    return path


@contextmanager
def used_elsewhere(path: Path) -> Iterator[None]:
    """Let another process use a document."""
    with python_process(OTHER_PROCESS, path) as other:
        assert line_of(other) == "True"
        yield


@pytest.mark.needs("fcntl.flock")
def test_a_document_that_another_process_uses_stays(tmp_path: Path) -> None:
    folder, path = DocumentFolder(tmp_path, None), write(tmp_path, "book", 1)
    with used_elsewhere(path), used_elsewhere(path):
        assert not folder.remove(path)
        assert path.exists()
    assert folder.remove(path)
    assert not path.exists()
    assert folder.remove(path), "there is nothing to remove"


@pytest.mark.needs("fcntl.flock")
def test_the_oldest_documents_make_room_but_none_that_any_process_uses(tmp_path: Path) -> None:
    folder = DocumentFolder(tmp_path, 2500)
    oldest, older, old, newest = (write(tmp_path, name, i) for i, name in enumerate("abcd"))
    with folder.in_use(oldest), used_elsewhere(older):
        folder.keep(newest)
        assert sorted(tmp_path.iterdir()) == [oldest, older, newest]
    folder.keep(newest)
    assert sorted(tmp_path.iterdir()) == [older, newest]
    assert not old.exists()


def test_a_document_larger_than_the_limit_is_removed_with_a_sentence(tmp_path: Path) -> None:
    folder, path = DocumentFolder(tmp_path, 999), write(tmp_path, "book", 1)
    with pytest.raises(SessionFileError, match="--documents-limit"):
        folder.keep(path)
    assert not path.exists()


def test_only_a_document_that_is_there_is_held(tmp_path: Path) -> None:
    folder, path = DocumentFolder(tmp_path, None), tmp_path / "book.kv"
    with folder.in_use(path):
        assert folder.is_in_use(path)
        assert not folder.hold(path)
        assert folder.remove(path), "a request that waits for a document holds no file"
        write(tmp_path, "book", 1)
        assert folder.hold(path)
        assert not folder.remove(path)
    assert not folder.is_in_use(path)
    assert folder.remove(path)


@pytest.mark.needs("fcntl.flock")
def test_a_document_that_was_replaced_while_in_use_is_held_as_it_is_now(tmp_path: Path) -> None:
    folder, path = DocumentFolder(tmp_path, None), write(tmp_path, "book", 1)
    with folder.in_use(path):
        assert folder.hold(path)
        write(tmp_path, "new", 2).replace(path)
        assert folder.hold(path)
        assert not DocumentFolder(tmp_path, None).remove(path)
    assert DocumentFolder(tmp_path, None).remove(path)


@pytest.mark.needs("fcntl.flock")
def test_a_use_is_noted_in_the_file_that_was_used_though_it_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A use is noted on the file that was used, not on one that has replaced it meanwhile.

    The time of the old file would make another process drop the new one, which it has mapped.
    """
    path = write(tmp_path, "book", 1)
    new = write(tmp_path, "new", 2)
    changed = new.stat().st_mtime_ns

    with monkeypatch.context() as patch:

        def replaced_after(function: Any) -> Any:
            def called(*arguments: Any, **named: Any) -> Any:
                result = function(*arguments, **named)
                patch.undo()
                new.replace(path)
                return result

            return called

        for name in ("stat", "fstat"):
            patch.setattr(os, name, replaced_after(getattr(os, name)))
        note_use(path)
    assert not new.exists()
    assert path.stat().st_mtime_ns == changed
    note_use(path)
    assert path.stat().st_mtime_ns == changed
    assert (last_use(path) or 0) > 1e9
