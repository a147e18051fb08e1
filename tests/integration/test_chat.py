"""`entropykv chat`: a conversation in fixed memory."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import runpy
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

from benchmarks.chat import MODELS, talk
from entropykv import Session
from entropykv.cli import main
from entropykv.model.geometry import read_geometry
from entropykv.model.shipped import DEMOS
from tests.support.command import entropykv
from tests.support.tiny_models import write_gpt2

GREEDY = ("--temp", "0", "-t", "1", "-n", "12")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Chat = Callable[..., tuple[str, str]]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Run a piped conversation to its end; returns stdout and stderr."""

    def run(model: Path, lines: str | bytes, *options: object) -> tuple[str, str]:
        data = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        assert main(["chat", "-m", str(model), *GREEDY, *map(str, options)]) == 0
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return shown.out, shown.err

    return run


def plain(session: Session, *turns: str) -> list[str]:
    """Answers to turns of plain text, 12 tokens each."""
    answers = []
    for text in turns:
        first = session.position == 0
        tokens = session.tokenize(text if first else f"\n{text}", add_bos=first)
        answers.append(answer_to(session, tokens))
    return answers


def answer_to(session: Session, tokens: list[int]) -> str:
    """The line that chat writes after these tokens; every token of it is read."""
    answer = list(session.generate(tokens, 12))
    if len(answer) == 12:
        session.decode(answer[-1:])
    return session.detokenize(answer) + "\n"


def open_plain(model: Path, **options: Any) -> Session:
    return Session(model, **{"n_ctx": 1_000_000, "kv_budget": 1024, "n_threads": 1, **options})


def sentences(errors: str) -> list[str]:
    """What chat says, besides the figures of files."""
    lines = [line for line in errors.splitlines() if line.startswith("entropykv: ")]
    return [line.removeprefix("entropykv: ") for line in lines if "raise -n" not in line]


def test_answers_alone_are_on_stdout(tiny_llama: Path, chat: Chat) -> None:
    out, errors = chat(tiny_llama, "the and of\n\n/stats\nto in\n", "--system", "an end")
    with open_plain(tiny_llama) as session:
        assert out == "".join(plain(session, "an end\nthe and of", "to in"))
    assert "answer was cut after 12 tokens" in errors
    assert "2 turns" not in errors
    assert re.search(r"turns +1\n +context +\d+ of 1,000,000 tokens\n", errors)


def test_the_template_makes_the_turns(smollm2: Path, chat: Chat) -> None:
    questions = ("What is the capital of France?", "And of Italy?")
    out, _ = chat(smollm2, "\n".join(questions), "--system", "You are brief.")
    with open_plain(smollm2) as session:
        first = session.chat_prompt(questions[0], "You are brief.")
        second = session.chat_turn(questions[1])
        assert first is not None
        assert second is not None
        assert "system\nYou are brief.<" in first
        expected = ""
        for text in (first, second):
            expected += answer_to(session, session.tokenize(text, add_bos=False))
    assert out == expected


def test_several_lines_are_one_turn(tiny_llama: Path, chat: Chat) -> None:
    lines = 'a\\\nb\n"""\n/c\n\nd\\\n"""\n"""\ne\nf'
    out, errors = chat(tiny_llama, lines + "\n")
    with open_plain(tiny_llama) as session:
        assert out == "".join(plain(session, "a\nb", "/c\n\nd\\", "e\nf"))
    assert not sentences(errors)
    _, errors = chat(tiny_llama, "a\\\n  b\n/history\nc\\")
    assert "> a\n  b\n" in errors


def test_bytes_that_are_no_text_are_replaced(tiny_llama: Path, chat: Chat) -> None:
    _, errors = chat(tiny_llama, b"the \xff end\n/history\n")
    assert "> the \ufffd end\n" in errors


def test_a_saved_conversation_goes_on_in_another_process(
    tiny_llama: Path, chat: Chat, tmp_path: Path
) -> None:
    file = tmp_path / "talk"
    long = " ".join(["the and of to in"] * 60)
    budget = ("--kv-budget", "100")
    out, errors = chat(tiny_llama, f"{long}\n/save {file}\nto in\nof\n", *budget)
    assert f"saved {file}.ekv: " in errors
    again = entropykv(
        "chat", "-m", tiny_llama, *GREEDY, *budget, stdin=f"/load {file}\n/history\nto in\nof\n"
    )
    assert again.returncode == 0, again.stderr
    assert out.split("\n")[-3:] == again.stdout.split("\n")
    assert long in again.stderr
    other, _ = chat(tiny_llama, "to in\nof", *budget, "--load-session", f"{file}.ekv")
    assert other == again.stdout
    changed, _ = chat(tiny_llama, "to in\nof\n", *budget)
    assert changed != other


