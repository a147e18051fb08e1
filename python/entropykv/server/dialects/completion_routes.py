"""Define the routes of llama-server that complete texts in its own form."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from entropykv.server.dialects.llama_server_answers import AnswersInList
from entropykv.server.dialects.llama_server_requests import InfillRequest, LlamaServerCompletion
from entropykv.server.dialects.openai_routes import SESSION_HEADER
from entropykv.server.dialects.streaming import PlainEvents, stream, whole
from entropykv.server.documents.asked_document import asked_document
from entropykv.server.http.bodies import BodyRoute
from entropykv.server.http.users import Caller, user_of
from entropykv.server.models.registry import ModelRegistry

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or a list of answers; with `stream`, in pieces.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def completion_routes(models: ModelRegistry, *, ping: bool) -> APIRouter:
    """Return the routes; with `ping`, silent streams get comments, so that they are not closed."""
    router = APIRouter(tags=["llama-server"], route_class=BodyRoute)

    async def answer(request: Request, body: LlamaServerCompletion | InfillRequest) -> Response:
        name = request.headers.get(SESSION_HEADER) or body.user
        caller = Caller(user_of(request.scope), name)
        engine = await models.use(request, body.model)
        document = await asked_document(request, models, engine, body.document_name())
        engine.admission.check(body.n_jobs)
        calls = [part.call for part in body.parts()]
        joined = AnswersInList(len(calls))
        if body.stream:
            return await stream(
                request, engine, calls, joined, caller, document, ping=ping, form=PlainEvents
            )
        return await whole(request, engine, calls, joined, caller, document)

    @router.post("/completion", response_model=None, responses=_ANSWERS)
    @router.post("/completions", response_model=None, include_in_schema=False)
    async def completion(request: Request, body: LlamaServerCompletion) -> Response:
        return await answer(request, body)

    @router.post("/infill", response_model=None, responses=_ANSWERS)
    async def infill(request: Request, body: InfillRequest) -> Response:
        return await answer(request, body)

    return router
