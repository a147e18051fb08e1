"""A saved session leaves pages in its file until they change, and other processes share them."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Pool, SessionFileError
from entropykv.session.file import SECTION_ALIGNMENT
from entropykv.store.step import Part
from tests.support.command import python
from tests.support.logits import tokens_for
from tests.support.pools import PIECE, pool_of
from tests.support.saved_sessions import future, sections_start, session_of

MAPS = Path("/proc/self/maps")
WHOLE = {"n_ctx": 1024, "kv_budget": 1.0}
"""Options of a session whose budget holds the whole text."""

pytestmark = pytest.mark.needs("/proc/self/maps")


def is_mapped(path: Path) -> bool:
    return str(path) in MAPS.read_text(encoding="utf-8")


def save(model: Path, path: Path, n_tokens: int = 600, **options: Any) -> bytes:
    """Save a session that has read some tokens; returns the bytes of the file."""
    with session_of(model, **{**WHOLE, **options}) as session:
        session.decode(tokens_for(n_tokens))
        session.files.save(path)
    return path.read_bytes()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("policy", ["uniform", "recency", "auto", "uniform:attention"])
def test_mapped_pages_go_on_as_copied_ones(
    tiny_llama: Path, tmp_path: Path, kv_type: str, policy: str
) -> None:
    path = tmp_path / "x.ekv"
    options = {**WHOLE, "kv_type": kv_type, "policy": policy}
    data = save(tiny_llama, path, 800, kv_type=kv_type, policy=policy)
    with session_of(tiny_llama, **options) as session:
        session.files.load_state(data)
        assert session.files.save_state() == data
        expected = future(session), session.files.save_state()
    with session_of(tiny_llama, **options) as session:
        session.decode(tokens_for(120, seed=8))  # Loading discards these tokens.
        session.files.load(path)
        assert is_mapped(path)
        assert session.files.save_state() == data
        assert (future(session), session.files.save_state()) == expected
        stats = session.stats()
        assert stats.kv_bytes_now <= stats.kv_bytes_peak <= stats.kv_bytes_budget
    assert path.read_bytes() == data


def test_a_smaller_budget_copies_what_it_keeps(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    data = save(tiny_llama, path)
    futures = []
    for from_file in (True, False):
        with session_of(tiny_llama, n_ctx=1024) as session:
            session.files.load(path) if from_file else session.files.load_state(data)
            assert not is_mapped(path)
            futures.append(future(session))
    assert futures[0] == futures[1]
    assert path.read_bytes() == data


def test_evictions_change_memory_and_not_the_file(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    data = save(tiny_llama, path)
    with session_of(tiny_llama, **WHOLE) as session:
        session.files.load(path)
        session.cache.resize(0.25)
        session.decode(tokens_for(200, seed=4))
        assert session.stats().evictions > 0
    with session_of(tiny_llama, **WHOLE) as session:
        session.files.load(path)
        assert session.files.save_state() == data == path.read_bytes()


def test_sections_begin_at_a_page(tiny_llama: Path, tmp_path: Path) -> None:
    data = save(tiny_llama, tmp_path / "x.ekv")
    start = sections_start(data)
    contents = json.loads(data[16 : start - 16])["contents"]
    start += 4 * (contents["n_tokens"] + contents["n_logits"])
    assert start % SECTION_ALIGNMENT == 0
    assert len(data) == start + sum(contents["sections"]) + 16


def test_a_reset_session_lets_go_of_the_file(tiny_llama: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "x.ekv", tmp_path / "y.ekv"
    save(tiny_llama, path)
    save(tiny_llama, other, 500)
    with session_of(tiny_llama, **WHOLE) as session:
        session.files.load(path)
        session.files.load(other)
        assert is_mapped(other)
        assert not is_mapped(path)
        session.reset()
        assert not is_mapped(other)
        session.decode(tokens_for(600))
        assert session.files.save_state() == path.read_bytes()


def read_pool(model: Path) -> Pool:
    return pool_of(model, n_ctx=1024, kv_budget=3072, n_sequences=3)


def test_a_pool_maps_a_file_beside_other_conversations(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    save(tiny_llama, path, kv_type="q8_0")
    with (
        closing(read_pool(tiny_llama)) as pool,
        session_of(tiny_llama, n_ubatch=PIECE, **WHOLE) as alone,
    ):
        first, second, third = (pool.session() for _ in range(3))
        first.decode(tokens_for(100))
        second.files.load(path)
        third.files.load(path)
        assert is_mapped(path)
        alone.files.load(path)
        expected = alone.decode(tokens_for(50, seed=3), all_logits=True).tobytes()
        for session in (second, third):
            rows = session.decode(tokens_for(50, seed=3), all_logits=True)
            assert rows.tobytes() == expected
        first.decode(tokens_for(100, seed=1))
        second.close()
        third.close()
        assert first.position == 200
        alone.reset()
        assert not is_mapped(path)


def test_a_replaced_or_deleted_file_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    save(tiny_llama, path)
    with session_of(tiny_llama, **WHOLE) as session:
        session.files.load(path)
        expected = future(session)
    for change in (lambda: save(tiny_llama, path, 700), path.unlink):
        with session_of(tiny_llama, **WHOLE) as session:
            save(tiny_llama, path)
            session.files.load(path)
            change()
            assert future(session) == expected


@pytest.mark.parametrize("change", ["cut", "empty", "overwrite"])
def test_a_changed_file_is_an_error_and_no_crash(
    tiny_llama: Path, tmp_path: Path, change: str
) -> None:
    path = tmp_path / "x.ekv"
    data = save(tiny_llama, path)
    with session_of(tiny_llama, **WHOLE) as session, session_of(tiny_llama, **WHOLE) as other:
        session.files.load(path)
        other.decode(tokens_for(20))
        if change == "overwrite":
            with open(path, "r+b") as file:
                file.seek(len(data) // 2)
                file.write(b"other bytes")
        else:
            os.truncate(path, 0 if change == "empty" else len(data) // 2)
        for use in (session.files.save_state, lambda: session.decode([5])):
            with pytest.raises(SessionFileError, match="changed while its entries were in use"):
                use()
        other.decode([5])
        session.reset()
        session.decode(tokens_for(600))
        assert session.files.save_state() == data


class LosingStore:
    """Raise an error after each step, as if entries were lost."""

    drafts = None

    def after(self, *_: int) -> None:
        raise SessionFileError("lost")


def test_lost_entries_are_the_error_of_one_part_of_a_step() -> None:
    part = Part(LosingStore(), [5], 0, 1)  # type: ignore[arg-type]
    part.settle(np.zeros((1, 4), np.float32))
    with pytest.raises(SessionFileError, match="lost"):
        part.result()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_changed_file_disturbs_nobody_else_in_a_pool(
    tiny_llama: Path, tmp_path: Path, leaves: bool
) -> None:
    path = tmp_path / "x.ekv"
    save(tiny_llama, path, kv_type="q8_0")
    with closing(pool_of(tiny_llama, n_ctx=1024, kv_budget=1024, n_sequences=1)) as pool:
        first, second = pool.session(), pool.session()
        first.files.load(path)
        first.rest()
        second.decode(tokens_for(100))  # The first session is swapped out, within the pool.
        fork = first.fork()
        os.truncate(path, 20000)
        second.decode(tokens_for(900 if leaves else 100, seed=1))
        for session in (first, fork):
            with pytest.raises(SessionFileError, match="changed while its entries were in use"):
                session.decode([5])
        second.decode([5])
        first.reset()
        first.decode(tokens_for(100))


def test_a_checkpoint_of_a_changed_file_is_forgotten(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    save(tiny_llama, path, kv_type="q8_0")
    text = tokens_for(600)
    with closing(pool_of(tiny_llama, n_ctx=1024, kv_budget=1024, n_sequences=2)) as pool:
        session = pool.session()
        session.files.load(path)
        session.decode([5])
        session.rest()
        session.decode([6])
        assert session.text.return_to_checkpoint([*text, 5])
        os.truncate(path, 20000)
        assert not session.text.return_to_checkpoint([*text, 5])
        session.reset()
        session.decode(text)


CUT_WHILE_READ = """
import os, sys
from entropykv import Session, _core
model, path = sys.argv[1:]
file = os.open(path, os.O_RDWR)
mapped = _core.MappedFile.map(file, 16384, 65536)
memory = memoryview(mapped)
assert not mapped.has_changed
os.truncate(file, 16384 + 40000)
assert memory[65535] == 0 and memory[0] == 7
assert mapped.has_changed
print("alive", flush=True)
os.kill(os.getpid(), 7)
"""


def test_pages_behind_the_end_are_zeros_and_other_signals_are_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\7" * (16384 + 65536))
    assert python(CUT_WHILE_READ, "", path, code=-7).stdout == "alive\n"


ASK = """
import sys
from pathlib import Path
from entropykv import Session
def private():
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(sys.argv[2]))
    return next(int(line.split()[1]) for line in lines[at:] if line.startswith("Private_Dirty"))
with Session(sys.argv[1], n_ctx=1024, kv_budget=1.0, n_ubatch=64, n_threads=1) as session:
    session.files.load(sys.argv[2])
    list(session.generate([5, 6, 7], 20))
    print(private())
"""


def test_answers_leave_most_pages_shared(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    data = save(tiny_llama, path, 900)
    assert int(python(ASK, tiny_llama, path).stdout) * 1024 < len(data) / 4
