"""Detect that a client disconnects while its request waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

CLIENT_GONE = 499
"""The status of a request whose client disconnected before the answer; nobody receives it."""


async def unless_gone(receive: Receive, coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Await the coroutine; returns whether the client stayed connected, and the
    coroutine's result.
    """
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
