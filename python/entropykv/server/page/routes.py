"""Define the routes of the page at /, and the initial settings of its conversations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from entropykv.server.models.registry import ModelRegistry
from entropykv.server.page.files import page_file, page_files


class WebDefaults(BaseModel):
    """Hold the initial settings of a conversation in the page; None: the defaults of the server's
    routes.
    """

    system: str | None = None
    question: str | None = None
    """A question that the page proposes."""
    sampling: dict[str, Any] = {}
    """The fields of a request for a chat completion."""


def web_routes(
    models: ModelRegistry, defaults: WebDefaults, *, documents: bool = False
) -> APIRouter:
    """Return the routes of the page, which need no key, and of its initial settings, which need
    one.

    `documents`: whether the server reads documents.
    """
    router = APIRouter(include_in_schema=False)
    for path in page_files():
        router.add_api_route(path, _route(path), response_model=None)

    @router.get("/v1/web/defaults")
    async def begin_with() -> dict[str, Any]:
        first = models.catalog.default or models.catalog.models[0].name
        return {"model": first, "documents": documents, **defaults.model_dump()}

    return router


def _route(path: str) -> Callable[[Request], Awaitable[Response]]:
    async def file(request: Request) -> Response:
        return page_file(path, request.headers.get("if-none-match"))

    return file
