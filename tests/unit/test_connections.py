"""A client that does not read its answer is disconnected, at a real socket."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra server")

import uvicorn

from entropykv.server.connections import protocol_of


def test_a_client_that_does_not_read_loses_its_connection() -> None:
    ended = asyncio.Event()

    async def endless(_: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while not (gone.done() and gone.result()["type"] == "http.disconnect"):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)  # Sending does not wait once the connection is lost.
            if gone.done() and gone.result()["type"] == "http.request":
                gone = asyncio.ensure_future(receive())
        ended.set()

    async def run() -> float:
        config = uvicorn.Config(
            endless, port=0, lifespan="off", log_level="error", http=protocol_of(5, 0.5)
        )
        server = uvicorn.Server(config)
        config.load()
        listener = config.bind_socket()
        life = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        start = time.monotonic()
        assert await reader.read(10)  # Only a part arrives, because the buffer is soon full.
        await asyncio.wait_for(ended.wait(), 20)
        seconds = time.monotonic() - start
        writer.transport.abort()
        server.should_exit = True
        await life
        return seconds

    assert asyncio.run(run()) > 0.4
