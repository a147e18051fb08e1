"""One thread that does everything with the model, one request after the other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from entropykv.errors import ContextError
from entropykv.llama.entropy_llama import EntropyLlama
from entropykv.server.errors import RequestError, as_request_error
from entropykv.server.loading import ServedLlama
from entropykv.session.stats import SessionStats

_STATS_INTERVAL = 0.25
"""Seconds between two looks at the figures during a generation."""
Result = TypeVar("Result")
Outcome = Literal["finished", "refused", "failed", "stopped"]


class _StoppedError(Exception):
    """The generation was told to stop; nothing is half-done."""


@dataclass
class _Job:
    call: Callable[[ServedLlama], Any]
    emit: Callable[[Any], None] | None
    note: Callable[[int, int], None] | None
    stop: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        if self.stop.is_set():
            raise _StoppedError

    def run(self, llama: ServedLlama) -> Any:
        """Call; the chunks of a stream are emitted as they come."""
        result = self.call(llama)
        if self.emit is None:
            return result
        for chunk in result:
            self.emit(chunk)
            self.check()
        return None


class Engine:
    """Owns a model, and the thread in which alone it runs; requests wait for their turn."""

    def __init__(self, llama: ServedLlama, *, interrupt: bool = False) -> None:
        """`interrupt`: a new request ends the stream that is being written."""
        self.llama = llama
        self.outcomes: dict[Outcome, int] = dict.fromkeys(get_args(Outcome), 0)
        self.waiting = 0
        """Requests that wait or run."""
        self._interrupt = interrupt
        self._running: _Job | None = None
        self._closing = False
        self._before_close: list[Callable[[EntropyLlama], object]] = []
        self._looked_at = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="entropykv")
        self.stats: SessionStats = llama.kv_stats()
        """Figures of the moment, no older than a quarter of a second during a generation."""

    async def generate(
        self,
        call: Callable[[ServedLlama], Any],
        emit: Callable[[Any], None] | None = None,
        note: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Run a request's call when it is its turn; cancelling stops it within a micro-batch.

        With `emit` the call returns an iterator, whose items go to `emit`, in the model's thread.
        `note` is told in the end how many tokens were read and written for it.
        Raises RequestError for whatever goes wrong; the next request then starts afresh.
        """
        if self._closing:
            raise _shutting_down()
        running = self._running
        if self._interrupt and running is not None and running.emit is not None:
            running.stop.set()
        job = _Job(call, emit, note)
        self.waiting += 1
        try:
            return await asyncio.wrap_future(self._thread.submit(self._run, job))
        finally:
            job.stop.set()
            self.waiting -= 1

    async def call(self, function: Callable[[EntropyLlama], Result]) -> Result:
        """Do something else with the model, between two requests."""
        return await asyncio.wrap_future(self._thread.submit(function, self.llama))

    def before_close(self, function: Callable[[EntropyLlama], object]) -> None:
        """Have `function` called with the model, in its thread, before it is freed."""
        self._before_close.append(function)

    def stop(self) -> None:
        """Let the running generation end now, and refuse those that wait and those that come."""
        self._closing = True
        running = self._running
        if running is not None:
            running.stop.set()

    def close(self) -> None:
        """Stop, then free the model. May be called twice."""
        self.stop()
        before, self._before_close = self._before_close, []
        try:
            for function in before:
                self._thread.submit(function, self.llama).result()
        finally:
            self._thread.shutdown(wait=True)
            self.llama.close()

    def _run(self, job: _Job) -> Any:
        self._running = job
        self.llama.checkpoint = partial(self._checkpoint, job)
        outcome: Outcome = "finished"
        before = self.llama.kv_stats()
        try:
            self._checkpoint(job)
            return job.run(self.llama)
        except _StoppedError:
            outcome = "stopped"
            if self._closing:
                raise _shutting_down() from None
        except Exception as error:  # whatever it is, the next request must not suffer from it
            if not isinstance(error, RequestError | ContextError):
                self.llama.reset()
            answer = as_request_error(error)
            outcome = "refused" if answer.status_code < 500 else "failed"
            raise answer from error
        finally:
            self._running = None
            self.llama.checkpoint = None
            self.outcomes[outcome] += 1
            self.stats = now = self.llama.kv_stats()
            if job.note is not None:
                job.note(
                    now.prompt_tokens - before.prompt_tokens,
                    now.generated_tokens - before.generated_tokens,
                )

    def _checkpoint(self, job: _Job) -> None:
        job.check()
        if self._closing:
            raise _StoppedError
        now = time.monotonic()
        if now - self._looked_at > _STATS_INTERVAL:
            self._looked_at = now
            self.stats = self.llama.kv_stats()


def _shutting_down() -> RequestError:
    return RequestError(503, "the server is shutting down; try again later")
