"""On a terminal, lines of an answer are broken between words; elsewhere the answer is unchanged."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv.cli.answer import Screen


class Terminal(io.StringIO):
    """Stand in for a terminal."""

    def isatty(self) -> bool:
        return True


def shown(pieces: list[str], columns: int, stream: io.StringIO) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setenv("COLUMNS", str(columns))
        screen = Screen()
        for piece in pieces:
            screen.write(piece)
        screen.end()
    return stream.getvalue()


def test_words_are_not_broken() -> None:
    pieces = ["The light", "house sto", "od on the north", "ern rocks.", "\n\nIt"]
    text = shown(pieces, 20, Terminal())
    assert text == "The lighthouse stood\non the northern \nrocks.\n\nIt\n"


def test_a_word_longer_than_a_line_and_code_are_left_to_the_terminal() -> None:
    assert shown(["a ", "x" * 50, " b"], 20, Terminal()) == "a \n" + "x" * 50 + " b\n"
    code = "```python\nprint('a line that is longer than the terminal is')\n```\nand so on\n"
    assert shown(list(code), 12, Terminal()) == code + "\n"


def test_wide_characters_break_anywhere() -> None:
    text = shown(["\u6f22\u5b57" * 6], 10, Terminal())
    assert [len(line) for line in text.splitlines()] == [5, 5, 2]


@given(st.lists(st.text(alphabet="ab \n`\u6f22", max_size=9)), st.integers(4, 30))
def test_only_ends_of_lines_are_added_and_lines_fit(pieces: list[str], columns: int) -> None:
    assert shown(pieces, columns, io.StringIO()) == "".join(pieces) + "\n"
    text = shown(pieces, columns, Terminal())
    plain = "".join(pieces)
    assert "".join(text.split()) == "".join(plain.split())
    assert text.count("\n") >= plain.count("\n") + 1
    if "`" not in plain:
        words = [len(word.encode("utf-16-le")) for word in plain.split()]
        if all(size <= columns for size in words):
            for line in text.splitlines():
                assert sum(2 if c == "\u6f22" else 1 for c in line) <= columns
