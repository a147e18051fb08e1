"""Serialise the requests of each conversation, and save it after every turn (ASGI middleware)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from entropykv.errors import EntropyKVError, SettingsError
from entropykv.files import FileStamp, make_folder, remove_oldest, stamp_of
from entropykv.server.engine.admission import CLIENT_GONE, arrival_of, too_late
from entropykv.server.engine.engine import Engine
from entropykv.server.engine.prefix_cache import PrefixCache
from entropykv.server.http.access import Caller, session_in, user_of
from entropykv.server.http.errors import RequestError
from entropykv.server.http.request_log import tokens_of

_logger = logging.getLogger(__name__)


class Conversations:
    """Keep sessions in a directory that replicas may share; the least recently used are removed
    first.

    So any replica can continue a conversation, if only one does so at a time. A session is saved
    after every turn, before the client receives the end of the answer, so nothing is left to save
    when a replica stops or crashes.

    `max_bytes` limits all files together. Raises SettingsError if the directory cannot be used.
    """

    def __init__(
        self, directory: str | os.PathLike[str], max_bytes: int, prefix_cache: PrefixCache
    ) -> None:
        """Make the directory if it does not exist; only its owner can read the conversations.

        `prefix_cache`: holds the conversations between two requests.
        """
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._prefix_cache = prefix_cache
        self._held: dict[Caller, FileStamp] = {}
        """For each conversation, the version of the file that the prefix cache holds."""
        try:
            make_folder(self._directory)
        except OSError as error:
            raise SettingsError(
                f"{directory}: sessions cannot be kept there ({error.strerror}); give another "
                "directory"
            ) from error

    def path(self, caller: Caller) -> Path:
        """Return the file path of a caller's named conversation.

        Names may contain any characters, so the file name is a digest. It differs for every user.
        """
        name, user = (caller.name or "").encode(), caller.user.encode()
        digest = hashlib.blake2b(name, key=user, digest_size=16).hexdigest()
        return self._directory / f"{digest}.session"

    def enter(self, caller: Caller) -> None:
        """Load a caller's conversation, unless it has no file or is held; errors are logged."""
        path, held = self.path(caller), self._prefix_cache
        stamp = stamp_of(path)
        if stamp is None or (self._held.get(caller) == stamp and held.length_of(caller) > 0):
            return
        self._held.pop(caller, None)
        try:
            held.load(caller, path)
        # Continue without the conversation, because the request contains the whole text.
        except EntropyKVError as error:
            _logger.warning("%s", error)
        else:
            self._held[caller] = stamp

    def leave(self, caller: Caller) -> None:
        """Save a conversation after its turn, and remove the oldest files beyond the limit; an
        error only means that the conversation must be read again.
        """
        self._held.pop(caller, None)
        path = self.path(caller)
        try:
            if self._prefix_cache.save(caller, path) is None:
                return  # The generation failed; the file of the previous turn is better.
        except EntropyKVError as error:
            _logger.warning("%s", error)
            return
        stamp = stamp_of(path)
        if stamp is not None:
            self._held[caller] = stamp
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        stamps = [(stamp_of(path), path) for path in self._directory.glob("*.session")]
        # Another replica may remove files, too.
        files = [(stamp[0], stamp[1], path) for stamp, path in stamps if stamp is not None]

        def remove(path: Path) -> bool:
            path.unlink(missing_ok=True)
            return True

        remove_oldest(files, self._max_bytes, remove)


REPLICA_HEADER = b"x-entropykv-replica"
TOKENS_READ_HEADER = b"x-entropykv-tokens-read"
_STREAMS = (b"text/event-stream", b"application/x-ndjson")
"""The types of answers that are sent while the model generates."""
_CHECK_INTERVAL = 0.01
"""Seconds between two checks whether the answer to a request has ended."""


