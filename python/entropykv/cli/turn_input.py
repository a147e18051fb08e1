"""Read the turns of a conversation from stdin: single lines, continued lines, and blocks."""

from __future__ import annotations

import contextlib
import sys

BLOCK = '"""'


class TurnInput:
    """Read texts that a user types, or that are piped in."""

    def __init__(self) -> None:
        """Find out whether stdin is a terminal."""
        self.is_terminal = sys.stdin.isatty()

    def read(self) -> tuple[str, bool]:
        """Return one text, and whether it is a command.

        A text is a line, several lines of which all but the last end with a backslash, or a block.
        A block is never a command.
        """
        line = self._line("> ")
        if line.strip() == BLOCK:
            return self._block(), False
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(". "))
            except EOFError:
                break
        return "\n".join(lines), line.startswith("/")

    def _block(self) -> str:
        lines: list[str] = []
        with contextlib.suppress(EOFError):  # The end of the input also ends a block.
            while (line := self._line(". ")).strip() != BLOCK:
                lines.append(line)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if not self.is_terminal:
            return input()
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    def agrees(self, question: str) -> bool:
        """Ask the user a yes-or-no question; if turns are piped in, the next line is the answer."""
        try:
            return self._line(question).strip().lower() in ("y", "yes")
        except EOFError:
            return False
