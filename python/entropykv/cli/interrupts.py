"""Signals: Ctrl-C between two steps of a session, not within one; SIGTERM as an error is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_TERMINATED = 128 + signal.SIGTERM
"""As a shell says it."""


class InterruptionError(Exception):
    """Ctrl-C was pressed, and nothing is half-done."""


class Interrupts:
    """Whether Ctrl-C was pressed."""

    requested = False

    def check(self) -> None:
        """Raise InterruptionError if it was."""
        if self.requested:
            raise InterruptionError


@contextmanager
def noted_interrupts() -> Iterator[Interrupts]:
    """Note the first Ctrl-C, which would leave a decode half-done; the second one interrupts.

    Where interrupts are ignored (a shell's background job), they stay so.
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
    """Have SIGTERM raise SystemExit, so that files that are half-written are removed.

    Where somebody else handles it, or ignores it, it stays so.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(EXIT_TERMINATED)

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
