"""Speak with the user beside a command's output: notes on stderr, and signals. Ctrl-C takes effect
between two steps of a session, and SIGTERM raises an exception.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from entropykv import system

EXIT_INTERRUPTED = 130
"""The exit code that a shell reports for a command that Ctrl-C ended."""
EXIT_TERMINATED = 128 + signal.SIGTERM
"""The exit code that a shell reports for a command that SIGTERM ended."""


def say(text: str) -> None:
    """Print a note to stderr, wrapped between words at the width of the terminal.

    A progress bar makes room for it.
    """
    note = f"entropykv: {text}"
    if (columns := columns_of(sys.stderr)) is not None:
        note = textwrap.fill(note, columns, break_long_words=False, break_on_hyphens=False)
    bars = sys.modules.get("tqdm")  # Without a bar, the library need not be loaded.
    beside = contextlib.nullcontext() if bars is None else bars.tqdm.external_write_mode(sys.stderr)
    with beside:
        print(note, file=sys.stderr)


def columns_of(stream: TextIO) -> int | None:
    """Return how many columns the terminal of a stream has; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


class InterruptionError(Exception):
    """Raised between two steps after Ctrl-C, when no step is incomplete."""


class Interrupts:
    """Record whether Ctrl-C was pressed."""

    requested = False

    def check(self) -> None:
        """Raise InterruptionError if Ctrl-C was pressed."""
        if self.requested:
            raise InterruptionError


@contextmanager
def noted_interrupts() -> Iterator[Interrupts]:
    """Record the first Ctrl-C, which would leave a decode incomplete; a second one interrupts at
    once.

    If interrupts are ignored, as in a shell's background job, they stay ignored.
    """
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        if interrupts.requested:
            signal.default_int_handler(number, frame)
        interrupts.requested = True

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


@contextmanager
def orderly_termination() -> Iterator[None]:
    """Let SIGTERM, and SIGBREAK of Windows, raise SystemExit, so that incomplete files are removed.

    A signal that is already handled or ignored keeps its handler.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(EXIT_TERMINATED)

    ours: list[int] = []
    if threading.current_thread() is threading.main_thread():
        ours = [n for n in system.ending_signals() if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
