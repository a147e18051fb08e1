"""The server before its model is loaded: it listens at once, and says that it is loading."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from entropykv.server.errors import RequestError
from entropykv.server.web_files import page_file, page_files


class Starting:
    """An ASGI app that makes another one in a thread, and passes everything on to it then.

    Until that has happened every request is answered with 503, as llama-server does: but for the
    page, which waits for the model.
    """

    def __init__(self, make: Callable[[], FastAPI], *, page: bool = True) -> None:
        """Nothing is made before the server's lifespan begins."""
        self._make = make
        self.page = page
        """Whether there is one at /."""
        self.when_done: Callable[[], None] = lambda: None
        """Called in the event loop once the app is there, or has failed."""
        self.loaded: FastAPI | None = None
        """The app, once it is there."""
        self.error: Exception | None = None
        """Why there is none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the life of the server."""
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
            await answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start loading with the server, and free the model with it."""
        await receive()
        loop = asyncio.get_running_loop()
        # a daemon: a server that is told to stop does not wait for the end of a long loading
        threading.Thread(target=self._load, args=(loop,), daemon=True).start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.loaded is not None:
            await asyncio.to_thread(self.loaded.state.engine.close)
        await send({"type": "lifespan.shutdown.complete"})

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self.loaded = self._make()
        except Exception as error:  # whatever it is, it is raised again by whoever serves
            self.error = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server was stopped
            loop.call_soon_threadsafe(self.when_done)