def test_reset_forgets(tiny_llama: Path, chat: Chat) -> None:
    out, errors = chat(tiny_llama, "the\nof\n/reset\n/history\nthe\n/exit\nthe\n")
    answers = out.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2]
    assert "No turns yet" in errors


def test_the_budget_changes_while_it_runs(tiny_llama: Path, chat: Chat) -> None:
    long = " ".join(["the and of to in"] * 60)
    out, _ = chat(tiny_llama, f"{long}\n/budget 40\nto in\n/stats\n")
    with open_plain(tiny_llama) as session:
        first = plain(session, long)
        session.resize(40)
        assert out == "".join(first + plain(session, "to in"))


def test_what_goes_wrong_is_one_sentence(
    tiny_llama: Path, tiny_bitnet: Path, chat: Chat, tmp_path: Path
) -> None:
    (tmp_path / "junk.ekv").write_bytes(b"junk")
    chat(tiny_bitnet, f"the\n/save {tmp_path}/other\n")
    wrong = {
        "/nothing": "unknown command /nothing; /help shows",
        "/budget": "/budget takes B",
        "/budget 2": "smallest budget",
        "/budget x": "cannot be",
        "/reset now": "/reset takes nothing",
        "/load": "/load takes NAME",
        f"/load {tmp_path}/none": "none.ekv: no such file",
        f"/load {tmp_path}/junk": "is not a saved session",
        f"/load {tmp_path}/other": "other.ekv: ",
        f"/save {tmp_path}/none/x": "No such file",
        f"/save {tiny_llama}": "is no saved session",
        "/save ..": "is a directory",
    }
    out, errors = chat(tiny_llama, "the\n" + "\n".join(wrong) + "\n/budget 1024\nof\n")
    with open_plain(tiny_llama) as session:
        assert out == "".join(plain(session, "the", "of"))  # as if nothing had been tried
    said = sentences(errors)
    assert len(said) == len(wrong), said
    for sentence, words in zip(said, wrong.values(), strict=True):
        assert words in sentence


def test_a_model_that_cannot_be_loaded_ends_it(tmp_path: Path) -> None:
    result = entropykv("chat", "-m", tmp_path / "none.gguf", stdin="x\n")
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def test_after_the_trained_context_a_reset_helps(tmp_path: Path, chat: Chat) -> None:
    path = tmp_path / "gpt2.gguf"
    write_gpt2(path, n_ctx_train=64)
    long = "x" * 60
    out, errors = chat(path, f"{long}\n/history\nthe\n/reset\nthe\n", "--kv-budget", "32")
    said = sentences(errors)
    assert len(said) == 2
    for sentence in said:
        assert "the 64 that the model was trained for" in sentence
        assert "/reset" in sentence
    answers = out.split("\n")
    assert answers[0]  # what was written up to there
    assert f"> {long}\n{answers[0]}" in errors
    assert answers[1] == ""
    assert len(answers[2]) > 0


