"""Answer with a generation, whole or as a stream, while the client is connected."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from entropykv.server.dialects.anthropic_requests import anthropic_error
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.readings import DocumentId, no_documents, not_there
from entropykv.server.engine.admission import CLIENT_GONE, arrival_of, unless_gone
from entropykv.server.engine.answering import Answering, AskedDocument
from entropykv.server.engine.engine import Engine, Job
from entropykv.server.http.access import SESSION_HEADER, Caller, user_of
from entropykv.server.http.errors import RequestError
from entropykv.server.http.request_log import note_tokens
from entropykv.server.models.registry import ModelRegistry, until_answered

_PATIENCE = 5.0
"""Seconds that a stream waits for its first chunk before it answers 200, to detect invalid
requests.
"""
PING_INTERVAL = 15.0
"""After how many silent seconds a stream sends something, so that nobody closes it."""
STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
MOST_UNREAD = 65_536
"""The most chunks of a stream that wait for their client. They take memory, because the model does
not wait for a client that reads slowly.
"""
_END = object()
Call = Callable[[Answering], Any]


class Joined(Protocol):
    """Join the answers of one request, or their chunks."""

    def whole(self, answers: Sequence[dict[str, Any]]) -> Any:
        """Return what the client gets for all answers, in their order, if it does not stream."""

    def chunk(self, index: int, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Return a chunk of the answer number `index` as clients get it; None if they do not."""

    def end(self) -> dict[str, Any] | None:
        """Return the chunk that ends the stream after all answers; None if there is none."""


async def respond(
    request: Request,
    models: ModelRegistry,
    calls: Callable[[], Sequence[Call]],
    *,
    model: str | None,
    document: str | None,
    streams: bool,
    user: str | None = None,
    n_jobs: int = 1,
    joined: Joined | None = None,
    ping: bool = False,
    form: type[Events] | None = None,
) -> Response:
    """Return the response to a request, whole or as a stream; 499 if its client has disconnected.

    `calls` is called once the model is loaded and the document has been read; it returns `n_jobs`
    functions, each of which generates one answer. `joined` joins their answers, or the chunks of
    these; None: there is one answer. `user`: the conversation of a request without the header
    X-Session-Id. `form`: how chunks are sent, by default as OpenAI's events. `ping`: silent streams
    get comments or events, so that nobody closes them. Raises RequestError for a request that is
    refused, or that fails before its first chunk.
    """
    caller = Caller(user_of(request.scope), request.headers.get(SESSION_HEADER) or user)
    engine = await models.use(request, model)
    asked = await _asked_document(request, models, engine, document)
    engine.admission.check(n_jobs)
    note, arrival = note_tokens(request.scope), arrival_of(request.scope)

    def job(call: Call, emit: Callable[[Any], None] | None = None) -> Job:
        return Job(call, emit, note, caller, asked, arrival)

    if streams:
        return await _stream(request, engine, calls(), job, joined, form or Events, ping=ping)
    work = engine.run_jobs([job(call) for call in calls()])
    done, answers = await unless_gone(request.receive, work)
    if not done:
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(answers[0] if joined is None else joined.whole(answers))


async def _asked_document(
    request: Request, models: ModelRegistry, engine: Engine, name: str | None
) -> AskedDocument | None:
    """Return the document that a request names, which stays until the answer was sent; None if it
    names none.

    The request waits while the document is being read, as long as its client is connected. Raises
    RequestError for a document that this model does not have or could not read, without documents
    on this server, for a request that waits too long, and where too many wait.
    """
    if name is None:
        return None
    reader = engine.documents
    if reader is None:
        raise no_documents()
    kept, document = reader.library, DocumentId(reader.model, user_of(request.scope), name)
    path = until_answered(request).enter_context(kept.in_use(document))
    if not await run_in_threadpool(kept.hold, document):
        if await run_in_threadpool(kept.status, document) is None:
            raise await run_in_threadpool(_of_another_model, models, kept, document)
        with engine.admission.jobs_of(1):  # A request that waits counts as a job.
            await engine.admission.in_time(request, reader.until_ready(document))
        if not await run_in_threadpool(kept.hold, document):
            raise not_there(name)
    return AskedDocument(name, path)


def _of_another_model(
    models: ModelRegistry, library: DocumentLibrary, document: DocumentId
) -> RequestError:
    """Return the error for a document that this model does not have."""
    for held in models.all():
        if library.status(DocumentId(held.name, document.user, document.name)) is not None:
            return RequestError(
                400,
                f"the document {document.name!r} was read by the model {held.name!r}, and this "
                f"request asks {document.model!r}; name that model, or read the text again for "
                "this one",
                param="document",
            )
    return not_there(document.name)


