"""Notes to the user and messages of errors have the form that a terminal or a log needs."""

from __future__ import annotations

import io
import pickle
import sys

import pytest

from entropykv import errors
from entropykv.cli.progress import ProgressBar
from entropykv.cli.terminal import say
from entropykv.evaluation.metrics import disagreement, disagreement_note
from entropykv.evaluation.reading import Values
from entropykv.evaluation.results import Record
from entropykv.evaluation.rows import summarize

NOTE = "the answer was cut after 1024 tokens; raise -n for longer ones, or ask again in other words"


class Screen(io.StringIO):
    """Stand in for a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_note_ends_its_lines_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "40")
    say(NOTE)
    lines = screen.getvalue().splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 40 for line in lines)
    assert " ".join(lines) == f"entropykv: {NOTE}"


def test_a_note_has_a_line_of_its_own_beside_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "60")
    with ProgressBar(total=10, file=screen, ncols=50, mininterval=0) as bar:
        bar.update(5)
        say("something happened")
        bar.update(5)
    lines = screen.getvalue().replace("\r", "\n").split("\n")
    assert "entropykv: something happened" in lines
    assert sum("50%" in line for line in lines) >= 2  # The bar is drawn again after the note.


def test_a_bar_writes_nothing_into_a_file() -> None:
    file = io.StringIO()
    with ProgressBar(total=10, file=file, mininterval=0) as bar:
        bar.update(5)
    assert file.getvalue() == ""


def test_a_note_in_a_file_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("COLUMNS", "40")
    say(NOTE)
    assert file.getvalue() == f"entropykv: {NOTE}\n"


def test_rounds_that_disagree_are_told() -> None:
    assert disagreement([]) == disagreement([3.0]) == 0.0
    assert disagreement([2.0, 2.5, 3.0]) == pytest.approx(0.5)
    assert disagreement_note([0.0, 0.19]) is None
    assert disagreement_note([]) is None
    note = disagreement_note([0.1, 0.5])
    assert note is not None
    assert note.startswith("rounds disagree by up to 50%")


def test_texts_of_an_evaluation_are_its_rounds() -> None:
    def record(seconds: float) -> Record:
        values: Values = {"prompt_tokens": 100, "prompt_seconds": 1.0}
        values |= {"decode_tokens": 10, "decode_seconds": seconds}
        return Record("stock", "continuations", "a text", str(seconds), values)

    assert summarize("full", "f16", "1", [record(1.0), record(1.3)]).disagreement == (
        pytest.approx(0.3)
    )
    assert summarize("full", "f16", "1", [record(1.0)]).disagreement == 0.0
    assert summarize("full", "f16", "1", []).disagreement is None


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("a tensor \noutput", "a tensor \\noutput"),
        ("a name \x1b[2J", "a name \\x1b[2J"),
        ("a path \udcff", "a path \\udcff"),
        ("a line\u2028 separator", "a line\\u2028 separator"),
        ("schön, 模型 and C:\\new", "schön, 模型 and C:\\new"),
    ],
)
def test_what_does_not_print_is_escaped(message: str, shown: str) -> None:
    error = errors.ModelFileError(message)
    assert str(error) == shown
    assert str(pickle.loads(pickle.dumps(error))) == shown  # noqa: S301
    str(error).encode()


def test_every_error_of_the_package_takes_one_message() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    assert len(kinds) > 10
    for kind in kinds:
        assert str(kind("one\ntwo")) == "one\\ntwo"
