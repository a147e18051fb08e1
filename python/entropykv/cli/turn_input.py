"""Read the turns of a conversation from stdin: single lines, continued lines, and blocks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

BLOCK = '"""'
_MOST_LINES = 1000
"""The most lines that are kept for later chats."""


class TurnInput:
    """Read texts that a user types, or that are piped in.

    In a terminal, lines are edited with readline where Python has it: with a history that other
    chats continue, and commands that Tab completes.
    """

    def __init__(self, commands: Sequence[str], history: Path) -> None:
        """Find out whether stdin is a terminal; `commands` are completed, and `history` is the file
        of lines that were typed.
        """
        self.is_terminal = sys.stdin.isatty()
        self._commands = commands
        self._history = history
        self._before: list[str] = []
        """The lines of a text that is not complete."""
        self._readline: ModuleType | None = None
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: PLC0415  (loading it changes what input() does)

                self._readline = readline
                self._prepare(readline)

    def _prepare(self, readline: ModuleType) -> None:
        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)
        readline.set_history_length(_MOST_LINES)
        readline.set_completer_delims(" ")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")

    def _complete(self, text: str, number: int) -> str | None:
        """Return the command that completes a text, as readline asks for it: number 0, 1 and so
        on.
        """
        found = [name for name in self._commands if text.startswith("/") and name.startswith(text)]
        return f"{found[number]} " if number < len(found) else None

    def keep_history(self) -> None:
        """Write the lines that were typed, for later chats of this user alone; a disk that refuses
        keeps none.
        """
        if self._readline is None:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            self._readline.write_history_file(self._history)

    def read(self) -> tuple[str, bool]:
        """Return one text, and whether it is a command.

        A text is a line, several lines of which all but the last end with a backslash, or a block.
        A block is never a command.
        """
        self._before = []
        line = self._line("> ")
        if line.strip() == BLOCK:
            return self._block(), False
        lines = self._before = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(". "))
            except EOFError:
                break
        return "\n".join(lines), line.startswith("/")

    @property
    def is_begun(self) -> bool:
        """Tell, after Ctrl-C, whether a text was begun, which is dropped as in a shell."""
        typed = "" if self._readline is None else self._readline.get_line_buffer()
        return bool(self._before or typed)

    def _block(self) -> str:
        lines: list[str] = []
        self._before = [BLOCK]
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
