"""ASGI middleware: the turns of conversations, one after the other, on one model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from entropykv.llama import EntropyLlama
from entropykv.server.conversations import Conversations

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

SESSION_HEADER = b"x-session-id"
REPLICA_HEADER = b"x-entropykv-replica"
TOKENS_READ_HEADER = b"x-entropykv-tokens-read"


class TurnMiddleware:
    """Loads a request's conversation before it is answered, and saves it before the answer ends.

    A conversation is what the header X-Session-Id names. Every response says which replica gave it,
    and every one that is not streamed how many tokens of the prompt were read for it.
    """

    def __init__(
        self,
        app: App,
        *,
        llama: Callable[[], EntropyLlama],
        conversations: Conversations,
        replica: str,
    ) -> None:
        """Wrap an app whose POST requests use the model that `llama` returns."""
        self._app = app
        self._llama = llama
        self._conversations = conversations
        self._replica = replica.encode()
        self._lock = asyncio.Lock()
        self._turns: set[asyncio.Task[None]] = set()

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        gone = asyncio.Event()
        turn = asyncio.create_task(self._turn(scope, _until(gone, receive), send, gone))
        self._turns.add(turn)
        turn.add_done_callback(self._turns.discard)
        try:
            # A cancelled request would leave its thread in the model, and free the lock.
            await asyncio.shield(turn)
        except asyncio.CancelledError:
            gone.set()
            raise

    async def _turn(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send, gone: asyncio.Event
    ) -> None:
        async with self._lock:
            if gone.is_set():
                return
            turn = _Turn(self._llama(), self._conversations, _name(scope), self._replica, send)
            await asyncio.to_thread(turn.begin)
            try:
                await self._app(scope, receive, turn.send)
            finally:
                await asyncio.to_thread(turn.end)
            await turn.finish()


class _Turn:
    """One request to the model."""

    def __init__(
        self,
        llama: EntropyLlama,
        conversations: Conversations,
        name: str | None,
        replica: bytes,
        send: Send,
    ) -> None:
        self._llama = llama
        self._conversations = conversations
        self._name = name
        self._replica = replica
        self._send = send
        self._last: Message | None = None
        self._before = (0, 0)

    def begin(self) -> None:
        if self._name is not None:
            self._conversations.enter(self._llama, self._name)
        self._before = self._counts()

    def end(self) -> None:
        if self._counts() == self._before:  # a refused request: the model is as it was
            return
        if self._name is None:
            self._conversations.forget()
        else:
            self._conversations.leave(self._llama, self._name)

    async def send(self, message: Message) -> None:
        """Send on, but the last message: a client that has it may ask another replica."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self._headers(message["headers"])]
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._last = message
        else:
            await self._send(message)

    async def finish(self) -> None:
        if self._last is not None:
            await self._send(self._last)

    def _headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        own = [(REPLICA_HEADER, self._replica)]
        if dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            return own  # nothing is read yet
        read = self._counts()[0] - self._before[0]
        return [*own, (TOKENS_READ_HEADER, str(read).encode())]

    def _counts(self) -> tuple[int, int]:
        stats = self._llama.kv_stats()
        return stats.prompt_tokens, stats.generated_tokens


def _name(scope: MutableMapping[str, Any]) -> str | None:
    name = dict(scope["headers"]).get(SESSION_HEADER, b"").decode("latin-1")
    return name or None


def _until(gone: asyncio.Event, receive: Receive) -> Receive:
    """As `receive`, but a disconnect once the client is gone."""

    async def receive_or_disconnect() -> Message:
        if gone.is_set():
            return {"type": "http.disconnect"}
        message = asyncio.ensure_future(receive())
        leaving = asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait({message, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            leaving.cancel()

    return receive_or_disconnect
