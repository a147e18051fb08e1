"""`entropykv chat` in a terminal handles Ctrl-C, and lines that are too long."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entropykv import Session
from entropykv.session.reader import SequenceReader
from tests.support.chats import GREEDY, Chat, open_plain


def interrupting(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Return `function`, with a SIGINT to this process before its call number `at`, from 1 on."""
    calls = []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*arguments, **options)

    return call


def test_ctrl_c_stops_the_answer_only(
    tiny_llama: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = chat(tiny_llama, "the and of\n", "-n", 5)
    monkeypatch.setattr(Session, "token_bytes", interrupting(Session.token_bytes, 5))
    out, errors = chat(tiny_llama, "the and of\n/stats\nto in\n", "-n", 12)
    answers = out.split("\n")
    # The last character may be incomplete.
    assert answers[0].rstrip("\ufffd") == whole.rstrip("\n\ufffd")
    assert answers[1]
    with open_plain(tiny_llama) as session:
        n_read = len(session.tokenize("the and of")) + 5
    assert f"context  {n_read} of" in errors


def test_ctrl_c_while_a_turn_is_read_takes_it_back(
    tiny_llama: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SequenceReader._read_micro_batch
    long = " ".join(["the and of to in"] * 20)
    n_calls = 1 + 12 + 2  # The second turn was read in part.
    monkeypatch.setattr(SequenceReader, "_read_micro_batch", interrupting(read, n_calls))
    out, errors = chat(tiny_llama, f"the\n{long}\n/history\nof\n", "-ub", 32)
    assert "interrupted while the turn was read: it does not count" in errors
    assert long not in errors
    monkeypatch.setattr(SequenceReader, "_read_micro_batch", read)
    expected, _ = chat(tiny_llama, "the\nof\n", "-ub", 32)
    answers = out.split("\n")
    assert [answers[0], *answers[2:]] == expected.split("\n")


_IN_TERMINAL = """
import fcntl, sys, termios
from entropykv.cli import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # or Ctrl-C would be no signal
sys.exit(main(sys.argv[1:]))
"""


class _Terminal:
    """Hold a process in a terminal of 40 columns."""

    def __init__(self, *arguments: object, cache: Path) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "dumb", "XDG_CACHE_HOME": str(cache)},
            start_new_session=True,
        )
        os.close(slave)

    def until(self, end: str) -> str:
        """Read what is shown until it ends with `end`, at most a minute; return it."""
        shown = ""
        limit = time.monotonic() + 60
        while not shown.endswith(end):
            ready, _, _ = select.select([self.master], [], [], limit - time.monotonic())
            assert ready, shown
            shown += os.read(self.master, 1).decode("utf-8", errors="replace")
        return shown

    def type(self, text: str, end: str = "> ") -> str:
        """Type a text, and return what is shown until the next prompt."""
        os.write(self.master, text.encode())
        return self.until(end)


def test_a_narrow_terminal(tmp_path: Path) -> None:
    terminal = _Terminal("chat", "--demo", "bitnet", *GREEDY, cache=tmp_path)
    greeting = terminal.until("> ").replace("\r\n", " ")
    assert "context 1,000,000 tokens, budget 1,024 tokens per KV head (" in greeting
    assert "Say something; /help shows the commands, and Tab completes them." in greeting
    answer = terminal.type("Where does Ines live?\n")
    assert "Ines lives in" in answer
    assert re.search(r"\[of 1,\d+ tokens, a KV head holds\s+[\d,]+\s+on\s+average \(\d+%\)", answer)
    for command in ("/stats", "/help"):
        shown = terminal.type(f"{command}\n").replace("\r", "").split("\n")
        assert len(shown) > 8
        assert max(map(len, shown)) <= 40, shown
    assert "turns  1" in terminal.type("/sta\t\n")  # Tab completes the command.
    first = terminal.type("\x03").replace("\r\n", " ")
    assert "ends the conversation; /save NAME keeps it." in first
    assert "turns  1" in terminal.type("/stats\n")  # A single Ctrl-C does nothing.
    terminal.type("\x03")
    terminal.type("half a line", end="line")  # The terminal drops what is not read at Ctrl-C.
    assert "ends the" not in terminal.type("\x03")  # Ctrl-C drops only the line.
    terminal.type('"""\n', end=". ")
    terminal.type("half a block\n", end=". ")
    assert "ends the" not in terminal.type("\x03")
    assert "ends the" in terminal.type("\x03")
    os.write(terminal.master, b"\x03")
    assert terminal.process.wait(timeout=30) == 0
    os.close(terminal.master)


def test_what_was_typed_comes_back_in_the_next_chat(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    # The second entry is arrow up, pressed twice.
    for typed in ("/history\n", "\x1b[A" * 2 + "\n"):
        terminal = _Terminal("chat", "--demo", "bitnet", *GREEDY, cache=tmp_path)
        terminal.until("> ")
        assert "No turns yet." in terminal.type(typed)
        os.write(terminal.master, b"/exit\n")
        assert terminal.process.wait(timeout=30) == 0
        os.close(terminal.master)
    history = tmp_path / "entropykv" / "chat_history"
    assert history.read_text().split() == ["/history", "/exit", "/history", "/exit"]
    assert history.stat().st_mode & 0o077 == 0
