"""`entropykv run` saves and loads sessions, which continue where they stopped."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from entropykv import Session
from tests.support.command import assert_refused, entropykv, started
from tests.support.saved_sessions import session_of


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
        session.files.load(file)
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
        (("-p", "x", "--document", junk), ("is not a saved session or document", "entropykv read")),
        (("-p", "x", "--load-session", file, "--kv-type", "f16"), ("--kv-type q8_0",)),
        (("-p", "x", "--load-session", file, "--store", "flat"), ("--store headwise",)),
        (("-p", "x " * 400, "--load-session", file), ("after 7 of the saved session", "400")),
        (("-p", "x", "--save-session", tiny_llama), ("is not a saved session",)),
        (("-p", "x", "--save-session", tmp_path), ("is a directory",)),
        (("-p", "x", "--save-session", tmp_path / "none" / "x"), ("No such file",)),
        (("--save-session", file), ("prompt is empty",)),
    ):
        result = run(tiny_llama, *arguments)
        if "--load-session" in arguments and "400" in words:  # The same text was loaded before.
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
        prompt = session.model.chat_prompt("Name a colour.")
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
    # The model does not end its answer to this prompt soon.
    prompt = "Once upon a time, in a village by the sea,"
    options = ("-m", str(smollm2), "--no-chat", "--temp", "0", "-c", "4096", "-t", "1")
    with started("run", *options, "-p", prompt, "--save-session", file) as process:
        assert process.stdout is not None
        start = process.stdout.read(1)  # This character shows that generation has begun.
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
    terminal, stderr = pty.openpty()  # The progress bar appears only in a terminal.
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "entropykv.cli", "run", *options, "--save-session", str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as process:
        os.close(stderr)
        errors = ""
        while "reading" not in errors:
            errors += os.read(terminal, 1000).decode()
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # The other end of the terminal is closed.
            while shown := os.read(terminal, 1000):
                errors += shown.decode()
        process.wait(timeout=60)
    os.close(terminal)
    assert process.returncode == 130, errors
    note = f"interrupted while the prompt was read: {file} is not written"
    assert note in " ".join(errors.split())  # In a terminal, the note is wrapped.
    assert os.listdir(tmp_path) == ["text"]
