"""Machines with documents in object storage hold copies of the latest version."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from entropykv import system
from entropykv.errors import MissingExtraError, SessionFileError, SettingsError, StorageError
from entropykv.session.document_folder import (
    DocumentFolder,
    folder_of,
    local_document,
    partial_of,
    written_document,
)
from entropykv.session.object_storage import FileStamp, ObjectStorage, is_address

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["memory", "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "stored").as_uri()
    return f"memory://{uuid.uuid4()}/documents"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(system, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def machines(address: str, tmp_path: Path) -> list[DocumentFolder]:
    """Return two machines, each with a disk of its own and the same storage."""
    return [
        DocumentFolder(tmp_path / name, None, ObjectStorage(address)) for name in ("one", "two")
    ]


def write(folder: DocumentFolder, name: str, content: bytes) -> Path:
    path = folder.directory / "user" / f"{name}.kv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    folder.keep(path)
    return path


def contents(folder: DocumentFolder, name: str = "book") -> bytes | None:
    path = folder.directory / "user" / f"{name}.kv"
    with folder.in_use(path):
        return path.read_bytes() if folder.hold(path) else None


def test_what_one_machine_keeps_another_one_gets(machines: list[DocumentFolder]) -> None:
    one, two = machines
    path = write(one, "book", b"first")
    assert two.names(two.directory / "user") == ["book.kv"]
    stamp = two.stamp(two.directory / "user" / "book.kv")
    assert stamp is not None
    assert stamp[1] == 5
    assert stamp == one.stamp(path)
    assert contents(two) == b"first"


def test_a_copy_is_fetched_once_and_again_for_another_version(
    machines: list[DocumentFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    write(one, "book", b"first")
    fetched: list[str] = []
    fetch = ObjectStorage.fetch

    def noted(storage: ObjectStorage, key: str, path: Path) -> FileStamp | None:
        fetched.append(key)
        return fetch(storage, key, path)

    monkeypatch.setattr(ObjectStorage, "fetch", noted)
    assert contents(two) == contents(two) == b"first"
    assert fetched == ["user/book.kv"]
    write(one, "book", b"second version")
    assert contents(two) == b"second version"
    assert contents(one) == b"second version"
    assert fetched == ["user/book.kv"] * 2


def test_a_copy_that_another_process_replaces_by_an_older_one_is_fetched_again(
    machines: list[DocumentFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    write(one, "book", b"first")
    fetch = ObjectStorage.fetch

    def slow(storage: ObjectStorage, key: str, path: Path) -> FileStamp | None:
        """Copy the first version slowly, so that the other process already has the second one."""
        monkeypatch.setattr(ObjectStorage, "fetch", fetch)
        get_file = storage._files.get_file

        def slowly(source: str, part: str) -> None:
            get_file(source, part)
            monkeypatch.setattr(storage._files, "get_file", get_file)
            write(one, "book", b"second")
            other = DocumentFolder(two.directory, None, ObjectStorage(storage.address))
            assert contents(other) == b"second"

        monkeypatch.setattr(storage._files, "get_file", slowly)
        copy = fetch(storage, key, path)
        noted.append(origin.read_text(encoding="utf-8"))
        return copy

    noted: list[str] = []
    origin = two.directory / "user" / "book.kv.origin"
    monkeypatch.setattr(ObjectStorage, "fetch", slow)
    contents(two)
    # The other process records the origin of its copy later.
    origin.write_text(noted[0], encoding="utf-8")
    assert contents(two) == b"second"


def test_a_document_that_another_machine_replaces_while_it_is_stored_is_not_taken_for_its_copy(
    machines: list[DocumentFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    store = ObjectStorage.store

    def then_replaced(storage: ObjectStorage, path: Path, key: str) -> None:
        store(storage, path, key)
        monkeypatch.setattr(ObjectStorage, "store", store)
        write(two, "book", b"second")

    monkeypatch.setattr(ObjectStorage, "store", then_replaced)
    write(one, "book", b"first")
    assert contents(one) == b"second"


KILLED_WHILE_FETCHING = """
import os, signal, sys
from pathlib import Path
from entropykv.session.object_storage import ObjectStorage

storage, path = ObjectStorage(sys.argv[1]), Path(sys.argv[2])

def get_file(remote, local):
    Path(local).write_bytes(b"half")
    print("half", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)

