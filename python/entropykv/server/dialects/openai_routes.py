"""Define OpenAI's routes: completions, chats and responses."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from entropykv.server.chat.chat_request import ChatRequest
from entropykv.server.dialects.choices import Choices
from entropykv.server.dialects.requests import CompletionRequest
from entropykv.server.dialects.responses import ResponsesRequest
from entropykv.server.dialects.streaming import Call, stream, whole
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.routes import use_document
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


def openai_routes(
    models: ModelRegistry, documents: DocumentLibrary | None = None, *, ping: bool
) -> APIRouter:
    """Return the routes; with `ping`, silent streams get comments, so that they are not closed.

    `documents`: those that requests may name.
    """
    router = APIRouter(prefix="/v1", tags=["OpenAI V1"], route_class=BodyRoute)

    async def answer(request: Request, body: _Body) -> Response:
        name = request.headers.get(SESSION_HEADER) or getattr(body, "user", None)
        caller = Caller(user_of(request.scope), name)
        engine = await models.use(request, body.model)
        await use_document(request, models, engine, documents, body.document_name())
        calls: list[Call] = [body.call]
        choices = None
        if not isinstance(body, ResponsesRequest):
            engine.admission.check(body.n_jobs)
            calls = [part.call for part in body.parts()]
            choices = Choices(body.n, usage=body.stream_options.include_usage)
        if body.stream:
            return await stream(request, engine, calls, choices, caller, ping=ping)
        return await whole(request, engine, calls, choices, caller)

    @router.post("/completions", response_model=None, responses=_ANSWERS)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body)

    @router.post("/chat/completions", response_model=None, responses=_ANSWERS)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await answer(request, body)

    @router.post("/responses", response_model=None, responses=_ANSWERS)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        return await answer(request, body)

    @router.post("/embeddings", response_model=None)
    async def embeddings() -> Response:
        raise RequestError(
            400, "embeddings are not possible inside a KV budget; use llama_cpp.server for them"
        )

    return router
