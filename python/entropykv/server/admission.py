"""Say what requests may cost, in jobs, bytes and seconds, and count what they cost now.

A job is one choice of one prompt: a request for two prompts with n=3 has six of them. The limits of
tokens are the context's, those of single fields stand in fields.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import Scope

from entropykv.server.errors import RequestError
from entropykv.session.images import ImageLimits

IMAGE_BODY = 16 << 20
"""Bytes of a body where images are read, unless the server's options say it: an image of 8 MiB, and
a third more as text."""
IMAGE_BODIES = 128 << 20
"""The same for the bodies of all requests."""
RETRY_AFTER = 5
"""Seconds that a client is told to wait where too many requests do."""
_ARRIVAL = "entropykv.arrival"


@dataclass(frozen=True)
class Limits:
    """Say what requests may take; docs/reference/security.md has a table of all limits."""

    max_jobs: int = 128
    """How many jobs one request may have."""
    max_waiting: int = 256
    """How many jobs may wait while others run."""
    max_body: int = 1 << 20
    """Bytes of one request's body: 250,000 tokens of English text, or 150,000 as numbers."""
    max_bodies: int = 32 << 20
    """Bytes of the bodies of all requests that are being received, wait or run."""
    client_seconds: float = 30.0
    """Seconds that a client may take to send headers, to send a body, and to take what it gets."""
    request_seconds: float | None = None
    """How many seconds a request may take from its arrival to the end of its answer."""
    drain_seconds: float = 0.0
    """How many seconds running requests may take after stop()."""
    max_images: int = 8
    """How many images one request may have."""
    max_image_bytes: int = 8 << 20
    """Bytes of the file of an image."""
    max_image_pixels: int = 32 << 20
    """Pixels of a request's images together: 3 bytes each while they are decoded."""
    conversations: int = 64
    """How many conversations are kept for their next turn, where several are held."""

    @property
    def images(self) -> ImageLimits:
        """Return what the images of a prompt may take."""
        return ImageLimits(self.max_images, self.max_image_bytes, self.max_image_pixels)


class Admission:
    """Admit requests, and count what those that are admitted cost, until they end.

    Call it from the event loop alone.
    """

    def __init__(self, limits: Limits, n_slots: int) -> None:
        """Admit nobody yet; `n_slots` jobs run at a time."""
        self.limits = limits
        self.jobs = 0
        """How many jobs wait or run."""
        self._n_slots = n_slots
        self._bytes = 0

    def check(self, n_jobs: int) -> None:
        """Raise RequestError (400) for a request of more jobs than are ever admitted at once."""
        most = min(self.limits.max_jobs, self._n_slots + self.limits.max_waiting)
        if n_jobs > most:
            raise RequestError(
                400,
                f"n: the request asks for {n_jobs:,} choices (prompts times n), and {most:,} are "
                "the most here (--max-jobs, --max-waiting); send it as several requests",
                param="n",
            )

    @contextmanager
    def jobs_of(self, n_jobs: int) -> Iterator[None]:
        """Count a request's jobs until it ends; raises RequestError (429) where too many wait."""
        self.check_waiting(self.jobs + n_jobs - self._n_slots)
        self.jobs += n_jobs
        try:
            yield
        finally:
            self.jobs -= n_jobs

    def check_waiting(self, n_waiting: int) -> None:
        """Raise RequestError (429) where more than --max-waiting would wait."""
        if n_waiting > self.limits.max_waiting:
            raise RequestError(
                429,
                f"too many requests are waiting already ({self.limits.max_waiting} may); try again "
                "later",
                code="rate_limit_exceeded",
                retry_after=RETRY_AFTER,
            )

    def seconds_left(self, arrival: float) -> float | None:
        """Return how many seconds a request may still take; None: any number."""
        seconds = self.limits.request_seconds
        return None if seconds is None else max(0.0, arrival + seconds - time.monotonic())

    def check_body(self, n_bytes: int) -> None:
        """Raise RequestError (413) for a body of more bytes than one may have."""
        if n_bytes > self.limits.max_body:
            raise RequestError(
                413,
                f"the request's body has more than {self.limits.max_body} bytes; shorten it or "
                "start the server with a larger --max-body",
            )

    @contextmanager
    def body(self) -> Iterator[Body]:
        """Count a request's body until the request ends."""
        body = Body(self)
        try:
            yield body
        finally:
            self._bytes -= body.n_bytes

    def take(self, n_bytes: int) -> None:
        """Count further bytes of a body; raises RequestError (503) where all have too many."""
        if self._bytes + n_bytes > max(self.limits.max_bodies, self.limits.max_body):
            raise RequestError(
                503,
                "the server holds as many bytes of requests as it may (--max-bodies); try again "
                "later",
                retry_after=RETRY_AFTER,
            )
        self._bytes += n_bytes


class Body:
    """Hold the bytes of one request's body, as they arrive."""

    def __init__(self, admission: Admission) -> None:
        """Hold nothing; the bytes count as the admission's."""
        self._admission = admission
        self._pieces: list[bytes] = []
        self.n_bytes = 0

    def add(self, piece: bytes) -> None:
        """Take a piece in; raises RequestError (413, 503) where it is too much."""
        self._admission.check_body(self.n_bytes + len(piece))
        self._admission.take(len(piece))
        self.n_bytes += len(piece)
        self._pieces.append(piece)

    def whole(self) -> bytes:
        """Return all bytes, which are then the caller's: no second copy is kept here."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def too_late() -> RequestError:
    """Return the error for a request that took longer than --request-seconds."""
    return RequestError(504, "the request took longer than the server lets it (--request-seconds)")


def note_arrival(scope: Scope) -> None:
    """Note that a request has arrived now."""
    scope.setdefault(_ARRIVAL, time.monotonic())


def arrival_of(scope: Scope) -> float:
    """Return when a request arrived, by time.monotonic()."""
    arrival: float = scope.get(_ARRIVAL, time.monotonic())
    return arrival
