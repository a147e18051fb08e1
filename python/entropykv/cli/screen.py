"""Write an answer to stdout piece by piece; on a terminal, lines end between words."""

from __future__ import annotations

import shutil
import sys
import unicodedata

_CODE = "```"
"""What begins and ends a block of code, whose lines are left as they are."""


class Screen:
    """Hold back a word until its end, because it may not fit into the line.

    What is no terminal gets every piece at once, unchanged.
    """

    def __init__(self) -> None:
        """Find out whether stdout is a terminal, and how wide."""
        is_terminal = sys.stdout.isatty()
        self._columns = shutil.get_terminal_size().columns if is_terminal else 0
        self._column = 0
        self._line = self._word = ""
        self._in_code = False

    def write(self, text: str) -> None:
        """Write a piece of the answer."""
        if self._columns == 0:
            self._put(text)
            return
        shown = "".join(map(self._take, text))
        if shown:
            self._put(shown)

    def end(self) -> None:
        """Write what was held back, and end the line."""
        self._put(self._end_word() + "\n")
        self._column, self._line, self._in_code = 0, "", False

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _take(self, character: str) -> str:
        """Return what is shown after one more character."""
        self._line += character
        if character == "\n":
            shown = self._end_word() + character
            self._in_code ^= self._line.startswith(_CODE)
            self._column, self._line = 0, ""
            return shown
        if self._in_code:
            return character
        if character.isspace():
            shown = self._end_word()
            if self._column >= self._columns:
                return shown  # The line is full: its end takes the place of the space.
            self._column += 1
            return shown + character
        if _width(character) > 1:  # Scripts with wide characters have no spaces between words.
            shown = self._end_word()
            self._word = character
            return shown + self._end_word()
        self._word += character
        return ""

    def _end_word(self) -> str:
        """Return the word that was held back, at the beginning of a new line if it fits only
        there.
        """
        word, self._word = self._word, ""
        width = sum(map(_width, word))
        breaks = self._column > 0 and self._column + width > self._columns
        self._column = width + (0 if breaks else self._column)
        if self._column > self._columns:
            self._column %= self._columns
        return "\n" * breaks + word


def _width(character: str) -> int:
    """Return how many columns a character takes."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
