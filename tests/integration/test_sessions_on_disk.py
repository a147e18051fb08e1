"""A loaded session continues as if it had never ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv import ContextError, Session
from entropykv.session.session import _DEPRECATED
from tests.architectures import MODELS
from tests.support.command import python
from tests.support.logits import relative_error, tokens_for
from tests.support.online_sessions import ONLINE, are_equal, check
from tests.support.releases import write_known
from tests.support.saved_sessions import (
    all_entries,
    assert_load_refused,
    future,
    session_of,
    with_contents,
)

STORES = [
    *(("tiny_llama", "headwise", p) for p in ("uniform", "uniform:attention+values", "streaming")),
    ("tiny_llama", "flat", "recency"),
    *(("uneven_llama", "headwise", policy) for policy in ONLINE),
]
OF_BITNET = [("tiny_bitnet", *of) for _, *of in STORES[:4]]


@pytest.mark.parametrize(("model", "store", "policy"), [*STORES, *OF_BITNET])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_the_same_numbers_as_without_a_break(
    model: str, store: str, policy: str, kv_type: str, tmp_path: Path, request: Any
) -> None:
    options = {"store": store, "policy": policy, "kv_type": kv_type}
    path, file = request.getfixturevalue(model), tmp_path / "x.ekv"
    with session_of(path, **options) as session:
        session.decode(tokens_for(200))
        list(session.generate([7], 30))
        contents = session.files.save(file, chat=True)
        assert session.stats().evictions > 0
        assert are_equal(session) == (policy not in ONLINE)
        kept, evictions = session.stats().entries_kept, session.stats().evictions
        expected = (future(session), session.files.save_state())
    assert contents.n_entries == kept
    with session_of(path, **options) as session:
        session.decode(tokens_for(120, seed=8))  # Loading discards these tokens.
        assert session.files.load(file) == contents
        assert contents.chat is True
        stats = session.stats()
        assert (stats.entries_kept, stats.evictions) == (kept, evictions)
        assert stats.kv_bytes_now <= stats.kv_bytes_peak <= stats.kv_bytes_budget
        assert (future(session), session.files.save_state()) == expected


def test_saving_changes_nothing(tiny_llama: Path) -> None:
    """A session that saves and loads its own state writes the same text as one that does not."""
    results = []
    for saves in (False, True):
        with session_of(tiny_llama) as session:
            session.decode(tokens_for(200))
            if saves:
                session.files.load_state(session.files.save_state())
            results.append(future(session))
    assert results[0] == results[1]


@pytest.mark.parametrize("n_tokens", [50, 199])
def test_windows_go_back_as_far_as_before(n_tokens: int, tmp_path: Path) -> None:
    """A loaded session can go back as far as the saved one, because its file says where its windows
    are whole.
    """
    path = tmp_path / "windows.gguf"
    write_known(path, MODELS["gemma3"])
    with session_of(path, kv_budget=1.0, policy="recency") as session:
        session.decode(tokens_for(n_tokens))
        lengths = range(n_tokens + 1)
        before = [session.text.held().can_return_to(n) for n in lengths]
        assert all(before) == (n_tokens == 50)
        data = session.files.save_state()
        session.files.load_state(data)
        assert [session.text.held().can_return_to(n) for n in lengths] == before
        whole = with_contents(data, lambda contents: contents.update(whole_from=n_tokens))
        session.files.load_state(whole)
        assert [n for n in lengths if session.text.held().can_return_to(n)] == [0, n_tokens]
        with pytest.raises(ContextError, match=f"what they see only from position {n_tokens} on"):
            session.text.truncate(n_tokens - 1)
        changed = with_contents(data, lambda contents: contents.update(whole_from=n_tokens + 1))
        assert_load_refused(session, changed, "windows beyond its text")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.integers(1, 90)),
        st.tuples(st.just("generate"), st.integers(1, 20)),
        st.tuples(st.just("resize"), st.sampled_from([20, 48, 100, 0.5, "200KiB"])),
        st.tuples(st.just("truncate"), st.floats(0.0, 1.0)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=7,
)


def take(session: Session, steps: list[tuple[str, Any]]) -> list[int]:
    """Execute steps; return the tokens that the session should hold."""
    read: list[int] = []
    for action, value in steps:
        if action == "decode":
            tokens = tokens_for(min(value, session.config.n_ctx - session.position), seed=value)
            if tokens:
                session.decode(tokens)
            read += tokens
        elif action == "generate" and session.logits is not None:
            read += list(session.generate([], value))
            del read[session.position :]
        elif action == "resize":
            session.cache.resize(value)
        elif action == "truncate":
            # The flat store can roll back to some positions only.
            with contextlib.suppress(ContextError):
                session.text.truncate(int(value * session.position))
            del read[session.position :]
        elif action == "reset":
            session.reset()
            read = []
    return read


@settings(max_examples=25)
@given(before=STEPS, after=STEPS, store=st.sampled_from(["headwise", "flat"]))
def test_any_past_has_the_same_future(
    tiny_llama: Path, before: list[tuple[str, Any]], after: list[tuple[str, Any]], store: str
) -> None:
    with (
        session_of(tiny_llama, n_ctx=256, store=store) as saved,
        session_of(tiny_llama, n_ctx=256, store=store) as loaded,
    ):
        read = take(saved, before)
        assert saved.tokens == read
        budget = max(2, saved.cache.budgets()[0][0])
        for session in (saved, loaded):
            session.cache.resize(budget)
        data = saved.files.save_state()
        loaded.files.load_state(data)
        assert loaded.files.save_state() == data
        results = []
        for session in (saved, loaded):
            take(session, after)
            results.append((session.tokens, all_entries(session), session.files.save_state()))
        assert results[0] == results[1]


def test_memory_and_disk_hold_the_same_bytes(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.ekv"
    with session_of(tiny_llama) as session:
        session.decode(tokens_for(150))
        session.files.save(file)
        assert session.files.save_state() == file.read_bytes()
        assert os.listdir(tmp_path) == ["x.ekv"]
        first = session.files.save_state()
        session.text.truncate(0)
        assert session.files.load_state(first).position == session.position == 150
        assert session.files.save_state() == first


def test_an_empty_session_and_one_without_logits(tiny_llama: Path) -> None:
    for store in ("headwise", "flat"):
        with session_of(tiny_llama, store=store) as session:
            empty = session.files.save_state()
            session.decode(tokens_for(50))
            session.text.truncate(30)
            assert session.logits is None
            shortened = session.files.save_state()
            session.files.load_state(empty)
            assert (session.position, session.tokens, session.stats().entries_kept) == (0, [], 0)
            session.files.load_state(shortened)
            assert session.tokens == tokens_for(50)[:30]
            with pytest.raises(ContextError, match="nothing to read"):
                next(session.generate([], 5))
            rows = session.decode(tokens_for(50)[30:])
            session.reset()
            assert relative_error(rows, session.decode(tokens_for(50))) < 1e-3


@pytest.mark.parametrize(("model", "store", "policy"), STORES)
def test_other_budgets(model: str, store: str, policy: str, request: Any) -> None:
    """A loaded session with a smaller budget evicts as resize() does; with a larger one, it keeps
    everything.
    """
    options = {"store": store, "policy": policy, "n_ubatch": 64}
    path = request.getfixturevalue(model)
    with session_of(path, **options) as session:
        session.decode(tokens_for(200))
        data = session.files.save_state()
        kept = all_entries(session)
        session.cache.resize(50)
        evicted = (session.cache.budgets(), all_entries(session))
    with session_of(path, kv_budget=50, **options) as session:
        session.files.load_state(data)
        assert (session.cache.budgets(), all_entries(session)) == evicted
        check(session)
        session.decode(tokens_for(80))
        check(session)
    with session_of(path, kv_budget=1.0, **options) as session:
        session.files.load_state(data)
        assert all_entries(session) == kept
        session.decode(tokens_for(80))
        assert [len(entries) for entries in all_entries(session)] == [len(e) + 80 for e in kept]


def test_repeat_penalty_looks_back_beyond_the_break(tiny_llama: Path) -> None:
    sampling = {"temperature": 0.0, "repeat_penalty": 1.4}
    with session_of(tiny_llama) as session:
        whole = list(session.generate(tokens_for(30), 40, **sampling))
        session.reset()
        first = list(session.generate(tokens_for(30), 20, **sampling))
        data = session.files.save_state()
    with session_of(tiny_llama) as session:
        session.files.load_state(data)
        rest = list(session.generate(first[-1:], 20, **sampling))
    assert first + rest == whole


PART = """
import json, os, signal, sys
from entropykv import Session
model, budget, n_ctx, tokens, save, load, n = json.loads(sys.argv[1])
with Session(model, n_ctx=n_ctx, kv_budget=budget, kv_type="q8_0", n_threads=1) as session:
    if load:
        session.files.load(load)
        tokens = []
    written = list(session.generate(tokens, n))
    session.decode(written[-1:])
    entries = [session.cache.entries(l, h).tolist() for l, b in enumerate(session.cache.budgets())
               for h in range(len(b))]
    if save:
        session.files.save(save)
    print(json.dumps([written, entries]), flush=True)
    if save:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def part(*arguments: object) -> tuple[list[int], list[list[int]]]:
    """Generate in a process of its own, which kills itself after saving if arguments[4] is a path;
    return tokens and entries.
    """
    code = -signal.SIGKILL if arguments[4] else 0
    result = python(PART, json.dumps(arguments), code=code)
    written, entries = json.loads(result.stdout)
    return written, entries


