"""Define the routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from entropykv.server.dialects.anthropic_requests import CountedMessages, MessagesRequest
from entropykv.server.dialects.openai_routes import SESSION_HEADER
from entropykv.server.dialects.streaming import NamedEvents, stream, whole
from entropykv.server.documents.asked_document import asked_document
from entropykv.server.http.bodies import BodyRoute
from entropykv.server.http.users import Caller, user_of
from entropykv.server.models.registry import ModelRegistry

PATH = "/v1/messages"
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The message; with `stream`, its events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def anthropic_routes(models: ModelRegistry, *, ping: bool) -> APIRouter:
    """Return the routes of Anthropic's API. With `ping`, a stream that has been silent gets an
    event, so that nobody between server and client closes it.
    """
    router = APIRouter(tags=["Anthropic"], route_class=BodyRoute)

    @router.post(PATH, response_model=None, responses=_ANSWERS)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        name = request.headers.get(SESSION_HEADER) or body.user
        caller = Caller(user_of(request.scope), name)
        engine = await models.use(request, body.model)
        document = await asked_document(request, models, engine, body.document_name())
        if body.stream:
            return await stream(
                request, engine, [body.call], None, caller, document, ping=ping, form=NamedEvents
            )
        return await whole(request, engine, [body.call], None, caller, document)

    @router.post(f"{PATH}/count_tokens")
    async def count_tokens(request: Request, body: CountedMessages) -> dict[str, int]:
        engine = await models.use(request, body.model)
        _, tokens = await run_in_threadpool(body.chat().prompt_text, engine.model)
        return {"input_tokens": len(tokens)}

    return router