async def _stream(
    request: Request,
    engine: Engine,
    calls: Sequence[Call],
    job: Callable[[Call, Callable[[Any], None]], Job],
    joined: Joined | None,
    form: type[Events],
    *,
    ping: bool,
) -> Response:
    """Return the chunks of calls as events; raises RequestError if one fails before the first
    chunk.

    `job` makes the job of a call, from the function that gets its chunks. `joined` joins the
    chunks; None: they are sent unchanged.
    """
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[Any] = asyncio.Queue()

    def take(index: int, chunk: Any) -> None:
        shown = chunk if joined is None else joined.chunk(index, chunk)
        if shown is not None:
            chunks.put_nowait(shown)

    def emit(index: int, chunk: Any) -> None:
        """Take a chunk of the call number `index`, in the thread of a worker."""
        if chunks.qsize() >= MOST_UNREAD:
            raise RequestError(
                408,
                f"{MOST_UNREAD:,} pieces of the answer wait for their client, which reads too "
                "slowly; read faster, or ask for fewer choices or tokens",
            )
        loop.call_soon_threadsafe(take, index, chunk)

    jobs = [job(call, partial(emit, index)) for index, call in enumerate(calls)]
    work = asyncio.ensure_future(engine.run_jobs(jobs))

    def ended(task: asyncio.Task[Any]) -> None:
        # Retrieve the error; otherwise asyncio logs it if the client has disconnected.
        failed = task.cancelled() or task.exception()
        last = None if failed or joined is None else joined.end()
        if last is not None:
            chunks.put_nowait(last)
        chunks.put_nowait(_END)

    work.add_done_callback(ended)
    events = form(chunks, work, ping=ping)
    try:
        there, _ = await unless_gone(request.receive, events.wait_for_first())
    except BaseException:
        work.cancel()
        raise
    if not there:
        work.cancel()
        return Response(status_code=CLIENT_GONE)
    return events


class Events(Response):
    """Send chunks as server-sent events, and [DONE] or an error in the end, as OpenAI does."""

    media_type = "text/event-stream"

    def __init__(self, chunks: asyncio.Queue[Any], work: asyncio.Task[Any], *, ping: bool) -> None:
        """Take the queue of the chunks, and the task that fills it; `ping`: see respond()."""
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._chunks = chunks
        self._work = work
        self._ping_interval = PING_INTERVAL if ping else None
        self._first: Any = None

    async def wait_for_first(self) -> None:
        """Wait for the first chunk, or until a time limit; raises an error that occurs before."""
        self._first = await self._next(_PATIENCE)
        if self._first is _END:
            self._work.result()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send all chunks, until the client disconnects."""
        try:
            await unless_gone(receive, self._write(send))
        finally:
            self._work.cancel()

    async def _write(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        item = self._first
        while item is not _END:
            await self._send(send, self._ping() if item is None else self._text_of(item))
            item = await self._next(self._ping_interval)
        error = self._work.exception()
        last = self._last(error if isinstance(error, RequestError) else None)
        await self._send(send, last, more=False)

    def _ping(self) -> str:
        return ": ping\n\n"

    def _text_of(self, item: Any) -> str:
        return _event(item)

    def _last(self, error: RequestError | None) -> str:
        return f"data: {'[DONE]' if error is None else json.dumps(error.body)}\n\n"

    @staticmethod
    async def _send(send: Send, text: str, *, more: bool = True) -> None:
        body = text.encode("utf-8")
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _next(self, seconds: float | None) -> Any:
        """Return the next chunk or the end; None if neither comes within `seconds`."""
        with contextlib.suppress(asyncio.QueueEmpty):
            return self._chunks.get_nowait()
        # Do not use wait_for(): before Python 3.12 it loses a chunk that arrives with a
        # cancellation.
        chunk = asyncio.ensure_future(self._chunks.get())
        try:
            done, _ = await asyncio.wait({chunk}, timeout=seconds)
            return chunk.result() if done else None
        finally:
            chunk.cancel()


class Lines(Events):
    """Send chunks as lines of JSON, as Ollama does; an error is the last of them."""

    media_type = "application/x-ndjson"

    def _ping(self) -> str:  # A client of Ollama would read a ping as a line.
        return ""

    def _text_of(self, item: Any) -> str:
        return f"{json.dumps(item)}\n"

    def _last(self, error: RequestError | None) -> str:
        return "" if error is None else f"{json.dumps({'error': error.detail})}\n"


class PlainEvents(Events):
    """Send chunks as events, and at the end only an error if there is one, as in llama-server's own
    form.
    """

    def _last(self, error: RequestError | None) -> str:
        return "" if error is None else _event(error.body)


class NamedEvents(Events):
    """Send chunks as events whose names are their types; an error is the last of them, as
    Anthropic does it.
    """

    def _ping(self) -> str:
        return _event({"type": "ping"})

    def _last(self, error: RequestError | None) -> str:
        if error is None:
            return ""
        return _event(anthropic_error(error.body["error"], error.status_code))


def _event(item: Any) -> str:
    """Return an item as a server-sent event, whose name is the item's type, if it has one."""
    name = f"event: {item['type']}\n" if "type" in item else ""
    return f"{name}data: {json.dumps(item)}\n\n"
