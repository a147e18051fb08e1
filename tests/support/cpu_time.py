"""Measure the CPU time of an action, for tests that limit it."""

from __future__ import annotations

import time
from collections.abc import Callable


def takes_less_than(seconds: float, action: Callable[[], object]) -> bool:
    """Return whether one of three runs of `action` takes this thread less CPU time than `seconds`.

    Other threads do not count, and what falls into one run by chance (a garbage collection of the
    whole process, pages that are read from a slow disk) does not decide.
    """
    for _ in range(3):
        start = time.thread_time()
        action()
        if time.thread_time() - start < seconds:
            return True
    return False
