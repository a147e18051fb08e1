"""The file of frozen entries coexists with those of other processes, which live, were killed, or
are starting.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from entropykv import system
from entropykv.store.cold import _remove_leftover
from tests.support.cold_files import create, names
from tests.support.command import line_of, python_process

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