@pytest.mark.parametrize("model", ["tiny_llama", "smollm2"])
@pytest.mark.needs("signal.SIGKILL")
def test_a_killed_process_goes_on_in_another(model: str, tmp_path: Path, request: Any) -> None:
    path = str(request.getfixturevalue(model))
    if model == "smollm2":
        prose = request.getfixturevalue("prose")
        with Session(path, n_ctx=8) as session:
            tokens = session.tokenize(prose)[:900]
    else:
        tokens = tokens_for(600)
    file = str(tmp_path / "x.ekv")
    options = (path, 0.2, 1024, tokens)
    whole, entries = part(*options, None, None, 60)
    first, _ = part(*options, file, None, 30)
    rest, entries_after = part(*options, None, file, 30)
    assert first + rest == whole
    assert entries_after == entries
    assert sum(map(len, entries)) <= 205 * len(entries)


def test_names_of_version_0_1_still_work_and_say_what_to_use(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with session_of(tiny_llama) as session:
        session.decode(tokens_for(20))
        with pytest.warns(
            DeprecationWarning, match=r"Session\.save is .*; use Session\.files\.save$"
        ):
            session.save(tmp_path / "x.ekv")  # type: ignore[attr-defined]
        for name in _DEPRECATED:
            with pytest.warns(DeprecationWarning, match=f"use Session.{_DEPRECATED[name]}$"):
                getattr(session, name)
        with pytest.raises(AttributeError, match="a Session has no attribute 'sav'"):
            session.sav()  # type: ignore[attr-defined]
