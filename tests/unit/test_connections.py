"""A client that does not read its answer is disconnected, at a real socket."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra server")

import uvicorn

from entropykv.server.http.running import protocol_of
from tests.support.waiting import until


async def test_a_client_that_does_not_read_loses_its_connection() -> None:
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

    async with running(endless) as (_, listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        start = time.monotonic()
        assert await reader.read(10)  # Only a part arrives, because the buffer is soon full.
        await asyncio.wait_for(ended.wait(), 20)
        assert time.monotonic() - start > 0.4
        writer.transport.abort()


@pytest.mark.parametrize("last", ["close", "keep-alive"])
async def test_a_client_that_leaves_the_rest_of_an_answer_loses_its_connection(last: str) -> None:
    """A client that does not read the end of an answer is disconnected, though the server could
    send all of it.
    """

    async def short(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 48_000})

    loop = asyncio.get_running_loop()
    async with running(short) as (server, listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, listener.getsockname())
            head = f"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: {last}\r\n\r\n"
            await loop.sock_sendall(client, head.encode())
            connections = server.server_state.connections
            await until(lambda: any(each.transport.is_closing() for each in connections))
            (held,) = connections
            assert 0 < held.transport.get_write_buffer_size() < 65_536
            await until(lambda: not connections)


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[tuple[uvicorn.Server, socket.socket]]:
    """Serve an app whose clients have half a second to read; yield the server and its socket."""
    config = uvicorn.Config(
        app,
        port=0,
        lifespan="off",
        log_level="error",
        http=protocol_of(5, 0.5),
        timeout_keep_alive=1,
    )
    server = uvicorn.Server(config)
    config.load()
    listener = config.bind_socket()
    life = asyncio.ensure_future(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    yield server, listener
    server.should_exit = True
    await life
