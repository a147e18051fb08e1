"""Limit the number of connections, and how long their clients can keep the server waiting.

uvicorn does not limit the time that a client takes to send headers or to read. It refuses
connections above its own limit only once they have sent a request.
"""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.h11_impl import H11Protocol

from entropykv.server.http.errors import RequestError


class LimitedProtocol(H11Protocol):
    """Speak HTTP as uvicorn does, within limits; h11 itself limits all headers together to 64 KiB.

    A connection above the limit is answered with 503, and one whose headers take too long with 408;
    both are closed. A connection whose client does not read what was sent is closed, too, and so is
    one that was told to close but whose client takes no more: asyncio would wait for it for ever.
    """

    most = 0
    """The most connections at a time."""
    seconds = 0.0
    """The most seconds for the headers of a request, from the connection or their first byte on,
    and the most seconds until a full send buffer is empty. A closing connection is ended between
    one and two times as many seconds later.
    """
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _refused = False
    _close_timer: asyncio.TimerHandle | None = None
    _was_closing = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it."""
        super().connection_made(transport)
        self._end_if_stuck()
        if len(self.connections) > self.most:
            self._refuse(503, "Service Unavailable", "the server has too many connections")
        else:
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Receive data; data between two requests begins the headers of the next one."""
        if self._refused:
            return
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_timer()
        elif self._timer is None and self.cycle is not None and self.cycle.response_complete:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._stop_timer()
        self._stop_write_timer()
        if self._close_timer is not None:
            self._close_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop writing, and start the timeout for the client to read."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue writing."""
        self._stop_write_timer()
        super().resume_writing()

    def _end_if_stuck(self) -> None:
        """End the connection if it was already closing at the last check; otherwise check again."""
        if self._was_closing:
            self.transport.abort()
            return
        self._was_closing = self.transport.is_closing()
        self._close_timer = self.loop.call_later(self.seconds, self._end_if_stuck)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_timer(self) -> None:
        late = 408, "Request Timeout", f"the headers took longer than {self.seconds:g} seconds"
        self._timer = self.loop.call_later(self.seconds, self._refuse, *late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, reason: str, why: str) -> None:
        self._refused = True
        self._timer = None
        if self.transport.is_closing():
            return
        body = json.dumps(RequestError(status, f"{why}; try again later").body).encode()
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def protocol_of(most: int, seconds: float) -> type[asyncio.Protocol]:
    """Return the protocol class with these limits; uvicorn creates one object per connection."""
    return type("ServerProtocol", (LimitedProtocol,), {"most": most, "seconds": seconds})
