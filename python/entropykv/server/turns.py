"""Let conversations take turns on one model, one after the other; ASGI middleware."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from entropykv.llama.entropy_llama import EntropyLlama
from entropykv.server.conversations import Conversations
from entropykv.server.engine import Engine

SESSION_HEADER = b"x-session-id"
REPLICA_HEADER = b"x-entropykv-replica"
TOKENS_READ_HEADER = b"x-entropykv-tokens-read"


class TurnMiddleware:
    """Load a request's conversation before it is answered, and save it before the answer ends.

    A conversation is what the header X-Session-Id names. Every response to a POST says which
    replica gave it, and, if it is not streamed, how many tokens of the prompt were read for it.
    """

    def __init__(
        self, app: ASGIApp, *, engine: Engine, conversations: Conversations, replica: str
    ) -> None:
        """Wrap an app whose POST requests use the engine's model."""
        self._app = app
        self._engine = engine
        self._conversations = conversations
        self._replica = replica.encode()
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        async with self._lock:
            turn = _Turn(self._engine, self._conversations, _name(scope), self._replica, send)
            await self._engine.call(turn.begin)
            try:
                await self._app(scope, receive, turn.send)
            finally:  # also after a cancelled one: what it read is of this conversation
                await self._engine.call(turn.end)
            await turn.finish()


class _Turn:
    """Hold one request to the model."""

    def __init__(
        self,
        engine: Engine,
        conversations: Conversations,
        name: str | None,
        replica: bytes,
        send: Send,
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._name = name
        self._replica = replica
        self._send = send
        self._last: Message | None = None
        self._before = (0, 0)

    def begin(self, llama: EntropyLlama) -> None:
        if self._name is not None:
            self._conversations.enter(llama, self._name)
        self._before = _counts(llama)

    def end(self, llama: EntropyLlama) -> None:
        if _counts(llama) == self._before:  # a refused request has left the model as it was
            return
        if self._name is None:
            self._conversations.forget()
        else:
            self._conversations.leave(llama, self._name)

    async def send(self, message: Message) -> None:
        """Send a message on, but hold the last: a client that has it may ask another replica."""
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ())]
            message = {**message, "headers": [*headers, *await self._headers(dict(headers))]}
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._last = message
        else:
            await self._send(message)

    async def finish(self) -> None:
        if self._last is not None:
            await self._send(self._last)

    async def _headers(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        own = [(REPLICA_HEADER, self._replica)]
        if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            return own  # the model may be at work, and asking it would wait
        prompt_tokens, _ = await self._engine.call(_counts)
        return [*own, (TOKENS_READ_HEADER, str(prompt_tokens - self._before[0]).encode())]


def _counts(llama: EntropyLlama) -> tuple[int, int]:
    stats = llama.kv_stats()
    return stats.prompt_tokens, stats.generated_tokens


def _name(scope: Scope) -> str | None:
    return dict(scope["headers"]).get(SESSION_HEADER, b"").decode("latin-1") or None
