"""The file of frozen entries is made, locked, recognised and removed correctly, also beside those
of other processes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entropykv import FreezeError, system
from entropykv.store.cold import HEADER_BYTES, MAGIC, VERSION, ColdFile, _remove_leftover, digest_of
from tests.support.command import line_of, python_process

MODEL = {"architecture": "llama", "n_vocab": 5}


def create(directory: Path) -> ColdFile:
    return ColdFile.create(directory, 8192, MODEL)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[ColdFile]:
    file = create(tmp_path)
    yield file
    file.close()


def test_a_new_file_is_as_the_module_describes_it(cold: ColdFile, tmp_path: Path) -> None:
    path = Path(cold.path)
    assert path.parent == tmp_path
    assert path.name.startswith(f"entropykv-{os.getpid()}-")
    assert path.suffix == ".cold"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    header = path.read_bytes()
    assert len(header) == HEADER_BYTES == cold.expected_bytes
    canonical = json.dumps(MODEL, sort_keys=True, separators=(",", ":")).encode()
    fields = b"EKVCOLD\0" + struct.pack("<II", VERSION, 8192) + cold.nonce
    fields += hashlib.blake2b(canonical, digest_size=16).digest() + struct.pack("<I", os.getpid())
    fields = fields.ljust(HEADER_BYTES - 8, b"\0")
    assert header == fields + hashlib.blake2b(fields, digest_size=8).digest()
    assert len(cold.nonce) == 16
    assert not os.get_inheritable(cold.descriptor)
    cold.check()


def test_the_order_of_an_identity_does_not_matter() -> None:
    other_order = dict(reversed(MODEL.items()))
    assert digest_of(other_order) == digest_of(MODEL)
    assert digest_of({**MODEL, "n_vocab": 6}) != digest_of(MODEL)


def test_closing_removes_the_file_and_may_come_twice(tmp_path: Path) -> None:
    file = create(tmp_path)
    descriptor = file.descriptor
    for _ in range(2):
        file.close()
        assert names(tmp_path) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_closing_leaves_a_file_that_is_not_ours_any_more(tmp_path: Path) -> None:
    file = create(tmp_path)
    os.unlink(file.path)
    Path(file.path).write_bytes(b"of somebody else")
    file.close()
    assert Path(file.path).read_bytes() == b"of somebody else"


def test_a_relative_directory_may_be_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cold").mkdir()
    file = ColdFile.create("cold", 8192, MODEL)
    monkeypatch.chdir("/")
    file.check()
    file.close()
    assert names(tmp_path / "cold") == []


def refused(file: ColdFile, words: str) -> None:
    with pytest.raises(FreezeError, match=rf"^{file.path}: .*{words}.*make a new session"):
        file.check()


def rewritten(file: ColdFile, **change: Any) -> None:
    """Write the header of a file with other fields and a correct digest."""
    fields = {
        "magic": MAGIC,
        "version": VERSION,
        "page_bytes": 8192,
        "nonce": file.nonce,
        "identity": digest_of(MODEL),
        "process": os.getpid(),
    }
    data = struct.pack("<8sII16s16sI", *{**fields, **change}.values()).ljust(
        HEADER_BYTES - 8, b"\0"
    )
    data += hashlib.blake2b(data, digest_size=8).digest()
    with open(file.path, "r+b") as handle:
        handle.write(data)


def test_a_file_that_was_cut_is_refused(cold: ColdFile) -> None:
    os.ftruncate(cold.descriptor, 3 * HEADER_BYTES)
    cold.expected_bytes = 3 * HEADER_BYTES
    cold.check()
    os.truncate(cold.path, 3 * HEADER_BYTES - 1)
    refused(cold, f"was cut to {3 * HEADER_BYTES - 1} of {3 * HEADER_BYTES} bytes")
    os.truncate(cold.path, 100)
    refused(cold, "was cut to 100 of")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"magic": b"notours\0"}, "not a file of frozen entries"),
        ({"version": VERSION + 1}, f"version {VERSION + 1} of the format"),
        ({"identity": digest_of({"n_vocab": 6})}, "another model"),
        ({"nonce": bytes(16)}, "another session"),
        ({"page_bytes": 4096}, "another header"),
    ],
)
def test_a_header_of_something_else_is_refused(
    cold: ColdFile, change: dict[str, Any], words: str
) -> None:
    rewritten(cold)
    cold.check()
    rewritten(cold, **change)
    refused(cold, words)


def test_every_changed_byte_of_the_header_is_seen(cold: ColdFile) -> None:
    header = os.pread(cold.descriptor, HEADER_BYTES, 0)
    for place in (*range(64), HEADER_BYTES // 2, *range(HEADER_BYTES - 8, HEADER_BYTES)):
        os.pwrite(cold.descriptor, bytes([header[place] ^ 1]), place)
        refused(cold, "")
        os.pwrite(cold.descriptor, header[place : place + 1], place)
    cold.check()
    os.pwrite(cold.descriptor, b"x", 2000)
    refused(cold, "damaged header")


def test_a_file_that_is_gone_is_refused(cold: ColdFile) -> None:
    os.unlink(cold.path)
    refused(cold, "was removed")


def test_a_file_that_cannot_be_read_is_refused(
    cold: ColdFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    refused(cold, "Input/output error")


def not_made(directory: Path, words: str) -> None:
    with pytest.raises(FreezeError, match=rf"{words}.*--freeze disk:DIR.*--freeze ram") as caught:
        create(directory)
    assert str(caught.value).startswith(str(directory).replace("\0", "\\x00"))


def test_directories_that_cannot_hold_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    not_made(tmp_path / "none", "No such file or directory")
    not_made(tmp_path / "file", "Not a directory")
    not_made(tmp_path / "a\0b", "null")
    assert names(tmp_path) == ["file"]


@pytest.mark.needs("permissions")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    not_made(tmp_path, "Permission denied")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("module", "call", "code", "left"),
    [
        (os, "open", errno.EROFS, "Read-only file system"),
        (os, "open", errno.EACCES, "Permission denied"),
        (os, "pwrite", errno.ENOSPC, "No space left"),
        (fcntl, "flock", errno.ENOLCK, "No locks available"),
    ],
)
def test_what_the_system_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str, code: int, left: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, call, fail)
    not_made(tmp_path, left)
    monkeypatch.undo()
    assert names(tmp_path) == []


def test_a_header_that_is_written_in_part_only_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 100)
    not_made(tmp_path, "No space left")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [b"", MAGIC[:3], MAGIC, MAGIC + struct.pack("<I", 99) + bytes(5000)],
    ids=["empty", "cut", "cut after the magic", "another version"],
)
def test_a_leftover_is_removed_and_counted(tmp_path: Path, content: bytes) -> None:
    for number in range(2):
        (tmp_path / f"entropykv-1-{number}.cold").write_bytes(content)
    file = create(tmp_path)
    assert file.n_leftovers == 2
    assert names(tmp_path) == [Path(file.path).name]
    file.close()


def test_what_is_no_leftover_is_left_alone(tmp_path: Path) -> None:
    kept, cold = tmp_path / "kept", tmp_path / "cold"
    kept.mkdir()
    cold.mkdir()
    (kept / "entropykv-1-a.cold").write_bytes(MAGIC)
    (cold / "entropykv-1-foreign.cold").write_bytes(b"EKVSESS\0 and so on")
    (cold / "entropykv-1-short.cold").write_bytes(b"x")
    (cold / "entropykv-1-a.cold").symlink_to(kept / "entropykv-1-a.cold")
    (cold / "entropykv-1-none.cold").symlink_to(kept / "none")
    (cold / "entropykv-1-directory.cold").mkdir()
    (cold / "entropykv-1.ekv").write_bytes(MAGIC)
    (cold / "notes.cold").write_bytes(MAGIC)
    os.mkfifo(cold / "entropykv-1-pipe.cold")
    before = names(cold)
    file = create(cold)
    assert file.n_leftovers == 0
    file.close()
    assert names(cold) == before
    assert names(kept) == ["entropykv-1-a.cold"]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "entropykv-1-pipe.cold"
    os.mkfifo(path)
    assert not _remove_leftover(str(path))
    assert path.exists()


@pytest.mark.needs("permissions")
def test_a_file_without_permission_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "entropykv-1-a.cold"
    path.write_bytes(MAGIC)
    path.chmod(0)
    file = create(tmp_path)
    file.close()
    assert names(tmp_path) == [path.name]


SCRIPT = """
import os, subprocess, sys
from entropykv.store.cold import ColdFile
file = ColdFile.create(sys.argv[1], 8192, {})
"""


WAIT = """
print(file.path, file.n_leftovers, flush=True)
sys.stdin.read()
"""


@pytest.mark.needs("signal.SIGKILL")
def test_live_processes_side_by_side_and_one_that_was_killed(tmp_path: Path) -> None:
    ours = create(tmp_path)
    with python_process(SCRIPT + WAIT, tmp_path) as child:
        theirs, leftovers = line_of(child).split()
        assert leftovers == "0"
        more = create(tmp_path)  # Of this process's own files, too, only unlocked ones are removed.
        assert more.n_leftovers == 0
        more.close()
        assert names(tmp_path) == sorted(Path(path).name for path in (ours.path, theirs))
        ours.check()
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert os.path.exists(theirs)
    after = create(tmp_path)
    assert after.n_leftovers == 1
    assert not os.path.exists(theirs)
    ours.check()
    after.close()
    ours.close()


@pytest.mark.needs("signal.SIGKILL")
def test_a_program_that_was_started_does_not_keep_a_leftover_alive(tmp_path: Path) -> None:
    script = """
