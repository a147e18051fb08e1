"""Handle signals: Ctrl-C takes effect between two steps of a session, and SIGTERM raises an
exception.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from entropykv import system

EXIT_INTERRUPTED = 130
"""The exit code that a shell reports for a command that Ctrl-C ended."""
EXIT_TERMINATED = 128 + signal.SIGTERM
"""The exit code that a shell reports for a command that SIGTERM ended."""


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
