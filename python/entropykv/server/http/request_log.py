"""Log one line per request without any of its content (ASGI middleware)."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LONGEST_PATH = 200
_TOKENS = "entropykv.tokens"
_logger = logging.getLogger("entropykv.server.dialects.requests")


class RequestLog:
    """Log client, method, path, status, seconds and tokens after the answer, but no query or body.

    A request whose client disconnected before the answer has status 499.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an app."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it when its answer has ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 499

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            _logger.info(
                "%s %s %s %d %.3f s%s",
                (scope.get("client") or ("-",))[0],
                scope["method"],
                _path(scope),
                status,
                time.perf_counter() - start,
                _tokens(scope),
            )


def note_tokens(scope: Scope) -> Callable[[int, int], None]:
    """Return a function that records how many tokens were read and written for a request.

    It is called once for each choice.
    """

    def note(read: int, written: int) -> None:
        before = tokens_of(scope)
        scope[_TOKENS] = before[0] + read, before[1] + written

    return note


def tokens_of(scope: Scope) -> tuple[int, int]:
    """Return the numbers of tokens read and written for a request, as far as they were recorded."""
    read, written = scope.get(_TOKENS, (0, 0))
    return read, written


def _tokens(scope: Scope) -> str:
    if _TOKENS not in scope:
        return ""
    read, written = scope[_TOKENS]
    return f", {read} tokens read, {written} written"


def _path(scope: Scope) -> str:
    """Return the path as it was sent: percent-encoding prevents line breaks in the log."""
    path = scope.get("raw_path") or scope["path"].encode("utf-8")
    return str(path[:_LONGEST_PATH].decode("ascii", errors="backslashreplace")).split("?")[0]


def write_requests_to_stderr() -> None:
    """Write the log lines to stderr with the time, whatever the settings of logging say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    _logger.propagate = False