child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""
    with python_process(SCRIPT + script, tmp_path) as parent:
        sleeping = int(line_of(parent))
        parent.kill()
        parent.wait()
        try:
            os.kill(sleeping, 0)
            assert len(names(tmp_path)) == 1
            file = create(tmp_path)
            file.close()
            assert file.n_leftovers == 1
            assert names(tmp_path) == []
        finally:
            os.kill(sleeping, signal.SIGKILL)


@pytest.mark.needs("os.fork")
def test_a_forked_child_removes_nothing(tmp_path: Path) -> None:
    script = """
child = os.fork()
if child == 0:
    file.close()
    os._exit(0)
os.waitpid(child, 0)
file.check()
print(os.path.exists(file.path), ColdFile.create(sys.argv[1], 8192, {}).n_leftovers, flush=True)
"""
    with python_process(SCRIPT + script, tmp_path) as parent:
        assert line_of(parent) == "True 0"


def test_a_file_that_another_process_removed_before_the_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, n_calls = system.lock, 0

    def late(descriptor: int) -> bool:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            (name,) = names(tmp_path)
            assert _remove_leftover(str(tmp_path / name))
        return lock(descriptor)

    monkeypatch.setattr(system, "lock", late)
    file = create(tmp_path)
    assert names(tmp_path) == [Path(file.path).name]
    file.check()
    file.close()


def test_a_file_that_another_process_looks_at_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, others = system.lock, []

    def held(descriptor: int) -> bool:
        if not others:
            (name,) = names(tmp_path)
            others.append(os.open(tmp_path / name, os.O_RDWR))
            assert lock(others[0])
        return lock(descriptor)

    monkeypatch.setattr(system, "lock", held)
    file = create(tmp_path)
    os.close(others[0])
    assert names(tmp_path) == [Path(file.path).name]
    file.check()
    file.close()


def test_processes_that_start_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    script = """
file.close()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(150):
    file = ColdFile.create(sys.argv[1], 8192, {})
    file.check()
    assert os.path.exists(file.path)
    file.close()
print("done", flush=True)
"""
    with (
        python_process(SCRIPT + script, tmp_path) as a,
        python_process(SCRIPT + script, tmp_path) as b,
    ):
        children = (a, b)
        assert [line_of(child) for child in children] == ["ready", "ready"]
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        assert [line_of(child) for child in children] == ["done", "done"]
    assert names(tmp_path) == []
