"""Answer those who watch the model, between two steps of whatever runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from entropykv.server.errors import RequestError
from entropykv.server.loading import ServedLlama

Result = TypeVar("Result")


class Inspections:
    """Make calls that change nothing, and need not wait for the end of a generation.

    A thread of the model answers them: between two micro-batches, or at once where nothing runs.
    Without any, a step costs one look at an empty queue.
    """

    def __init__(self, llama: ServedLlama, submit: Callable[[Callable[[], None]], object]) -> None:
        """Take the model; `submit` lets its thread call something once nothing runs."""
        self._llama = llama
        self._submit = submit
        self._waiting: deque[tuple[Callable[[ServedLlama], Any], Future[Any]]] = deque()
        self._is_submitted = False
        self._is_closed = False

    def close(self) -> None:
        """Let nobody look any more: who watches would keep the server from stopping."""
        self._is_closed = True

    async def inspect(self, function: Callable[[ServedLlama], Result]) -> Result:
        """Return what the function returns; raises RequestError once the server shuts down."""
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
        """Make the calls that wait, in a thread of the model, between two of its micro-batches.

        Where several answer requests, steps of the others may run: a look waits for their end.
        """
        while self._waiting:
            try:
                function, future = self._waiting.popleft()
            except IndexError:  # another thread of the model was faster
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(self._llama))
            except Exception as error:  # the error is for whoever looks
                future.set_exception(error)
