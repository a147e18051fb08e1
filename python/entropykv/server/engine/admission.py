"""Limit what requests may cost, in jobs, bytes and seconds, and count what they cost now.

A job is one choice of one prompt: a request for two prompts with n=3 has six jobs. The context
limits tokens, and fields.py limits single fields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.types import Receive, Scope

from entropykv.server.http.errors import RequestError
from entropykv.session.images import ImageLimits

CLIENT_GONE = 499
"""The status of a request whose client disconnected before the answer; nobody receives it."""


async def unless_gone(receive: Receive, coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Await the coroutine, which is cancelled if the client disconnects; returns whether the client
    stayed connected, and the coroutine's result, or None.
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


LARGE_BODY = 16 << 20
"""The most bytes of one request's body on a server that reads images or documents, unless an option
sets it: an image of 8 MiB, which base64 makes a third larger, or a document of 8 MiB.
"""
LARGE_BODIES = 128 << 20
"""The most bytes of all bodies together on a server that reads images or documents."""
RETRY_AFTER = 5
"""After how many seconds a client should try again if too many requests wait."""
_ARRIVAL = "entropykv.arrival"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """Hold the limits of requests; docs/reference/security.md has a table of all limits."""

    max_jobs: int = 128
    """The most jobs of one request."""
    max_waiting: int = 256
    """The most jobs that may wait while others run."""
    max_body: int = 1 << 20
    """The most bytes of a request's body: 250,000 tokens of English text, 150,000 as numbers."""
    max_bodies: int = 32 << 20
    """The most bytes of all bodies that are received, wait or run; max_body, if that is more."""
    client_seconds: float = 30.0
    """The most seconds for a client to send headers, to send a body, and to read its answer."""
    request_seconds: float | None = None
    """The most seconds of a request from its arrival to the end of its answer; None: no limit."""
    drain_seconds: float = 0.0
    """The most seconds that running requests may take after Engine.stop()."""
    max_images: int = 8
    """The most images of one prompt; a request to /completion may have several prompts."""
    max_image_bytes: int = 8 << 20
    """The most bytes of one image file."""
    max_image_pixels: int = 32 << 20
    """The most pixels of a prompt's images together; each takes 3 bytes while they are decoded."""
    conversations: int = 64
    """How many conversations are kept for their next turn, if the server keeps several."""

    @property
    def images(self) -> ImageLimits:
        """Return the limits for the images of one prompt."""
        return ImageLimits(self.max_images, self.max_image_bytes, self.max_image_pixels)


class Admission:
    """Admit requests, and count what the admitted ones cost until they end.

    It must be called only from the event loop.
    """

    def __init__(self, limits: Limits, n_lanes: int) -> None:
        """Start without any request; `n_lanes` jobs run at a time."""
        self.limits = limits
        self.jobs = 0
        """How many jobs wait or run."""
        self._n_lanes = n_lanes
        self._bytes = 0

    def check(self, n_jobs: int) -> None:
        """Raise RequestError (400) for a request of more jobs than are ever admitted at once."""
        most = min(self.limits.max_jobs, self._n_lanes + self.limits.max_waiting)
        if n_jobs > most:
            raise RequestError(
                400,
                f"n: the request asks for {n_jobs:,} choices (prompts times n), and {most:,} are "
                "the most here (--max-jobs, --max-waiting); send it as several requests",
                param="n",
            )

    @contextmanager
    def jobs_of(self, n_jobs: int) -> Iterator[None]:
        """Count a request's jobs in the `with` block.

        Raises RequestError (429) if more than --max-waiting would wait.
        """
        self.check_waiting(self.jobs + n_jobs - self._n_lanes)
        self.jobs += n_jobs
        try:
            yield
        finally:
            self.jobs -= n_jobs

    def check_waiting(self, n_waiting: int) -> None:
        """Raise RequestError (429) if more than --max-waiting would wait."""
        if n_waiting > self.limits.max_waiting:
            raise RequestError(
                429,
                f"too many requests are waiting already ({self.limits.max_waiting} may); try again "
                "later",
                code="rate_limit_exceeded",
                retry_after=RETRY_AFTER,
            )

    def seconds_left(self, arrival: float) -> float | None:
        """Return how many seconds a request may still take; None: no limit."""
        seconds = self.limits.request_seconds
        return None if seconds is None else max(0.0, arrival + seconds - time.monotonic())

    async def in_time(self, request: Request, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of a coroutine that a request waits for.

        Raises RequestError if it takes longer than the request may (504), or if the client
        disconnects.
        """
        seconds = self.seconds_left(arrival_of(request.scope))
        try:
            stays, result = await asyncio.wait_for(unless_gone(request.receive, coroutine), seconds)
        except asyncio.TimeoutError:
            raise too_late() from None
        if not stays:
            raise RequestError(CLIENT_GONE, "the client has gone")
        return cast(Result, result)

    def check_body(self, n_bytes: int) -> None:
        """Raise RequestError (413) for a body with more bytes than allowed."""
        if n_bytes > self.limits.max_body:
            raise RequestError(
                413,
                f"the request's body has more than {self.limits.max_body} bytes; shorten it or "
                "start the server with a larger --max-body",
            )

    @contextmanager
    def body(self) -> Iterator[Body]:
        """Yield the Body of a request, whose bytes count until the `with` block ends."""
        body = Body(self)
        try:
            yield body
        finally:
            self._bytes -= body.n_bytes

    def take(self, n_bytes: int) -> None:
        """Count further bytes of a body; raises RequestError (503) if all bodies together have too
        many.
        """
        if self._bytes + n_bytes > max(self.limits.max_bodies, self.limits.max_body):
            raise RequestError(
                503,
                "the server holds as many bytes of requests as it may (--max-bodies); try again "
                "later",
                retry_after=RETRY_AFTER,
            )
        self._bytes += n_bytes


class Body:
    """Collect the bytes of one request's body as they arrive."""

    def __init__(self, admission: Admission) -> None:
        """Start empty; the bytes are counted by the admission."""
        self._admission = admission
        self._pieces: list[bytes] = []
        self.n_bytes = 0

    def add(self, piece: bytes) -> None:
        """Add a piece; raises RequestError if the body (413) or all bodies (503) get too long."""
        self._admission.check_body(self.n_bytes + len(piece))
        self._admission.take(len(piece))
        self.n_bytes += len(piece)
        self._pieces.append(piece)

    def whole(self) -> bytes:
        """Return all bytes, which are not kept here any longer."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def too_late() -> RequestError:
    """Return the error for a request that took longer than --request-seconds."""
    return RequestError(504, "the request took longer than the server lets it (--request-seconds)")


def note_arrival(scope: Scope) -> None:
    """Record the current time as a request's arrival, unless one is recorded already."""
    scope.setdefault(_ARRIVAL, time.monotonic())


def arrival_of(scope: Scope) -> float:
    """Return when a request arrived, by time.monotonic(); now, if no arrival was recorded."""
    arrival: float = scope.get(_ARRIVAL, time.monotonic())
    return arrival