storage._files.get_file = get_file
storage.fetch("user/book.kv", path)
"""


@pytest.mark.needs("fcntl.flock", "signal.SIGKILL")
def test_a_copy_that_a_killed_process_has_begun_is_removed_by_the_next_one(tmp_path: Path) -> None:
    address = (tmp_path / "stored").as_uri()
    folder = DocumentFolder(tmp_path / "one", None, ObjectStorage(address))
    path = write(folder, "book", b"first")
    path.unlink()
    command = [sys.executable, "-c", KILLED_WHILE_FETCHING, address, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "half\n"
        assert contents(folder) == b"first"
        assert len(list(path.parent.glob("*.copied"))) == 1, "a living process still needs it"
        other.stdin.close()
    path.unlink()
    assert contents(folder) == b"first"
    assert not list(path.parent.glob("*.copied"))


def test_a_reader_of_a_storage_of_files_keeps_the_version_that_it_has_opened(
    tmp_path: Path,
) -> None:
    """A reader keeps the version that it has opened: a mapped file must never be overwritten."""
    folder = DocumentFolder(tmp_path / "one", None, ObjectStorage((tmp_path / "kept").as_uri()))
    write(folder, "book", b"first version")
    stored = tmp_path / "kept" / "user" / "book.kv"
    with stored.open("rb") as reader:
        write(folder, "book", b"second")
        assert reader.read() == b"first version"
    assert stored.read_bytes() == b"second"
    assert [each.name for each in stored.parent.iterdir()] == ["book.kv"]


def test_a_copy_that_fails_leaves_the_stored_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage((tmp_path / "kept").as_uri())
    folder = DocumentFolder(tmp_path / "one", None, storage)
    write(folder, "book", b"first version")
    stored = tmp_path / "kept" / "user" / "book.kv"

    def fails(_: str, target: str) -> None:
        Path(target).write_bytes(b"sec")
        assert storage.names("user") == ["book.kv"]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage._files, "put_file", fails)
    with pytest.raises(StorageError, match="No space left on device"):
        write(folder, "book", b"second")
    assert stored.read_bytes() == b"first version"
    assert [each.name for each in stored.parent.iterdir()] == ["book.kv"]


def test_what_is_removed_is_gone_on_all_machines(machines: list[DocumentFolder]) -> None:
    one, two = machines
    path = write(one, "book", b"first")
    assert contents(two) == b"first"
    with one.in_use(path):
        assert one.hold(path)
        assert not one.remove(path)
    assert contents(two) == b"first"
    assert one.remove(path)
    assert contents(one) is None
    assert contents(two) is None
    assert two.names(two.directory / "user") == []
    assert not (two.directory / "user" / "book.kv").exists()


def test_copies_make_room_but_the_storage_keeps_all(address: str, tmp_path: Path) -> None:
    folder = DocumentFolder(tmp_path / "one", 2500, ObjectStorage(address))
    for name in "abc":
        write(folder, name, b"x" * 1000)
    assert sorted(each.name for each in (folder.directory / "user").glob("*.kv")) == [
        "b.kv",
        "c.kv",
    ]
    assert sorted(folder.names(folder.directory / "user")) == ["a.kv", "b.kv", "c.kv"]
    assert contents(folder, "a") == b"x" * 1000


def test_a_document_that_cannot_be_stored_can_go_on_later(
    machines: list[DocumentFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines

    def fails(*_: Any) -> None:
        raise ConnectionResetError("the line is dead")

    with monkeypatch.context() as patch:
        patch.setattr(one._storage._files, "put_file", fails)  # type: ignore[union-attr]
        with pytest.raises(StorageError, match="the line is dead"):
            write(one, "book", b"first")
    path = one.directory / "user" / "book.kv"
    assert not path.exists()
    assert partial_of(path).read_bytes() == b"first"
    assert one.stamp(path) is None


def test_errors_of_the_storage_are_one_sentence(
    machines: list[DocumentFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("AccessDenied\nby a policy")

    monkeypatch.setattr(one._storage._files, "ls", fails)  # type: ignore[union-attr]
    with pytest.raises(StorageError, match="AccessDenied by a policy"):
        one.names(one.directory)


def test_an_address_of_no_storage_is_refused() -> None:
    with pytest.raises(SettingsError, match="cannot be used"):
        folder_of("nothing://bucket/folder", None)


@pytest.mark.parametrize("path", ["book.kv", "/a/b.kv", "C:\\a\\b.kv", "://x", "a:b//c"])
def test_paths_are_no_addresses(path: str) -> None:
    assert not is_address(path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError, match=r"install entropykv\[storage\]"):
        folder_of("memory://x", None)


def test_a_written_document_is_stored_and_found_by_its_address(address: str, cache: Path) -> None:
    with written_document(f"{address}/book.kv") as path:
        path.write_bytes(b"first")
    assert cache in path.parents
    path.unlink()
    with local_document(f"{address}/book.kv") as copy:
        assert copy.read_bytes() == b"first"
    with (
        pytest.raises(SessionFileError, match=r"other.kv: no such file"),
        local_document(f"{address}/other.kv"),
    ):
        pass


def test_an_interrupted_document_is_not_stored(address: str) -> None:
    def write_half() -> None:
        with written_document(f"{address}/book.kv") as path:
            path.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert ObjectStorage(address).names("") == []


def test_a_path_on_the_disk_is_itself(tmp_path: Path) -> None:
    with written_document(tmp_path / "a.kv") as written, local_document(tmp_path / "a.kv") as read:
        assert written == read == tmp_path / "a.kv"
