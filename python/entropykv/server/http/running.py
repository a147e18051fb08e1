"""Run the app under uvicorn until SIGTERM or SIGINT, within limits of connections; before the model
is loaded, answer that it is loading.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from entropykv import system
from entropykv.errors import SettingsError
from entropykv.server.engine.engine import Engine
from entropykv.server.http.app import FORMS, create_app
from entropykv.server.http.errors import ErrorForms, RequestError
from entropykv.server.http.request_log import write_requests_to_stderr
from entropykv.server.models.catalog import ModelCatalog
from entropykv.server.options import ModelOptions, ServerOptions
from entropykv.server.page.files import page_file, page_files
from entropykv.server.page.routes import WebDefaults
from entropykv.session.memory_plan import budget_warnings


class LimitedProtocol(H11Protocol):
    """Speak HTTP as uvicorn does, within limits; h11 itself limits all headers together to 64 KiB.

    uvicorn does not limit the time that a client takes to send headers or to read. It refuses
    connections above its own limit only once they have sent a request.

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
    _refused = False
    _was_closing = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it."""
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """The running timers of `seconds`: `headers`, `write` (until the client reads), and
        `close`.
        """
        self._end_if_stuck()
        if len(self.connections) > self.most:
            self._refuse(503, "Service Unavailable", "the server has too many connections")
        else:
            self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Receive data; data between two requests begins the headers of the next one."""
        if self._refused:
            return
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop("headers")
        elif self.cycle is not None and self.cycle.response_complete:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and count the connection no more."""
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop writing, and start the timeout for the client to read."""
        super().pause_writing()
        self._start("write", self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timeout, and continue writing."""
        self._stop("write")
        super().resume_writing()

    def _end_if_stuck(self) -> None:
        """End the connection if it was already closing at the last check; otherwise check again."""
        if self._was_closing:
            self.transport.abort()
            return
        self._was_closing = self.transport.is_closing()
        self._start("close", self._end_if_stuck)

    def _wait_for_headers(self) -> None:
        if "headers" not in self._timers:
            why = f"the headers took longer than {self.seconds:g} seconds"
            self._start("headers", self._refuse, 408, "Request Timeout", why)

    def _start(self, name: str, when_over: Callable[..., object], *arguments: Any) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(self.seconds, when_over, *arguments)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _refuse(self, status: int, reason: str, why: str) -> None:
        self._refused = True
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


class Starting:
    """Create an ASGI app in a thread, and pass everything on to it once it exists.

    Until then every request is answered with 503, as llama-server does, except for the page, which
    waits for the model.
    """

    def __init__(
        self, make: Callable[[], FastAPI], *, page: bool = True, root_path: str = ""
    ) -> None:
        """Take `make`, which is called when the server's lifespan begins. `root_path`: the prefix
        that paths may have behind a proxy.
        """
        self._make = make
        self._root_path = root_path
        self.page = page
        """True if there is a page at /."""
        self.when_done: Callable[[], None] = lambda: None
        """Called in the event loop once the app exists, or could not be created."""
        self.loaded: FastAPI | None = None
        """The app, once it exists."""
        self.error: Exception | None = None
        """Why the app could not be created."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the lifespan of the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self.loaded is not None:
            await self.loaded(scope, receive, send)
        elif self.page and scope["type"] == "http" and scope["path"] in page_files():
            await page_file(scope["path"], None)(scope, receive, send)
        else:
            error = RequestError(
                503, "the model is loading; try again in a moment", code="model_loading"
            )
            answer = error.response()
            answer.headers["retry-after"] = "1"
            await ErrorForms(answer, FORMS, self._root_path)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start loading when the server starts, and free the model when it stops."""
        await receive()
        loop = asyncio.get_running_loop()
        # The thread is a daemon, because a server that is told to stop must not wait for the end of
        # loading.
        threading.Thread(target=self._load, args=(loop,), daemon=True).start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.loaded is not None:
            await asyncio.to_thread(self.loaded.state.models.close, wait=False)
        await send({"type": "lifespan.shutdown.complete"})

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self.loaded = self._make()
        except Exception as error:  # The main thread raises the error again.
            self.error = error
        # The loop is closed if the server was stopped meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self.loaded is not None:
            self.loaded.state.models.begin()
        self.when_done()


_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Numbers of glibc's malloc settings, from its malloc.h."""
_LARGE_BLOCK = 256 << 10
"""The size in bytes from which on a block of memory gets its own mapping."""
_ARENAS = 2
_MOST_NAMED = 20
"""The most models that are listed when the server starts."""
_SECONDS_TO_FINISH = 10
"""Seconds that a client may take to read the end of its answer during shutdown."""
_SECONDS_TO_DISCONNECT = 5
"""Seconds after which uvicorn cancels requests whose clients have been disconnected during
shutdown. It writes a traceback for each, so this is the last resort.
"""


def serve(
    model: ModelOptions | ModelCatalog,
    server: ServerOptions,
    page: WebDefaults | None = None,
    when_listening: Callable[[str], object] | None = None,
) -> None:
    """Serve until a signal. Ends the process at once if a model is still being loaded then. `page`:
    defaults of the web page. Raises SettingsError for an address that cannot be bound, and the
    errors of create_app().

    `when_listening` is called with the address once requests are answered, which is before the
    model is loaded.
    """
    with _listening_socket(server) as listener:
        _give_memory_back()
        app = Starting(
            lambda: create_app(model, server, page), page=server.web, root_path=server.root_path
        )
        seconds = _SECONDS_TO_FINISH + server.drain_seconds
        config = uvicorn.Config(
            app,
            http=protocol_of(server.max_connections, server.client_seconds),
            ws="none",
            ssl_keyfile=server.ssl_keyfile,
            ssl_certfile=server.ssl_certfile,
            root_path=server.root_path,
            log_level="info" if _is_verbose(model) else "warning",
            access_log=False,
            timeout_graceful_shutdown=seconds + _SECONDS_TO_DISCONNECT,
        )
        if server.log_requests:
            write_requests_to_stderr()
        url = _url(listener, server)
        _Server(config, app, url, when_listening, seconds).run(sockets=[listener])
    if app.error is not None:
        raise app.error
    # A thread may be inside llama.cpp, which an orderly exit would unload.
    if app.loaded is None or app.loaded.state.models.is_loading:
        sys.stderr.flush()
        os._exit(0)


def _is_verbose(model: ModelOptions | ModelCatalog) -> bool:
    if isinstance(model, ModelOptions):
        return model.verbose
    return any(each.options.verbose for each in model.models)


def _give_memory_back() -> None:
    """Make the C library return the memory of large texts to the system at once.

    Otherwise glibc keeps the memory of large requests, once for every thread that handled one.
    Other C libraries have no such settings.
    """
    set_option = system.c_function("mallopt")
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        set_option(_M_ARENA_MAX, _ARENAS)


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        app: Starting,
        url: str,
        when_listening: Callable[[str], object] | None,
        seconds_to_finish: float,
    ) -> None:
        super().__init__(config)
        self._seconds_to_finish = seconds_to_finish
        self._when_listening = when_listening
        self._app = app
        self._app.when_done = self._loaded
        self._url = url
        # uvicorn raises the signal again after its shutdown: without these handlers, that would end
        # the process.
        for number in (*system.ending_signals(), signal.SIGINT):
            signal.signal(number, self._leave)

    def _leave(self, _: int, __: FrameType | None) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._when_listening is not None:
            self._when_listening(self._url)

    def _loaded(self) -> None:
        """Print that clients are served, or stop if the model could not be loaded."""
        if self._app.error is not None:
            self.should_exit = True
            return
        if self._app.loaded is not None and self._app.loaded.state.models.has_several:
            names = [each.name for each in self._app.loaded.state.models.all()]
            shown = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
            sys.stderr.write(f"entropykv: {len(names)} models, loaded when asked for: {shown}\n")
        page = f", {self._url}/ in a browser" if self._app.page else ""
        name, budget, warnings = self._only_model()
        for warning in warnings:
            sys.stderr.write(f"entropykv: {warning}\n")
        sys.stderr.write(
            f"entropykv: serving {name}{self._url}/v1{page}{budget}; Ctrl-C stops it\n"
        )
        sys.stderr.flush()

    def _only_model(self) -> tuple[str, str, Iterable[str]]:
        """Return what is printed about the only model before and after the server's address, and
        warnings about its budget; empty for several models.
        """
        app = self._app.loaded
        if app is None or app.state.models.has_several:
            return "", "", ()
        engine: Engine = app.state.engine
        warnings = budget_warnings(engine.pool.runner.config, engine.stats.kv_bytes_budget)
        return f"{engine.model.name} at ", f": {engine.describe()}", warnings

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._app.loaded is not None:  # Otherwise uvicorn would wait for the longest answer.
            self._app.loaded.state.models.stop()
        timer = asyncio.get_running_loop().call_later(self._seconds_to_finish, self._disconnect)
        await super().shutdown(sockets)
        timer.cancel()

    def _disconnect(self) -> None:
        """End the connections of clients that have not read their answers."""
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if transport is not None:
                transport.abort()


def _listening_socket(server: ServerOptions) -> socket.socket:
    """Return a bound socket: the server makes it before it loads the model, so that an address in
    use is reported at once. Raises SettingsError for an address that cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            system.keep_address(listener)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {server.host} port {server.port} ({error.strerror}); give another "
            "--host or --port"
        ) from None
    return listener


def _url(listener: socket.socket, server: ServerOptions) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if server.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
