"""Call functions in daemon threads, for which the process does not wait at its end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThreads:
    """Call functions in daemon threads, one for each call; the event loop waits for the results.

    The executors of asyncio and concurrent.futures would let the process wait for a call that takes
    minutes, such as loading a large model.
    """

    def __init__(self, name: str) -> None:
        """Create no thread yet; `name` is the name of all threads."""
        self._name = name
        self._threads: set[threading.Thread] = set()

    @property
    def are_busy(self) -> bool:
        """Tell whether a call has not returned yet."""
        return any(thread.is_alive() for thread in list(self._threads))

    def join(self) -> None:
        """Wait until all calls have returned."""
        for thread in list(self._threads):
            thread.join()

    async def call(self, function: Callable[[], Result]) -> Result:
        """Call a function in a thread of its own; returns its result, or raises its exception."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            self._threads.discard(thread)
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result, failed = None, None
            try:
                result = function()
            except BaseException as error:  # The waiting task raises it again.
                failed = error
            with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile.
                loop.call_soon_threadsafe(finish, result, failed)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()
        return await done