class TurnMiddleware:
    """Load a request's conversation before it is answered, and save it before the answer ends.

    A conversation is identified by a user's header X-Session-Id. Requests of the same conversation
    wait for each other, and all do if the pool holds a single conversation. The response to a POST
    that got its turn names the replica and, if it is not streamed, how many tokens of the prompt
    were read for it.
    """

    def __init__(
        self, app: ASGIApp, *, engine: Engine, conversations: Conversations, replica: str
    ) -> None:
        """Wrap an app whose POST requests use the engine's model."""
        self._app = app
        self._engine = engine
        self._conversations = conversations
        self._replica = replica.encode()
        self._locks: defaultdict[Caller | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        """A lock for every conversation that requests hold or wait for, or one under the key None
        for the requests of all conversations, if the pool holds only one.
        """
        self._waiting: defaultdict[Caller | None, int] = defaultdict(int)
        """How many requests hold or wait for each lock."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; a POST first waits for its turn."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        caller = _caller(scope)
        turn = _Turn(self._engine, self._conversations, self._replica, scope, send)
        async with AsyncExitStack() as stack:
            holds_one = self._engine.pool.holds_one
            if holds_one or caller.name is not None:
                client = _Client(receive)
                receive = client.receive
                key = None if holds_one else caller
                try:
                    await stack.enter_async_context(self._alone(key, arrival_of(scope), client))
                except RequestError as error:
                    await error.response()(scope, receive, send)
                    return
            await turn.begin()
            try:
                await self._app(scope, receive, turn.send)
            finally:  # A cancelled request has also read tokens into this conversation.
                await turn.end()
            await turn.finish()

    @asynccontextmanager
    async def _alone(
        self, caller: Caller | None, arrival: float, client: _Client
    ) -> AsyncIterator[None]:
        """Wait for earlier requests of the same conversation; None: of all conversations.

        Raises RequestError if too many wait (429), if it takes too long (504), or if the client
        disconnects.
        """
        if self._waiting[caller]:
            n_waiting = sum(self._waiting.values()) - len(self._locks)
            self._engine.admission.check_waiting(n_waiting + 1)
        self._waiting[caller] += 1
        lock = self._locks[caller]
        try:
            await client.wait_for(lock, self._engine.admission.seconds_left(arrival))
            try:
                yield
            finally:
                lock.release()
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller], self._locks[caller]


class _Client:
    """Detect a client that disconnects while its request waits, without losing its messages."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._heard: deque[Message] = deque()

    async def receive(self) -> Message:
        """Return the client's next message."""
        return self._heard.popleft() if self._heard else await self._receive()

    async def wait_for(self, lock: asyncio.Lock, seconds: float | None) -> None:
        """Acquire a lock; raises RequestError on a timeout, or if the client disconnects."""
        acquired = asyncio.ensure_future(lock.acquire())
        gone = asyncio.ensure_future(self._gone())
        has_it = False
        try:
            await asyncio.wait(
                {acquired, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if gone.done():
                raise RequestError(CLIENT_GONE, "the client has gone")
            if not acquired.done():
                raise too_late()
            has_it = True
        finally:
            gone.cancel()
            if not acquired.cancel() and not has_it:
                lock.release()

    async def _gone(self) -> None:
        while (message := await self._receive())["type"] != "http.disconnect":
            self._heard.append(message)


class _Turn:
    """Load the conversation of one request, and save it when its answer ends."""

    def __init__(
        self,
        engine: Engine,
        conversations: Conversations,
        replica: bytes,
        scope: Scope,
        send: Send,
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._caller = _caller(scope)
        self._replica = replica
        self._scope = scope
        self._send = send
        self._last: Message | None = None

    async def begin(self) -> None:
        """Load the conversation, in a thread; it needs no worker of the engine."""
        if self._caller.name is not None:
            await asyncio.to_thread(self._conversations.enter, self._caller)

    async def end(self) -> None:
        """Save the conversation if something was read."""
        # If the client has disconnected, its answer may not have ended yet.
        while self._is_answered():
            await asyncio.sleep(_CHECK_INTERVAL)
        if self._caller.name is not None and tokens_of(self._scope) != (0, 0):
            await asyncio.to_thread(self._conversations.leave, self._caller)

    def _is_answered(self) -> bool:
        if self._engine.pool.holds_one:  # No other request has begun.
            return bool(self._engine.running)
        return self._caller.name is not None and self._engine.answers(self._caller)

    async def send(self, message: Message) -> None:
        """Pass a message on, but delay the last one until the conversation is saved: the client may
        send its next request to another replica.
        """
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ())]
            message = {**message, "headers": [*headers, *self._headers(dict(headers))]}
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._last = message
        else:
            await self._send(message)

    async def finish(self) -> None:
        if self._last is not None:
            await self._send(self._last)

    def _headers(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        own = [(REPLICA_HEADER, self._replica)]
        if headers.get(b"content-type", b"").startswith(_STREAMS):
            return own  # Headers of streams are sent before the prompt was read.
        return [*own, (TOKENS_READ_HEADER, str(tokens_of(self._scope)[0]).encode())]


def _caller(scope: Scope) -> Caller:
    return Caller(user_of(scope), session_in(scope["headers"]))
