"""Sessions with cold storage in real llama.cpp: what is frozen comes back, and what goes wrong."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import BudgetError, FreezeError, Freezing, Session, SessionFileError, SettingsError
from entropykv.cli import main
from entropykv.settings.recovery import Rung
from entropykv.store.cold_file import ColdFile, digest_of
from tests.support.freezing import freeze_and_restore, frozen_entries
from tests.support.logits import relative_error, tokens_for
from tests.support.saved_sessions import (
    all_entries,
    assert_load_refused,
    sections_start,
    signed,
)
from tests.support.tiny_models import write_llama

KV_TYPES = ("f16", "q8_0")


def session_of(path: Path, **options: Any) -> Session:
    defaults = {"n_ctx": 512, "kv_budget": 96, "n_ubatch": 64, "n_threads": 1, "freeze": "ram"}
    return Session(path, **{**defaults, "policy": "uniform", **options})


def where(place: str, directory: Path) -> str:
    return "ram" if place == "ram" else f"disk:{directory}"


def cold_file(directory: Path) -> Path:
    (path,) = directory.glob("*.cold")
    return path


def least_limit(path: Path, **options: Any) -> int:
    """Bytes that the refusal of a limit names."""
    with pytest.raises(BudgetError, match=r"--freeze-limit \d+B or more") as refused:
        session_of(path, freeze=Freezing(limit=1), **options)
    return int(str(refused.value).split("--freeze-limit ")[1].split("B")[0])


def check_all_is_there(session: Session) -> None:
    """Active, frozen and evicted entries are all that was read, and no entry is in two places."""
    stats = session.stats()
    assert stats.entries_kept + stats.frozen_entries + stats.evictions == stats.entries_full
    for active, frozen in zip(all_entries(session), frozen_entries(session), strict=True):
        assert not set(active) & set(frozen)
        if stats.evictions == 0:
            assert sorted([*active, *frozen]) == list(range(session.position))


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_bitnet"])
def test_frozen_and_restored_is_as_never_interrupted(
    model: str, kv_type: str, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    rows = []
    for interrupts in (False, True):
        options = {"kv_budget": 1.0, "kv_type": kv_type, "freeze": where(place, tmp_path)}
        with session_of(path, **options) as session:
            session.decode(tokens_for(150))
            if interrupts:
                freeze_and_restore(session)
            rows.append(session.decode(tokens_for(100, seed=4), all_logits=True))
            for token in tokens_for(8, seed=5):
                if interrupts:
                    freeze_and_restore(session)
                rows.append(session.decode([token]))
    half = len(rows) // 2
    np.testing.assert_array_equal(np.concatenate(rows[:half]), np.concatenate(rows[half:]))


@pytest.mark.parametrize(
    ("cold_type", "least", "most"), [("q8_0", 1e-5, 0.05), ("q4_0", 0.01, 0.7)]
)
def test_narrower_frozen_entries_come_back_nearly_the_same(
    tiny_llama: Path, cold_type: str, least: float, most: float
) -> None:
    rows = []
    for interrupts in (False, True):
        freezing = Freezing(kv_type=cold_type)
        with session_of(tiny_llama, kv_budget=1.0, kv_type="f16", freeze=freezing) as session:
            session.decode(tokens_for(150))
            if interrupts:
                freeze_and_restore(session)
            rows.append(session.decode(tokens_for(50, seed=4), all_logits=True))
    assert least < relative_error(rows[1], rows[0]) < most


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("policy", ["uniform", "freeze", "adaptive"])
def test_every_number_of_threads_gives_the_same(
    tiny_llama: Path, policy: str, place: str, tmp_path: Path
) -> None:
    results = []
    for n_threads in (1, 2, 3, 5):
        freeze = where(place, tmp_path)
        options = {"policy": policy, "n_threads": n_threads, "kv_budget": 40, "freeze": freeze}
        with session_of(tiny_llama, **options) as session:
            rows = [session.decode(tokens_for(200), all_logits=True)]
            rows += [session.decode([token]) for token in tokens_for(20, seed=5)]
            check_all_is_there(session)
            stats = session.stats()
            assert stats.entries_recalled > 0
            counters = (stats.entries_frozen, stats.entries_restored, stats.entries_recalled)
            results.append((np.concatenate(rows).tobytes(), all_entries(session), counters))
    assert results[0] == results[1] == results[2]
    assert not list(tmp_path.iterdir())


def test_resize_freezes_and_thaw_restores(tiny_llama: Path) -> None:
    with session_of(tiny_llama, kv_budget=1.0) as session:
        session.decode(tokens_for(300))
        assert session.stats().frozen_entries == 0
        session.resize(60)
        check_all_is_there(session)
        assert session.evicted == 0
        assert {len(entries) for entries in all_entries(session)} == {60}
        assert session.thaw() == 0  # there is no room
        session.resize(100)
        assert session.thaw() == 40 * session._store.n_kv_heads
        check_all_is_there(session)
        session.resize(1.0)
        assert session.thaw(Rung.WINDOW, window=10) > 0
        session.thaw()
        assert session.stats().frozen_entries == 0
        assert all_entries(session) == [list(range(300))] * session._store.n_kv_heads
        session.decode(tokens_for(20))
        check_all_is_there(session)


def take_a_step(session: Session, chance: random.Random) -> None:
    match chance.choice(["decode", "decode", "tokens", "truncate", "resize", "thaw"]):
        case "decode":
            n = min(chance.randint(1, 90), session.n_ctx - session.position)
            session.decode(tokens_for(n, seed=n)) if n else session.reset()
        case "tokens" if session.position < session.n_ctx - 10:
            for token in tokens_for(10):
                session.decode([token])
        case "truncate":
            dropped = session.evicted
            session.truncate(chance.randint(session.position * 3 // 4, session.position))
            if dropped:
                session.reset()  # what was dropped is counted, wherever it was
        case "resize":
            session.resize(chance.choice([24, 40, 100]))
        case "thaw":
            session.thaw(chance.choice(list(Rung)), window=chance.randint(1, 50))


@pytest.mark.parametrize("policy", ["uniform", "freeze", "freeze:products", "streaming"])
@pytest.mark.parametrize("limit_pages", [None, 2, 4])
def test_everything_is_accounted_for(
    tiny_llama: Path, policy: str, limit_pages: int | None
) -> None:
    chance = random.Random(1)
    limit = limit_pages and least_limit(tiny_llama, kv_type="f16") * limit_pages // 2
    options = {"policy": policy, "kv_type": "f16", "kv_budget": 40}
    with session_of(tiny_llama, freeze=Freezing(limit=limit), **options) as session:
        for _ in range(25):
            take_a_step(session, chance)
            assert limit is None or session.stats().frozen_bytes_peak <= limit
            if not limit:
                check_all_is_there(session)
            most = [entries for layer in session.budgets() for entries in layer]
            kept = [len(entries) for entries in all_entries(session)]
            assert all(n <= budget for n, budget in zip(kept, most, strict=True))
        assert session.stats().entries_frozen > 0


def test_a_limit_drops_and_says_so(tiny_llama: Path) -> None:
    least = least_limit(tiny_llama)
    with session_of(tiny_llama, kv_budget=40, freeze=Freezing(limit=least)) as session:
        for first in range(0, 500, 50):
            session.decode(tokens_for(50, seed=first))
            check_all_is_there(session)
            assert session.stats().frozen_bytes <= least
        assert session.evicted > 0
        stats = session.stats()
        assert stats.frozen_bytes_peak <= least
        assert 0 < stats.frozen_sketch_bytes < stats.frozen_bytes


# --- sessions on disk -----------------------------------------------------------------------------

ON_DISK = [("uniform", "ram"), ("uniform", "disk"), ("freeze", "ram"), ("freeze", "disk")]


def after(session: Session) -> tuple[Any, ...]:
    """All that a session can be asked for, now and later."""
    state = (session.position, session.tokens, all_entries(session), frozen_entries(session))
    rows = session.decode(tokens_for(70, seed=9), all_logits=True)
    single = [session.decode([token]).tobytes() for token in tokens_for(30, seed=8)]
    return (*state, rows.tobytes(), single, all_entries(session), frozen_entries(session))


@pytest.mark.parametrize(("policy", "place"), ON_DISK)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_saved_session_goes_on_with_what_was_frozen(
    tiny_llama: Path, tmp_path: Path, policy: str, place: str, kv_type: str
) -> None:
    options = {"policy": policy, "kv_type": kv_type, "kv_budget": 40}
    with session_of(tiny_llama, freeze=where(place, tmp_path), **options) as session:
        session.decode(tokens_for(200))
        list(session.generate([7], 30))
        assert session.stats().frozen_entries > 0
        session.save(tmp_path / "x.ekv")
        expected = after(session)
    with session_of(tiny_llama, freeze=where(place, tmp_path), **options) as session:
        session.decode(tokens_for(120, seed=8))  # forgotten by the load
        session.load(tmp_path / "x.ekv")
        check_all_is_there(session)
        assert after(session) == expected
    with session_of(tiny_llama, freeze="ram", **{**options, "kv_budget": 24}) as session:
        session.load(tmp_path / "x.ekv")
        check_all_is_there(session)
        assert all(len(entries) <= 24 for entries in all_entries(session))
        session.decode(tokens_for(80))
        check_all_is_there(session)


@pytest.mark.parametrize("policy", ["uniform", "freeze"])
def test_a_smaller_limit_drops_on_loading(tiny_llama: Path, policy: str) -> None:
    least = least_limit(tiny_llama)
    with session_of(tiny_llama, policy=policy, kv_budget=60) as session:
        session.decode(tokens_for(400))
        for token in tokens_for(40):
            session.decode([token])
        assert session.stats().entries_recalled > 0
        data = session.save_state()
    freezing = Freezing(limit=least)
    with session_of(tiny_llama, policy=policy, kv_budget=60, freeze=freezing) as session:
        session.load_state(data)
        assert session.stats().frozen_bytes <= least
        check_all_is_there(session)
        for token in tokens_for(60):
            session.decode([token])
            check_all_is_there(session)


@pytest.mark.parametrize("policy", ["uniform", "freeze"])
def test_damaged_frozen_entries_under_a_right_digest(tiny_llama: Path, policy: str) -> None:
    chance = random.Random(3)
    refused = 0
    with session_of(tiny_llama, policy=policy, kv_budget=40) as session:
        session.decode(tokens_for(250))
        data = session.save_state()
        start = sections_start(data)
        for _ in range(80):
            damaged = bytearray(data)
            for _ in range(chance.randint(1, 40)):
                damaged[chance.randrange(start, len(data) - 16)] = chance.randrange(256)
            before = session.save_state()
            try:
                session.load_state(signed(bytes(damaged)))
            except SessionFileError:
                refused += 1
                assert session.save_state() == before
            session.decode(tokens_for(5))
            session.truncate(session.position - 2)
            session.load_state(data)
        assert session.save_state() == data
    assert 0 < refused <= 80


def test_other_frozen_types_and_sessions_that_do_not_freeze(tiny_llama: Path) -> None:
    with session_of(tiny_llama, kv_type="f16") as session:
        session.decode(tokens_for(200))
        data = session.save_state()
    for freeze in (None, Freezing(kv_type="q8_0")):
        with session_of(tiny_llama, kv_type="f16", freeze=freeze) as session:
            session.decode(tokens_for(20))
            assert_load_refused(session, data, "--freeze")


# --- beyond the trained context -------------------------------------------------------------------


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_frozen_keys_move_beyond_the_trained_context(tmp_path: Path, place: str) -> None:
    """Frozen and restored keys are those of a session that never froze."""
    model = tmp_path / "short.gguf"
    write_llama(model, head_dim=32, n_ctx_train=256, weight_type="F32")
    options = {"n_ctx": 1024, "kv_budget": 200, "kv_type": "f16", "n_ubatch": 32}
    options |= {"policy": "streaming"}
    keys = []
    for freeze in (None, Freezing(where(place, tmp_path), recall_interval=0)):
        with session_of(model, freeze=freeze, **options) as session:
            session.decode(tokens_for(230))
            core = session._store.core  # type: ignore[attr-defined]
            if freeze:
                core.freeze_all(229)
                core.restore(229, frozen_after=-1)
                core.freeze_all(229)
            session._store._rebase(64)  # type: ignore[attr-defined]
            if freeze:
                core.restore(229)
            assert core.frozen == (30 if freeze else 0) * session._store.n_kv_heads
            keys.append([core.rows(0, head) for head in range(2)])
    for ours, theirs in zip(*keys, strict=True):
        positions, _, k, v = ours
        both = np.isin(positions, theirs[0])
        mine = np.isin(theirs[0], positions)
        assert both.sum() > 150
        np.testing.assert_array_equal(k[both], theirs[2][mine])
        np.testing.assert_array_equal(v[both], theirs[3][mine])


@pytest.mark.parametrize("policy", ["uniform", "freeze"])
def test_long_texts_go_on_beyond_the_trained_context(tmp_path: Path, policy: str) -> None:
    model = tmp_path / "short.gguf"
    write_llama(model, head_dim=32, n_ctx_train=256, weight_type="F32")
    with session_of(model, n_ctx=1024, n_ubatch=32, policy=policy) as session:
        rows = session.decode(tokens_for(900), all_logits=True)
        assert np.isfinite(rows).all()
        assert session.stats().rebases > 0
        assert session.stats().entries_recalled > 0
        check_all_is_there(session)


# --- files that fail ------------------------------------------------------------------------------


@contextlib.contextmanager
def no_file_beyond(n_bytes: int) -> Iterator[None]:
    """As on a disk that is full: nothing is written beyond so many bytes of a file."""
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
    """And when there is room again, the session goes on as if nothing had been."""
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
    """Room was there, but nothing can be written to it: what was read stays."""
    with session_of(tiny_llama, kv_budget=40, freeze=f"disk:{tmp_path}") as session:
        session.decode(tokens_for(30))
        with no_file_beyond(8192), pytest.raises(FreezeError) as refused:
            session.decode(tokens_for(60))
        assert_one_sentence(refused.value, "cannot be written")
        assert 30 < session.position < 90, "the micro-batch that could not be frozen"
        goes_on_without(session, all_entries(session), session.position, session.evicted)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_loading(tiny_llama: Path, tmp_path: Path) -> None:
    with session_of(tiny_llama, kv_budget=40) as session:
        session.decode(tokens_for(300))
        data = session.save_state()
    with session_of(tiny_llama, kv_budget=40, freeze=f"disk:{tmp_path}") as session:
        with no_file_beyond(8192), pytest.raises(FreezeError) as refused:
            session.load_state(data)
        assert_one_sentence(refused.value, "no room for more frozen entries")
        assert session.position == session.stats().entries_kept == 0
        session.decode(tokens_for(20))
        session.load_state(data)
        check_all_is_there(session)
        session.decode(tokens_for(20))


def test_a_disk_that_fails_while_resizing(tiny_llama: Path, tmp_path: Path) -> None:
    with session_of(tiny_llama, kv_budget=1.0, freeze=f"disk:{tmp_path}") as session:
        session.decode(tokens_for(300))
        with no_file_beyond(8192):
            session.resize(40)
        with pytest.raises(FreezeError, match="cannot be written, so that what was frozen is lost"):
            session.decode(tokens_for(16))
        goes_on_without(session, all_entries(session), 316, session.evicted)


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
    "zeros": (lambda path: overwrite(path, 0, bytes(4096)), "is no file of frozen entries"),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("policy", ["uniform", "freeze"])
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
    """The session has what it held, and reads on without what was frozen."""
    assert (all_entries(session), session.position) == (entries, position)
    assert session.evicted == frozen
    rows = session.decode(tokens_for(70, seed=2), all_logits=True)
    assert np.isfinite(rows).all()
    assert len(list(session.generate([], 5))) > 0
    assert session.thaw() == 0
    stats = session.stats()
    assert stats.entries_kept + stats.evictions == stats.entries_full
    session.resize(30)
    session.truncate(session.position - 10)
    session.reset()
    session.decode(tokens_for(100))


def test_what_gave_up_can_be_saved_and_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    """The file is one of a session with nothing frozen; only a new session takes frozen ones."""
    options = {"kv_budget": 40, "policy": "freeze"}
    with session_of(tiny_llama, **options) as session:
        session.decode(tokens_for(250))
        healthy = session.save_state()
    with session_of(tiny_llama, freeze=f"disk:{tmp_path}", **options) as session:
        session.decode(tokens_for(250))
        cold_file(tmp_path).unlink()
        with pytest.raises(FreezeError, match="was removed"):
            session.decode(tokens_for(10))
        data = session.save_state()
        assert session.save_state() == data
        entries = all_entries(session)
        assert_load_refused(session, healthy, "make a new session")
        assert all_entries(session) == entries
    with session_of(tiny_llama, **options) as session:
        session.load_state(data)
        assert all_entries(session) == entries
        session.decode(tokens_for(100))
        check_all_is_there(session)


def damage_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for i in range(4096, len(content), 100):
        content[i] ^= 1
    overwrite(path, 4096, bytes(content[4096:]))


@pytest.mark.parametrize("policy", ["uniform", "streaming", "freeze"])
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
        goes_on_without(session, all_entries(session), position, session.evicted)
    assert not list(tmp_path.iterdir())


def test_saving_what_cannot_be_read(tiny_llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.ekv"
    with session_of(tiny_llama, kv_budget=40, freeze=f"disk:{tmp_path}") as session:
        session.decode(tokens_for(250))
        damage_pages(cold_file(tmp_path))
        with pytest.raises(FreezeError) as refused:
            session.save(target)
        assert_one_sentence(refused.value, "does not hold what was written to it", "lost")
        assert not list(tmp_path.iterdir())
        session.save(target)
        goes_on_without(session, all_entries(session), 250, session.evicted)
    with session_of(tiny_llama, kv_budget=40) as session:
        session.load(target)
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


# --- what cannot be -------------------------------------------------------------------------------


def test_what_cannot_freeze_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    for policy in ("layer", "layer-range"):
        for freeze in ("ram", f"disk:{tmp_path}"):
            with pytest.raises(SettingsError, match="comes back for each head by itself"):
                session_of(tiny_llama, policy=policy, freeze=freeze)
    with pytest.raises(SettingsError, match="flat store has no cold storage"):
        session_of(tiny_llama, store="flat", policy="recency")
    with pytest.raises(BudgetError, match=r"--freeze-limit \d+B or more"):
        session_of(tiny_llama, freeze=Freezing(f"disk:{tmp_path}", limit=1000))
    assert not list(tmp_path.iterdir())
