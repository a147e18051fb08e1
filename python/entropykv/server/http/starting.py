"""Listen before the model is loaded, and answer that it is loading."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from entropykv.server.http.errors import RequestError
from entropykv.server.page.files import page_file, page_files


class Starting:
    """Create an ASGI app in a thread, and pass everything on to it once it exists.

    Until then every request is answered with 503, as llama-server does, except for the page, which
    waits for the model.
    """

    def __init__(self, make: Callable[[], FastAPI], *, page: bool = True) -> None:
        """Take `make`, which is called when the server's lifespan begins; nothing is
        created yet.
        """
        self._make = make
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
            await answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start loading when the server starts, and free the model when it stops."""
        await receive()
        loop = asyncio.get_running_loop()
        # A daemon thread, because a server that is told to stop must not wait for the end of
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
