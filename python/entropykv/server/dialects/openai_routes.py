"""Define OpenAI's routes: completions, chats and responses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from entropykv.server.chat.chat_request import ChatRequest
from entropykv.server.dialects.choices import Choices
from entropykv.server.dialects.requests import CompletionRequest
from entropykv.server.dialects.responses import ResponsesRequest
from entropykv.server.dialects.streaming import Call, stream, whole
from entropykv.server.documents.asked_document import asked_document
from entropykv.server.http.bodies import BodyRoute
from entropykv.server.http.errors import RequestError
from entropykv.server.http.users import Caller, user_of
from entropykv.server.models.registry import ModelRegistry

SESSION_HEADER = "x-session-id"
"""The header that names a conversation; without it, the field `user` is used."""
_Body = CompletionRequest | ChatRequest | ResponsesRequest
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, in pieces.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}

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
"""What OpenAI's and llama-server's routes say that this server does not offer."""


def openai_routes(models: ModelRegistry, *, ping: bool) -> APIRouter:
    """Return the routes; with `ping`, silent streams get comments, so that they are not closed."""
    router = APIRouter(tags=["OpenAI V1"], route_class=BodyRoute)

    async def answer(request: Request, body: _Body) -> Response:
        name = request.headers.get(SESSION_HEADER) or getattr(body, "user", None)
        caller = Caller(user_of(request.scope), name)
        engine = await models.use(request, body.model)
        document = await asked_document(request, models, engine, body.document_name())
        calls: list[Call] = [body.call]
        choices = None
        if not isinstance(body, ResponsesRequest):
            engine.admission.check(body.n_jobs)
            calls = [part.call for part in body.parts()]
            choices = Choices(body.n, usage=body.stream_options.include_usage)
        if body.stream:
            return await stream(request, engine, calls, choices, caller, document, ping=ping)
        return await whole(request, engine, calls, choices, caller, document)

    @router.post("/v1/completions", response_model=None, responses=_ANSWERS)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body)

    # Without /v1, llama-server's clients send the same.
    @router.post("/v1/chat/completions", response_model=None, responses=_ANSWERS)
    @router.post("/chat/completions", response_model=None, include_in_schema=False)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await answer(request, body)

    @router.post("/v1/responses", response_model=None, responses=_ANSWERS)
    @router.post("/responses", response_model=None, include_in_schema=False)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        return await answer(request, body)

    for path, why in _NOT_HERE.items():
        router.add_api_route(path, refusing(why), methods=["POST"], include_in_schema=False)
    return router


def refusing(why: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    """Return a route that only says why there is none."""

    async def refuse() -> Response:
        raise RequestError(400, why)

    return refuse
