"""Wait until something holds, for as long as a busy machine may need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_for(holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until a condition holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


async def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait in an event loop until a condition holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        await asyncio.sleep(0.005)
