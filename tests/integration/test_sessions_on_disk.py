"""Sessions on disk: what is loaded goes on as if it had never ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entropykv import ContextError, Session, SessionFileError
from tests.support.command import assert_refused, entropykv
from tests.support.logits import relative_error, tokens_for
from tests.support.saved_sessions import (
    all_entries,
    assert_load_refused,
    future,
    sections_start,
    session_of,
    signed,
    with_contents,
)
from tests.support.tiny_models import write_llama

STORES = [
    ("headwise", "uniform"),
    ("headwise", "uniform:expected+values"),
    ("headwise", "streaming"),
    ("flat", "recency"),
]


# --- what is loaded goes on as saved --------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_bitnet"])
@pytest.mark.parametrize(("store", "policy"), STORES)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_the_same_numbers_as_without_a_break(
    model: str, store: str, policy: str, kv_type: str, tmp_path: Path, request: Any
) -> None:
    options = {"store": store, "policy": policy, "kv_type": kv_type}
    path, file = request.getfixturevalue(model), tmp_path / "x.ekv"
    with session_of(path, **options) as session:
        session.decode(tokens_for(200))
        list(session.generate([7], 30))
        contents = session.save(file, chat=True)
        assert session.stats().evictions > 0
        kept, evictions = session.stats().entries_kept, session.stats().evictions
        expected = future(session)
    assert contents.n_entries == kept
    with session_of(path, **options) as session:
        session.decode(tokens_for(120, seed=8))  # forgotten by the load
        assert session.load(file) == contents
        assert contents.chat is True
        stats = session.stats()
        assert (stats.entries_kept, stats.evictions) == (kept, evictions)
        assert stats.kv_bytes_now <= stats.kv_bytes_peak <= stats.kv_bytes_budget
        assert future(session) == expected


def test_saving_changes_nothing(tiny_llama: Path) -> None:
    """An uninterrupted run that never saved writes the same text."""
    results = []
    for saves in (False, True):
        with session_of(tiny_llama) as session:
            session.decode(tokens_for(200))
            if saves:
                session.load_state(session.save_state())
            results.append(future(session))
    assert results[0] == results[1]


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
    """Take steps; return the tokens that the session should know of."""
    read: list[int] = []
    for action, value in steps:
        if action == "decode":
            tokens = tokens_for(min(value, session.n_ctx - session.position), seed=value)
            if tokens:
                session.decode(tokens)
            read += tokens
        elif action == "generate" and session.logits is not None:
            read += list(session.generate([], value))
            del read[session.position :]
        elif action == "resize":
            session.resize(value)
        elif action == "truncate":
            with contextlib.suppress(ContextError):  # the flat store cannot return everywhere
                session.truncate(int(value * session.position))
            del read[session.position :]
        elif action == "reset":
            session.reset()
            read = []
    return read


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(before=STEPS, after=STEPS, store=st.sampled_from(["headwise", "flat"]))
def test_any_past_has_the_same_future(
    tiny_llama: Path,
    before: list[tuple[str, Any]],
    after: list[tuple[str, Any]],
    store: str,
) -> None:
    with (
        session_of(tiny_llama, n_ctx=256, store=store) as saved,
        session_of(tiny_llama, n_ctx=256, store=store) as loaded,
    ):
        read = take(saved, before)
        assert saved.tokens == read
        budget = max(2, saved.budgets()[0][0])
        for session in (saved, loaded):
            session.resize(budget)
        data = saved.save_state()
        loaded.load_state(data)
        assert loaded.save_state() == data
        results = []
        for session in (saved, loaded):
            take(session, after)
            results.append((session.tokens, all_entries(session), session.save_state()))
        assert results[0] == results[1]


def test_memory_and_disk_hold_the_same_bytes(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.ekv"
    with session_of(tiny_llama) as session:
        session.decode(tokens_for(150))
        session.save(file)
        assert session.save_state() == file.read_bytes()
        assert os.listdir(tmp_path) == ["x.ekv"]
        first = session.save_state()
        session.truncate(0)
        assert session.load_state(first).position == session.position == 150
        assert session.save_state() == first


def test_an_empty_session_and_one_without_logits(tiny_llama: Path) -> None:
    for store in ("headwise", "flat"):
        with session_of(tiny_llama, store=store) as session:
            empty = session.save_state()
            session.decode(tokens_for(50))
            session.truncate(30)
            assert session.logits is None
            shortened = session.save_state()
            session.load_state(empty)
            assert (session.position, session.tokens, session.stats().entries_kept) == (0, [], 0)
            session.load_state(shortened)
            assert session.tokens == tokens_for(50)[:30]
            with pytest.raises(ContextError, match="nothing to read"):
                next(session.generate([], 5))
            rows = session.decode(tokens_for(50)[30:])
            session.reset()
            assert relative_error(rows, session.decode(tokens_for(50))) < 1e-3


@pytest.mark.parametrize(("store", "policy"), STORES)
def test_other_budgets(tiny_llama: Path, store: str, policy: str) -> None:
    """A smaller one evicts as resize() does; a larger one keeps all."""
    options = {"store": store, "policy": policy, "n_ubatch": 64}
    with session_of(tiny_llama, **options) as session:
        session.decode(tokens_for(200))
        data = session.save_state()
        kept = all_entries(session)
        session.resize(50)
        evicted = all_entries(session)
    with session_of(tiny_llama, kv_budget=50, **options) as session:
        session.load_state(data)
        assert all_entries(session) == evicted
        stats = session.stats()
        assert stats.kv_bytes_now <= stats.kv_bytes_peak <= stats.kv_bytes_budget
        session.decode(tokens_for(80))
        assert all(len(entries) <= 50 for entries in all_entries(session))
    with session_of(tiny_llama, kv_budget=1.0, **options) as session:
        session.load_state(data)
        assert all_entries(session) == kept
        session.decode(tokens_for(80))
        assert [len(entries) for entries in all_entries(session)] == [len(e) + 80 for e in kept]


def test_repeat_penalty_looks_back_beyond_the_break(tiny_llama: Path) -> None:
    sampling = {"temperature": 0.0, "repeat_penalty": 1.4}
    with session_of(tiny_llama) as session:
        whole = list(session.generate(tokens_for(30), 40, **sampling))
        session.reset()
        first = list(session.generate(tokens_for(30), 20, **sampling))
        data = session.save_state()
    with session_of(tiny_llama) as session:
        session.load_state(data)
        rest = list(session.generate(first[-1:], 20, **sampling))
    assert first + rest == whole


# --- killed ---------------------------------------------------------------------------------------

PART = """
import json, os, signal, sys
from entropykv import Session
model, budget, n_ctx, tokens, save, load, n = json.loads(sys.argv[1])
with Session(model, n_ctx=n_ctx, kv_budget=budget, kv_type="q8_0", n_threads=1) as session:
    if load:
        session.load(load)
        tokens = []
    written = list(session.generate(tokens, n))
    session.decode(written[-1:])
    entries = [session.entries(l, h).tolist() for l, b in enumerate(session.budgets())
               for h in range(len(b))]
    if save:
        session.save(save)
    print(json.dumps([written, entries]), flush=True)
    if save:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def part(*arguments: object) -> tuple[list[int], list[list[int]]]:
    """Generate in a process of its own, which kills itself after saving."""
    result = subprocess.run(
        [sys.executable, "-c", PART, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == (-signal.SIGKILL if arguments[4] else 0), result.stderr
    written, entries = json.loads(result.stdout)
    return written, entries


@pytest.mark.parametrize("model", ["tiny_llama", "smollm2"])
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


# --- refusals -------------------------------------------------------------------------------------


def test_other_models_and_settings(tiny_llama: Path, tiny_bitnet: Path, tmp_path: Path) -> None:
    with session_of(tiny_llama) as session:
        session.decode(tokens_for(200))
        data = session.save_state()
    twin = tmp_path / "twin.gguf"  # the same header, other weights
    write_llama(twin, n_layer=3, n_head=6, n_head_kv=2, head_dim=32, weight_type="F32", seed=1)
    for path, options, words in (
        (tiny_bitnet, {}, "another model file"),
        (twin, {}, "another model file"),
        (tiny_llama, {"kv_type": "f16"}, "--kv-type q8_0"),
        (tiny_llama, {"store": "flat"}, "--store headwise"),
        (tiny_llama, {"policy": "streaming"}, "--policy adaptive"),
        (tiny_llama, {"policy": "uniform:mass+values"}, "--policy adaptive"),
        (tiny_llama, {"n_ctx": 199}, "holds 200 tokens, more than the context of 199"),
    ):
        with session_of(path, **options) as session:
            session.decode(tokens_for(100, seed=4))
            assert_load_refused(session, data, words)
            session.decode(tokens_for(20))
    with session_of(tiny_llama, n_ctx=200) as session:
        session.load_state(data)


def test_a_flat_session_that_needs_more_cells(tiny_llama: Path) -> None:
    with session_of(tiny_llama, store="flat", kv_budget=1.0) as session:
        session.decode(tokens_for(400))
        data = session.save_state()
    with session_of(tiny_llama, store="flat", kv_budget=50) as session:
        session.decode(tokens_for(100))
        assert_load_refused(session, data, "--kv-budget 400")


def test_lies_under_a_right_digest(tiny_llama: Path) -> None:
    """Nothing in a file is trusted because its digest is right."""

    def change(**values: Any) -> Callable[[dict[str, Any]], None]:
        return lambda contents: contents.update(values)

    with session_of(tiny_llama) as session:
        session.decode(tokens_for(200))
        data = session.save_state()
        start = sections_start(data)
        n = len(session.entries(0, 0))
        whole = json.loads(data[16 : start - 16])["contents"]
        other = [[n - 20, n], *whole["entries"][1:]]
        for lie, words in (
            (change(position=100), "KV head 0 of layer 0 has a position that was never read"),
            (change(position=201), "tokens that cannot be"),
            (change(entries=other), "KV head 0 of layer 0 has a size"),
            (change(entries=[[n, n]]), "other KV heads"),
            (change(entries=[[n], [n], [n]]), "other KV heads"),
            (change(entries=[[2**31 - 1, n], *whole["entries"][1:]]), "impossible number"),
            (
                change(n_tokens=199, sections=[whole["sections"][0] + 4, *whole["sections"][1:]]),
                "is",
            ),
            (change(n_logits=0, n_tokens=200 + whole["n_logits"]), "tokens that cannot be"),
            (change(sections=[sum(whole["sections"])]), "other KV heads"),
        ):
            assert_load_refused(session, with_contents(data, lie), words)
        token = data[:start] + struct.pack("<i", session.n_vocab) + data[start + 4 :]
        assert_load_refused(session, signed(token), "tokens that cannot be")
        logits = start + 4 * 200
        nan = data[:logits] + struct.pack("<f", float("nan")) + data[logits + 4 :]
        assert_load_refused(session, signed(nan), "logits that cannot be")


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_random_damage_under_a_right_digest_never_crashes(tiny_llama: Path, kv_type: str) -> None:
    chance = random.Random(3)
    refused = 0
    with session_of(tiny_llama, kv_type=kv_type) as session:
        session.decode(tokens_for(200))
        data = session.save_state()
        start = sections_start(data)
        for _ in range(60):
            damaged = bytearray(data)
            for _ in range(chance.randint(1, 400)):
                damaged[chance.randrange(start, len(data) - 16)] = chance.randrange(256)
            try:
                session.load_state(signed(bytes(damaged)))
            except SessionFileError:
                refused += 1
            session.decode(tokens_for(30))
            session.load_state(data)
        assert session.save_state() == data
    assert 0 < refused <= 60


@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_damage_and_cuts_change_nothing(tiny_llama: Path, tmp_path: Path, store: str) -> None:
    chance = random.Random(4)
    file = tmp_path / "x.ekv"
    with session_of(tiny_llama, store=store) as session:
        session.decode(tokens_for(200))
        data = session.save_state()
        session.decode(tokens_for(20))
        before = session.save_state()
        contents = json.loads(data[16 : sections_start(data) - 16])["contents"]
        sizes = [800, 4 * contents["n_logits"], *contents["sections"]]
        edges = sections_start(data) + np.cumsum([0, *sizes])
        cuts = {0, 1, 8, 16, len(data) - 1, *edges.tolist()}
        cuts |= {chance.randrange(len(data)) for _ in range(20)}
        damaged = [data[:cut] for cut in cuts]
        for _ in range(30):
            changed = bytearray(data)
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            damaged.append(bytes(changed))
        for content in damaged:
            file.write_bytes(content)
            with pytest.raises(SessionFileError, match=r"x\.ekv: (is|has) "):
                session.load(file)
        assert session.save_state() == before


def test_llama_cpp_refuses_a_flat_state_and_the_old_one_is_back(
    tiny_llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with session_of(tiny_llama, store="flat") as session:
        session.decode(tokens_for(200))
        data = session.save_state()
        contents = json.loads(data[16 : sections_start(data) - 16])["contents"]
        start = len(data) - 16 - contents["sections"][1]
        session.decode(tokens_for(20))
        for place in (start, start + 8, start + 12, start + 30):
            changed = bytearray(data)
            changed[place] ^= 0x15
            assert_load_refused(session, signed(bytes(changed)), "cannot be loaded|damaged")
        positions = bytearray(data)
        positions[start - 4 : start] = struct.pack("<i", 198)
        assert_load_refused(session, signed(bytes(positions)), "positions that cannot be")
        session.decode(tokens_for(20))
    assert capfd.readouterr().err == ""


def test_a_failed_save_leaves_the_old_file(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.ekv"
    with session_of(tiny_llama) as session:
        session.decode(tokens_for(50))
        session.save(file)
        old = file.read_bytes()
        session.decode(tokens_for(50))

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(SessionFileError, match="No space left"):
                session.save(file)
        assert (file.read_bytes(), os.listdir(tmp_path)) == (old, ["x.ekv"])
        with pytest.raises(SessionFileError, match="is no saved session"):
            session.save(tiny_llama)
        session.save(file)
        assert file.read_bytes() == session.save_state()


def test_no_memory_changes_nothing(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session_of(tiny_llama) as session:
        session.decode(tokens_for(50))
        data = session.save_state()

        def fail(*_: object) -> None:
            raise MemoryError("no pages")

        with monkeypatch.context() as patch:
            patch.setattr(session._store, "load_state", fail)
            with pytest.raises(SessionFileError, match="no pages"):
                session.load_state(data)
        session.decode(tokens_for(5))
        assert session.load_state(data).position == 50


# --- the command line -----------------------------------------------------------------------------


def run(model: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    options = ("-m", model, "-c", 400, "--kv-budget", 0.25, "--temp", 0, "-t", 1)
    return entropykv("run", *options, *arguments)


@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_run_goes_on_where_it_stopped(tiny_llama: Path, tmp_path: Path, store: str) -> None:
    file = tmp_path / "x.ekv"
    prompt = ("-p", "the and of to in " * 40, "--store", store)
    whole = run(tiny_llama, *prompt, "-n", 40)
    first = run(tiny_llama, *prompt, "-n", 15, "--save-session", file)
    rest = run(tiny_llama, "--store", store, "-n", 25, "--load-session", file)
    assert rest.returncode == 0, rest.stderr
    assert first.stdout[:-1] + rest.stdout == whole.stdout
    assert f"entropykv: saved {file}: " in first.stderr
    tokens = first.stderr.split(f"saved {file}: ")[1]
    assert f"entropykv: loaded {file}: {tokens.split(' MiB')[0]} MiB in 0." in rest.stderr
    assert os.listdir(tmp_path) == ["x.ekv"]


def test_run_appends_the_prompt_to_what_was_read(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.ekv"
    run(tiny_llama, "-p", "the and of", "-n", 10, "--save-session", file)
    result = run(
        tiny_llama, "-p", " to in", "-n", 10, "--load-session", file, "--save-session", file
    )
    with session_of(tiny_llama, n_ctx=400, kv_budget=0.25, n_ubatch=512) as session:
        first = list(session.generate(session.tokenize("the and of"), 10))
        more = first[-1:] + session.tokenize(" to in", add_bos=False)
        second = list(session.generate(more, 10))
        assert result.stdout == session.detokenize(second) + "\n"
        session.decode(second[-1:])
        tokens = session.tokens
        session.load(file)
        assert session.tokens == tokens


def test_run_saves_a_full_context_without_the_last_token(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.ekv"
    result = run(tiny_llama, "-p", "the", "-c", 20, "--kv-budget", 1, "--save-session", file)
    assert "ends before the last token" in result.stderr
    more = run(tiny_llama, "-n", 1, "--kv-budget", 1, "--load-session", file)
    assert result.stdout[:-1].endswith(more.stdout[:-1])


def test_run_refuses_wrong_combinations(tiny_llama: Path, tmp_path: Path) -> None:
    file, junk = tmp_path / "x.ekv", tmp_path / "junk"
    run(tiny_llama, "-p", "the", "-n", 5, "--save-session", file)
    junk.write_bytes(b"junk")
    for arguments, words in (
        (("-p", "x", "--load-session", tmp_path / "none"), ("none", "no such file")),
        (("-p", "x", "--load-session", tmp_path), ("is a directory",)),
        (("-p", "x", "--load-session", junk), ("is not a saved session",)),
        (("-p", "x", "--load-session", tiny_llama), ("is not a saved session",)),
        (("-p", "x", "--load-session", file, "--kv-type", "f16"), ("--kv-type q8_0",)),
        (("-p", "x", "--load-session", file, "--store", "flat"), ("--store headwise",)),
        (("-p", "x " * 400, "--load-session", file), ("after 7 of the saved session", "400")),
        (("-p", "x", "--save-session", tiny_llama), ("is no saved session",)),
        (("-p", "x", "--save-session", tmp_path), ("is a directory",)),
        (("-p", "x", "--save-session", tmp_path / "none" / "x"), ("No such file",)),
        (("--save-session", file), ("prompt is empty",)),
    ):
        result = run(tiny_llama, *arguments)
        if "--load-session" in arguments and "400" in words:  # it was loaded before
            result.stderr = result.stderr.split("\n", 1)[1]
        assert_refused(result, *words)
    assert sorted(os.listdir(tmp_path)) == ["junk", "x.ekv"]


def test_a_chat_goes_on_with_another_turn(smollm2: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.ekv"
    options = ("-m", smollm2, "-c", 512, "--temp", 0, "-n", 24, "-t", 1)
    first = entropykv("run", *options, "-p", "Name a colour.", "--save-session", file)
    second = entropykv("run", *options, "-p", "Another one.", "--load-session", file)
    assert second.returncode == 0, second.stderr
    with Session(smollm2, n_ctx=512) as session:
        prompt = session.chat_prompt("Name a colour.")
        assert prompt is not None
        chat = prompt + first.stdout[:-1]
        chat += "<|im_end|>\n<|im_start|>user\nAnother one.<|im_end|>\n<|im_start|>assistant\n"
        tokens = session.tokenize(chat, add_bos=False)
        assert second.stdout == session.detokenize(list(session.generate(tokens, 24))) + "\n"
    result = entropykv("run", *options, "-p", "x", "--no-chat", "--load-session", file)
    assert result.returncode == 2
    assert "was saved as a chat; leave --no-chat out" in result.stderr
    entropykv("run", *options, "-p", "x", "--no-chat", "--save-session", file)
    result = entropykv("run", *options, "-p", "x", "--load-session", file)
    assert "was saved as plain text; give --no-chat" in result.stderr


def test_ctrl_c_saves_what_was_written(smollm2: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.ekv"
    prompt = "Once upon a time, in a village by the sea,"  # does not end soon
    options = ("-m", str(smollm2), "--no-chat", "--temp", "0", "-c", "4096", "-t", "1")
    command = [sys.executable, "-m", "entropykv.cli", "run", *options, "-p", prompt]
    with subprocess.Popen(
        [*command, "--save-session", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        start = process.stdout.read(1)  # it generates
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        rest, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130, errors
    assert "peak RSS" in errors
    assert f"saved {file}" in errors
    more = entropykv("run", *options, "-n", 20, "--load-session", file)
    whole = entropykv("run", *options, "-p", prompt, "-n", 20 + len(start + rest))
    assert whole.stdout.startswith(start + rest[:-1] + more.stdout[:-1])


def test_ctrl_c_while_the_prompt_is_read_saves_nothing(
    smollm2: Path, tmp_path: Path, prose: str
) -> None:
    file = tmp_path / "x.ekv"
    text = tmp_path / "text"
    text.write_text(prose, encoding="utf-8")
    options = ("-m", str(smollm2), "-f", str(text), "-c", "8192", "-ub", "16", "-t", "1")
    terminal, stderr = pty.openpty()  # the progress bar is for people
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "entropykv.cli", "run", *options, "--save-session", str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as process:
        os.close(stderr)
        errors = ""
        while "reading" not in errors:
            errors += os.read(terminal, 1000).decode()
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end is closed
            while shown := os.read(terminal, 1000):
                errors += shown.decode()
        process.wait(timeout=60)
    os.close(terminal)
    assert process.returncode == 130, errors
    note = f"interrupted while the prompt was read: {file} is not written"
    assert note in " ".join(errors.split())  # a terminal gets it in lines
    assert os.listdir(tmp_path) == ["text"]
