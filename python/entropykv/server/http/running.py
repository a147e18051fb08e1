"""Run the app under uvicorn until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from entropykv import system
from entropykv.errors import SettingsError
from entropykv.server.engine.engine import Engine
from entropykv.server.http.app import create_app
from entropykv.server.http.connections import protocol_of
from entropykv.server.http.request_log import write_requests_to_stderr
from entropykv.server.http.starting import Starting
from entropykv.server.models.catalog import ModelCatalog
from entropykv.server.options import ModelOptions, ServerOptions
from entropykv.server.page.routes import WebDefaults
from entropykv.session.memory_plan import memory_warning

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
    """Serve until a signal; raises SettingsError for an address that is in use, and the errors of
    create_app().

    `when_listening` is called with the address once requests are answered, which is before the
    model is loaded.
    """
    with _listening_socket(server) as listener:
        _give_memory_back()
        app = Starting(lambda: create_app(model, server, page), page=server.web)
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
        # uvicorn raises the signal again after its shutdown, for the previous handlers.
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
        name, budget, warning = self._only_model()
        if warning is not None:
            sys.stderr.write(f"entropykv: {warning}\n")
        sys.stderr.write(
            f"entropykv: serving {name}{self._url}/v1{page}{budget}; Ctrl-C stops it\n"
        )
        sys.stderr.flush()

    def _only_model(self) -> tuple[str, str, str | None]:
        """Return the words about the only model before and after its address, and a warning about
        its memory; none for several.
        """
        app = self._app.loaded
        if app is None or app.state.models.has_several:
            return "", "", None
        engine: Engine = app.state.engine
        warning = memory_warning(engine.pool.runner.config, engine.stats.kv_bytes_budget)
        return f"{engine.model.name} at ", f": {engine.describe()}", warning

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
    """Bind a socket before the model is loaded, so that an address in use is reported at once."""
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
