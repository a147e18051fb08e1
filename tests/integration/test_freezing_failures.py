"""Cold storage handles errors: full disks, changed files, damaged pages."""

from __future__ import annotations

import contextlib
import os
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from entropykv import BudgetError, FreezeError, Freezing, Session, SettingsError
from entropykv.cli import main
from entropykv.store.cold import ColdFile, digest_of
from tests.support.frozen_sessions import check_all_is_there, cold_file, session_of
from tests.support.logits import tokens_for
from tests.support.saved_sessions import all_entries, assert_load_refused


@contextlib.contextmanager
def no_file_beyond(n_bytes: int) -> Iterator[None]:
    """Simulate a full disk: a file cannot grow beyond n_bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_one_sentence(error: BaseException, *words: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    for word in words:
        assert word in text


def test_a_full_disk_stops_before_anything_is_read(tiny_llama: Path, tmp_path: Path) -> None:
    """A full disk is an error before anything is read; once there is room again, the session
    continues as if nothing had happened.
    """
    with session_of(tiny_llama, kv_budget=40) as session:
        expected = [session.decode(tokens_for(150)), session.decode(tokens_for(60, seed=2))]
    with session_of(tiny_llama, kv_budget=40, freeze=f"disk:{tmp_path}") as session:
        with no_file_beyond(8192), pytest.raises(FreezeError) as refused:
            session.decode(tokens_for(150))
        assert_one_sentence(refused.value, "no room for more frozen entries", "--freeze-limit")
        assert session.position == session.stats().entries_kept == 0
        found = [session.decode(tokens_for(150)), session.decode(tokens_for(60, seed=2))]
        check_all_is_there(session)
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_later(tiny_llama: Path, tmp_path: Path) -> None:
    """If writing fails although room was reserved, the micro-batches that were read stay."""
    with session_of(tiny_llama, kv_budget=40, freeze=f"disk:{tmp_path}") as session:
        session.decode(tokens_for(30))
        with no_file_beyond(8192), pytest.raises(FreezeError) as refused:
            session.decode(tokens_for(90))
        assert_one_sentence(refused.value, "cannot be written")
        assert 30 < session.position < 120, "the micro-batch that could not be frozen"
        goes_on_without(session, all_entries(session), session.position, session.cache.evicted)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_loading(tiny_llama: Path, tmp_path: Path) -> None:
    with session_of(tiny_llama, kv_budget=40) as session:
        session.decode(tokens_for(300))
        data = session.files.save_state()
    with session_of(tiny_llama, kv_budget=40, freeze=f"disk:{tmp_path}") as session:
        with no_file_beyond(8192), pytest.raises(FreezeError) as refused:
            session.files.load_state(data)
        assert_one_sentence(refused.value, "no room for more frozen entries")
        assert session.position == session.stats().entries_kept == 0
        session.decode(tokens_for(20))
        session.files.load_state(data)
        check_all_is_there(session)
        session.decode(tokens_for(20))


def test_a_disk_that_fails_while_resizing(tiny_llama: Path, tmp_path: Path) -> None:
    with session_of(tiny_llama, kv_budget=1.0, freeze=f"disk:{tmp_path}") as session:
        session.decode(tokens_for(300))
        with no_file_beyond(8192):
            session.cache.resize(40)
        with pytest.raises(FreezeError, match="cannot be written, so that what was frozen is lost"):
            session.decode(tokens_for(16))
        goes_on_without(session, all_entries(session), 316, session.cache.evicted)


def test_a_directory_that_cannot_be_written(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (tmp_path / "none", file, "/proc"):
        with pytest.raises(FreezeError, match=r"cannot hold frozen entries.*--freeze ram"):
            session_of(tiny_llama, freeze=f"disk:{place}")
    with no_file_beyond(100), pytest.raises(FreezeError, match="cannot hold frozen entries"):
        session_of(tiny_llama, freeze=f"disk:{tmp_path}")
    assert list(tmp_path.iterdir()) == [file]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def another_version(path: Path) -> None:
    overwrite(path, 8, struct.pack("<I", 77))


def another_model(path: Path) -> None:
    directory = path.parent / "other"
    directory.mkdir()
    other = ColdFile.create(directory, 4096, {"another": "model"})
    header = os.pread(other.descriptor, 4096, 0)
    other.close()
    directory.rmdir()
    assert digest_of({"another": "model"}) in header
    overwrite(path, 0, header)


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: os.truncate(path, 5000), "was cut to 5000"),
    "emptied": (lambda path: os.truncate(path, 0), "was cut to 0"),
    "removed": (lambda path: path.unlink(), "was removed"),
    "another version": (another_version, "has version 77"),
    "another model": (another_model, "belongs to another model"),
    "zeros": (lambda path: overwrite(path, 0, bytes(4096)), "is not a file of frozen entries"),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("policy", ["uniform", "rolling-freeze"])
def test_a_file_that_is_not_what_it_was(
    tiny_llama: Path, tmp_path: Path, harm: str, policy: str
) -> None:
    damage, words = HARM[harm]
    with session_of(tiny_llama, kv_budget=40, policy=policy, freeze=f"disk:{tmp_path}") as session:
        session.decode(tokens_for(250))
        entries = all_entries(session)
        frozen = session.stats().frozen_entries
        assert frozen > 0
        damage(cold_file(tmp_path))
        with pytest.raises(FreezeError) as refused:
            session.decode(tokens_for(10))
        assert_one_sentence(refused.value, words)
        goes_on_without(session, entries, 250, frozen)
    assert not list(tmp_path.glob("*.cold"))


def goes_on_without(session: Session, entries: list[list[int]], position: int, frozen: int) -> None:
    """Check that a session holds `entries` after `position` tokens, counts `frozen` entries as
    evicted, and goes on; the session is changed and reset by that.
    """
    assert (all_entries(session), session.position) == (entries, position)
    assert session.cache.evicted == frozen
    rows = session.decode(tokens_for(70, seed=2), all_logits=True)
    assert np.isfinite(rows).all()
    assert len(list(session.generate([], 5))) > 0
    assert session.cache.thaw() == 0
    stats = session.stats()
    assert stats.entries_kept + stats.evictions == stats.entries_full
    session.cache.resize(30)
    session.text.truncate(session.position - 10)
    session.reset()
    session.decode(tokens_for(100))


def test_what_gave_up_can_be_saved_and_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    """A session that gave up its frozen entries can be saved, without them.

    Frozen entries can be loaded only by a session that gave nothing up.
    """
    options = {"kv_budget": 40, "policy": "rolling-freeze"}
    with session_of(tiny_llama, **options) as session:
        session.decode(tokens_for(250))
        healthy = session.files.save_state()
    with session_of(tiny_llama, freeze=f"disk:{tmp_path}", **options) as session:
        session.decode(tokens_for(250))
        cold_file(tmp_path).unlink()
        with pytest.raises(FreezeError, match="was removed"):
            session.decode(tokens_for(10))
        data = session.files.save_state()
        assert session.files.save_state() == data
        entries = all_entries(session)
        assert_load_refused(session, healthy, "make a new session")
        assert all_entries(session) == entries
    with session_of(tiny_llama, **options) as session:
        session.files.load_state(data)
        assert all_entries(session) == entries
        session.decode(tokens_for(100))
        check_all_is_there(session)


def damage_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for i in range(4096, len(content), 100):
        content[i] ^= 1
    overwrite(path, 4096, bytes(content[4096:]))


@pytest.mark.parametrize("policy", ["uniform", "streaming", "rolling-freeze"])
def test_a_damaged_page_is_noticed_and_what_was_read_stays(
    tiny_llama: Path, tmp_path: Path, policy: str
) -> None:
    with session_of(tiny_llama, kv_budget=40, policy=policy, freeze=f"disk:{tmp_path}") as session:
        session.decode(tokens_for(250))
        damage_pages(cold_file(tmp_path))
        with pytest.raises(FreezeError) as refused:  # noqa: PT012
            for token in tokens_for(30, seed=4):
                session.decode([token])
        assert_one_sentence(refused.value, "does not hold what was written to it")
        position = session.position
        assert 250 < position <= 280
        stats = session.stats()
        assert stats.entries_kept + stats.evictions == stats.entries_full
        goes_on_without(session, all_entries(session), position, session.cache.evicted)
    assert not list(tmp_path.iterdir())


def test_saving_what_cannot_be_read(tiny_llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.ekv"
    with session_of(tiny_llama, kv_budget=40, freeze=f"disk:{tmp_path}") as session:
        session.decode(tokens_for(250))
        damage_pages(cold_file(tmp_path))
        with pytest.raises(FreezeError) as refused:
            session.files.save(target)
        assert_one_sentence(refused.value, "does not hold what was written to it", "lost")
        assert not list(tmp_path.iterdir())
        session.files.save(target)
        goes_on_without(session, all_entries(session), 250, session.cache.evicted)
    with session_of(tiny_llama, kv_budget=40) as session:
        session.files.load(target)
        check_all_is_there(session)


def test_generation_yields_what_it_had(tiny_llama: Path, tmp_path: Path) -> None:
    with session_of(tiny_llama, kv_budget=40, freeze=f"disk:{tmp_path}") as session:
        found = []
        with pytest.raises(FreezeError, match="was cut"):  # noqa: PT012
            for token in session.generate(tokens_for(200), 40):
                found.append(token)
                if len(found) == 5:
                    os.truncate(cold_file(tmp_path), 4096)
        assert len(found) == 5
        assert session.tokens == [*tokens_for(200), *found[:-1]]
        assert list(session.generate(found[-1:], 5))


def test_the_command_line_says_it_in_one_line(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("run", "-m", str(tiny_llama), "-p", "the and of to " * 60, "-c", "512", "-t", "1")
    arguments += ("--kv-budget", "40", "-n", "4", "--freeze", f"disk:{tmp_path}")
    with no_file_beyond(8192):
        assert main(list(arguments)) != 0
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert "no room for more frozen entries" in err
    assert len([line for line in err.splitlines() if line.startswith("entropykv: ")]) == 1
    assert not list(tmp_path.iterdir())


def test_what_cannot_freeze_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    for policy in ("layer", "layer-range"):
        for freeze in ("ram", f"disk:{tmp_path}"):
            with pytest.raises(SettingsError, match="comes back for each head by itself"):
                session_of(tiny_llama, policy=policy, freeze=freeze)
    with pytest.raises(BudgetError, match=r"--freeze-limit \d+B or more"):
        session_of(tiny_llama, freeze=Freezing(f"disk:{tmp_path}", limit=1000))
    assert not list(tmp_path.iterdir())
