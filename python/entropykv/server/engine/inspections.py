"""Answer requests to inspect the model, between two steps of a running generation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from entropykv.server.http.errors import RequestError
from entropykv.server.models.loaded_model import LoadedModel

Result = TypeVar("Result")


class Inspections:
    """Call functions that only read the model's state, without waiting for a generation to end.

    A worker thread calls them between two micro-batches, or at once if none is running. Without
    any, a step only checks an empty queue.
    """

    def __init__(self, model: LoadedModel, submit: Callable[[Callable[[], None]], object]) -> None:
        """Use the model; `submit` lets its thread call a function when nothing is running."""
        self._model = model
        self._submit = submit
        self._waiting: deque[tuple[Callable[[LoadedModel], Any], Future[Any]]] = deque()
        self._is_submitted = False
        self._is_closed = False

    def close(self) -> None:
        """Reject inspections during shutdown, because viewers would keep the server from
        stopping.
        """
        self._is_closed = True

    async def inspect(self, function: Callable[[LoadedModel], Result]) -> Result:
        """Return the result of the function; raises RequestError once the server shuts down."""
        if self._is_closed:
            raise RequestError(503, "the server is shutting down; try again later")
        future: Future[Result] = Future()
        self._waiting.append((function, future))
        if not self._is_submitted:
            self._is_submitted = True
            self._submit(self._answer_when_idle)
        return await asyncio.wrap_future(future)

    def _answer_when_idle(self) -> None:
        self._is_submitted = False
        self.answer()

    def answer(self) -> None:
        """Make the waiting calls, in a worker thread between two of its micro-batches.

        If several workers run, a call waits for the end of the others' steps.
        """
        while self._waiting:
            try:
                function, future = self._waiting.popleft()
            except IndexError:  # Another worker thread has taken the call.
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(self._model))
            except Exception as error:  # The error is passed to the caller.
                future.set_exception(error)
