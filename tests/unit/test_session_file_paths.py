"""Paths of saved sessions: what cannot be read or written, and what a failed write leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entropykv import SessionFileError
from entropykv.files import new_file
from entropykv.session.file import (
    MAGIC,
    check_target,
    new_session_file,
    open_session,
    write_session,
)
from tests.support.session_files import CONTENTS, SECTIONS, SETTINGS, file_bytes


def assert_not_read(path: Path, words: str) -> None:
    with pytest.raises(SessionFileError, match=words), open_session(path):
        pass


@pytest.mark.needs("os.mkfifo")
def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert_not_read(tmp_path / "none.ekv", r"none\.ekv: no such file")
    assert_not_read(tmp_path, "is a directory")
    assert_not_read(pipe, "is not a regular file")
    assert_not_read(Path("a\0b"), "null")
    (tmp_path / "empty.ekv").touch()
    assert_not_read(tmp_path / "empty.ekv", "is not a saved session")


@pytest.mark.needs("permissions")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    path.write_bytes(file_bytes())
    path.chmod(0)
    assert_not_read(path, "Permission denied")


def write_to(path: Path) -> None:
    with new_session_file(path) as file:
        write_session(file, SETTINGS, CONTENTS, SECTIONS)


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"GGUF and so on")
    for path, words in (
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "x.ekv", "No such file or directory"),
        (other / "x.ekv", "Not a directory"),
        (other, "is not a saved session"),
        (Path("a\0b"), "null"),
        (tmp_path / ("x" * 250), "name too long"),
    ):
        with pytest.raises(SessionFileError, match=words):
            write_to(path)
    assert other.read_bytes() == b"GGUF and so on"
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_an_older_session_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    path.touch()
    for _ in range(2):
        check_target(path)
        write_to(path)
        assert path.read_bytes() == file_bytes()
    assert os.listdir(tmp_path) == ["x.ekv"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.ekv"
    path.write_bytes(MAGIC + b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(SessionFileError, match="No space left"):
        write_to(path)
    assert os.listdir(tmp_path) == ["x.ekv"]
    assert path.read_bytes() == MAGIC + b"old"


def interrupted_write(path: Path) -> None:
    with new_file(path) as part:
        part.write_bytes(b"half")
        raise KeyboardInterrupt


def test_an_interrupt_leaves_no_debris(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted_write(tmp_path / "x")
    assert os.listdir(tmp_path) == []