def test_a_full_context(tiny_llama: Path, chat: Chat) -> None:
    out, errors = chat(tiny_llama, f"{'x' * 50}\nthe\n/reset\nthe\n", "-c", "60")
    assert sentences(errors)[0] == "the context is full; /reset starts anew"
    assert "do not fit into a context of 60" in sentences(errors)[1]
    assert out.split("\n")[2]


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupting(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Press Ctrl-C in one call of a function."""
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
    assert answers[0].rstrip("\ufffd") == whole.rstrip("\n\ufffd")  # half a character or not
    assert answers[1]
    with open_plain(tiny_llama) as session:
        n_read = len(session.tokenize("the and of")) + 5
    assert f"context  {n_read} of" in errors


def test_ctrl_c_while_a_turn_is_read_takes_it_back(
    tiny_llama: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Session._decode_micro_batch
    long = " ".join(["the and of to in"] * 20)
    n_calls = 1 + 12 + 2  # the first turn, its answer, and a part of the second turn
    monkeypatch.setattr(Session, "_decode_micro_batch", interrupting(decode, n_calls))
    out, errors = chat(tiny_llama, f"the\n{long}\n/history\nof\n", "-ub", 32)
    assert "interrupted while the turn was read: it does not count" in errors
    assert long not in errors
    monkeypatch.setattr(Session, "_decode_micro_batch", decode)
    expected, _ = chat(tiny_llama, "the\nof\n", "-ub", 32)
    answers = out.split("\n")
    assert [answers[0], *answers[2:]] == expected.split("\n")


# --- a terminal -----------------------------------------------------------------------------------


_IN_TERMINAL = """
import fcntl, sys, termios
from entropykv.cli import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # or Ctrl-C would be no signal
sys.exit(main(sys.argv[1:]))
"""


class _Terminal:
    """A process in a terminal of 40 columns."""

    def __init__(self, *arguments: object) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(slave)

    def until(self, end: str) -> str:
        """What is shown until it ends like this."""
        shown = ""
        limit = time.monotonic() + 60
        while not shown.endswith(end):
            ready, _, _ = select.select([self.master], [], [], limit - time.monotonic())
            assert ready, shown
            shown += os.read(self.master, 1).decode("utf-8", errors="replace")
        return shown

    def type(self, text: str) -> str:
        """Type, and return what is shown until the next prompt."""
        os.write(self.master, text.encode())
        return self.until("> ")


def test_a_narrow_terminal() -> None:
    terminal = _Terminal("chat", "--demo", "bitnet", *GREEDY)
    terminal.until("Say something; /help shows the commands.\r\n> ")
    assert "Ines lives in" in terminal.type("Where does Ines live?\n")
    for command in ("/stats", "/help"):
        shown = terminal.type(f"{command}\n").replace("\r", "").split("\n")
        assert len(shown) > 8
        assert max(map(len, shown)) <= 40, shown
    assert "ends the conversation" in terminal.type("\x03").replace("\r\n", " ")
    assert "turns  1" in terminal.type("/stats\n")  # one Ctrl-C alone does nothing
    terminal.type("half a line\x03")
    os.write(terminal.master, b"\x03")
    assert terminal.process.wait(timeout=30) == 0
    os.close(terminal.master)


# --- without end ----------------------------------------------------------------------------------


def test_a_conversation_far_beyond_the_trained_context() -> None:
    with Session(DEMOS["bitnet"].path, n_ctx=1_000_000, kv_budget=1024, n_threads=1) as session:
        result = talk(session, MODELS["bitnet"], n_turns=60)
        stats = session.stats()
    assert result.tokens >= 3 * read_geometry(DEMOS["bitnet"].path).n_ctx_train
    assert stats.rebases >= 4
    assert stats.kv_bytes_peak <= stats.kv_bytes_budget
    assert result.rss_growth <= 5 * 2**20
    assert result.right >= 0.8


def test_the_example(
    smollm2: Path,  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    document = tmp_path / "document.txt"
    text = (EXAMPLES / "lighthouse.txt").read_text(encoding="utf-8")
    document.write_text(text[:2000], encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["long_document.py", str(document)])
    runpy.run_path(str(EXAMPLES / "long_document.py"), run_name="__main__")
    shown = capsys.readouterr().out
    read, again = (
        int(match[1]) for match in re.finditer(r"(?:read )?(\d+) tokens (?:in|read)", shown)
    )
    assert again < read / 4  # the document is not read for every question
    assert len(re.findall(r"^> .*\n\S", shown, re.MULTILINE)) == 3


# --- turns that are taken back --------------------------------------------------------------------


def test_regen_gives_the_greedy_answer_again(tiny_llama: Path, chat: Chat) -> None:
    once, _ = chat(tiny_llama, "the cat\n")
    twice, _ = chat(tiny_llama, "the cat\n/regen\n")
    assert twice == once * 2


def test_undo_leaves_a_conversation_that_never_heard_the_turn(tiny_llama: Path, chat: Chat) -> None:
    """With a budget that evicts, too: what is left is read again."""
    for budget in ("1.0", "40"):
        options = ("-c", "512", "--kv-budget", budget)
        out, err = chat(tiny_llama, "the cat\n/undo\na dog\n", *options)
        assert "Taken back: the cat" in err
        expected, _ = chat(tiny_llama, "the cat\n/reset\na dog\n", *options)
        assert out == expected


def test_edit_says_something_else_instead(tiny_llama: Path, chat: Chat) -> None:
    out, _ = chat(tiny_llama, "the cat\n/edit a dog\n")
    expected, _ = chat(tiny_llama, "the cat\n/undo\na dog\n")
    assert out == expected


def test_system_begins_anew(tiny_llama: Path, chat: Chat) -> None:
    out, err = chat(tiny_llama, "the cat\n/system in the end\na dog\n/history\n")
    assert "All turns are forgotten" in err
    assert "> the cat" not in err
    expected, _ = chat(tiny_llama, "a dog\n", "-sys", "in the end")
    assert out.endswith(expected)


def test_nothing_to_take_back_is_one_sentence(tiny_llama: Path, chat: Chat) -> None:
    for command in ("/undo", "/regen", "/edit a dog"):
        out, err = chat(tiny_llama, f"{command}\n")
        assert out == ""
        assert "no turn to take back" in err


def test_save_asks_before_it_replaces_a_file(tiny_llama: Path, chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "talk.ekv"
    chat(tiny_llama, f"the cat\n/save {path}\n")
    before = path.read_bytes()
    _, err = chat(tiny_llama, f"a dog\n/save {path}\nn\n")
    assert "stays as it is" in err
    assert path.read_bytes() == before
    chat(tiny_llama, f"a dog\n/save {path}\ny\n")
    assert path.read_bytes() != before
