"""Read the turns of a conversation from stdin: lines, lines that go on, and blocks."""

from __future__ import annotations

import contextlib
import sys

BLOCK = '"""'


class TurnInput:
    """Read what a user types, or what is piped in."""

    def __init__(self) -> None:
        """Find out whether a user types, or whether turns are piped in."""
        self.is_terminal = sys.stdin.isatty()

    def read(self) -> tuple[str, bool]:
        """Return one text, and whether it is a command.

        A text is a line, lines that end with a backslash and the next one, or a block, which is
        never a command.
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
        with contextlib.suppress(EOFError):  # the end of a file ends its last block, too
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
        """Ask the user to agree; where turns are piped in, the next line answers."""
        try:
            return self._line(question).strip().lower() in ("y", "yes")
        except EOFError:
            return False
