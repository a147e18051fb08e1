"""Define the routes that answer a request as OpenAI, llama-server and Anthropic do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from entropykv.server.chat.chat_request import ChatRequest
from entropykv.server.dialects.anthropic_requests import CountedMessages, MessagesRequest
from entropykv.server.dialects.llama_server_requests import (
    AnswersInList,
    InfillRequest,
    LlamaServerCompletion,
)
from entropykv.server.dialects.requests import Choices, CompletionRequest
from entropykv.server.dialects.responses import ResponsesRequest
from entropykv.server.dialects.streaming import Events, Joined, NamedEvents, PlainEvents, respond
from entropykv.server.http.bodies import BodyRoute
from entropykv.server.http.errors import RequestError
from entropykv.server.models.registry import ModelRegistry

ANTHROPIC_PATH = "/v1/messages"


def _described(answer: str) -> dict[int | str, dict[str, Any]]:
    """Return what /openapi.json says of a route's answers."""
    content: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
    return {200: {"description": answer, "content": content}}


_ANSWERS = _described("The answer; with `stream`, in pieces.")
_EMBEDDINGS = "embeddings are not possible inside a KV budget; use llama_cpp.server for them"
_RANKS = "texts are not ranked inside a KV budget; use llama-server --reranking for that"
_SOUND = "sound is not read here; send the text"
_NOT_HERE = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/embedding"), _EMBEDDINGS),
    **dict.fromkeys(("/v1/rerank", "/v1/reranking", "/rerank", "/reranking"), _RANKS),
    **dict.fromkeys(("/v1/audio/transcriptions", "/audio/transcriptions"), _SOUND),
    "/v1/chat/completions/control": "answers are not changed while they are written; ask again",
    "/lora-adapters": "adapters stay as they are; start the server with --lora",
}
"""Error messages for routes of OpenAI and llama-server that this server does not offer."""
_Body = (
    CompletionRequest
    | ChatRequest
    | ResponsesRequest
    | LlamaServerCompletion
    | InfillRequest
    | MessagesRequest
)


def openai_routes(models: ModelRegistry, *, ping: bool) -> APIRouter:
    """Return OpenAI's routes: completions, chats and responses; `ping`: see respond()."""
    router = APIRouter(tags=["OpenAI V1"], route_class=BodyRoute)

    async def answer(request: Request, body: CompletionRequest | ChatRequest) -> Response:
        joined = Choices(body.n, usage=body.stream_options.include_usage)
        return await _answer(request, models, body, joined, ping=ping)

    @router.post("/v1/completions", response_model=None, responses=_ANSWERS)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body)

    # Clients of llama-server send the same requests to paths without /v1.
    @router.post("/v1/chat/completions", response_model=None, responses=_ANSWERS)
    @router.post("/chat/completions", response_model=None, include_in_schema=False)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await answer(request, body)

    @router.post("/v1/responses", response_model=None, responses=_ANSWERS)
    @router.post("/responses", response_model=None, include_in_schema=False)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        return await _answer(request, models, body, ping=ping)

    for path, why in _NOT_HERE.items():
        router.add_api_route(path, refusing(why), methods=["POST"], include_in_schema=False)
    return router


def completion_routes(models: ModelRegistry, *, ping: bool) -> APIRouter:
    """Return llama-server's routes of completions in its own form; `ping`: see respond()."""
    router = APIRouter(tags=["llama-server"], route_class=BodyRoute)
    described = _described("The answer, or a list of answers; with `stream`, in pieces.")

    async def answer(request: Request, body: LlamaServerCompletion | InfillRequest) -> Response:
        joined = AnswersInList(body.n_jobs)
        return await _answer(request, models, body, joined, ping=ping, form=PlainEvents)

    @router.post("/completion", response_model=None, responses=described)
    @router.post("/completions", response_model=None, include_in_schema=False)
    async def completion(request: Request, body: LlamaServerCompletion) -> Response:
        return await answer(request, body)

    @router.post("/infill", response_model=None, responses=described)
    async def infill(request: Request, body: InfillRequest) -> Response:
        return await answer(request, body)

    return router


def anthropic_routes(models: ModelRegistry, *, ping: bool) -> APIRouter:
    """Return the routes of Anthropic's Messages API. With `ping`, a stream that has been silent
    gets an event, so that nobody between server and client closes it.
    """
    router = APIRouter(tags=["Anthropic"], route_class=BodyRoute)
    described = _described("The message; with `stream`, its events.")

    @router.post(ANTHROPIC_PATH, response_model=None, responses=described)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        return await _answer(request, models, body, ping=ping, form=NamedEvents)

    @router.post(f"{ANTHROPIC_PATH}/count_tokens")
    async def count_tokens(request: Request, body: CountedMessages) -> dict[str, int]:
        engine = await models.use(request, body.model)
        _, tokens = await run_in_threadpool(body.chat().prompt_text, engine.model)
        return {"input_tokens": len(tokens)}

    return router


async def _answer(
    request: Request,
    models: ModelRegistry,
    body: _Body,
    joined: Joined | None = None,
    *,
    ping: bool,
    form: type[Events] | None = None,
) -> Response:
    """Return the response to a request of one or several answers; `joined`, `ping` and `form`: see
    respond().
    """
    return await respond(
        request,
        models,
        lambda: [part.call for part in body.parts()],
        model=body.model,
        document=body.document_name(),
        user=body.user,
        streams=body.stream,
        n_jobs=body.n_jobs,
        joined=joined,
        ping=ping,
        form=form,
    )


def refusing(why: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    """Return a function for a route that is not offered; it raises RequestError (400, `why`)."""

    async def refuse() -> Response:
        raise RequestError(400, why)

    return refuse
