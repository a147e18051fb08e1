"""Notice that a client leaves while its request waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

CLIENT_GONE = 499
"""The status of a request whose client left before the answer, which nobody receives."""


async def unless_gone(receive: Receive, coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Return whether the client stayed until the coroutine was done, and what that returned."""
    work = asyncio.ensure_future(coroutine)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return (True, work.result()) if work.done() else (False, None)
    finally:
        gone.cancel()
        work.cancel()
        await asyncio.gather(gone, work, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
