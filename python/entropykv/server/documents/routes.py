"""Define the routes of documents."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from entropykv.server.dialects.fields import MOST_NAME, Name
from entropykv.server.documents.asked_document import no_documents
from entropykv.server.documents.form import (
    MULTIPART,
    document_name,
    fields_of,
    is_form,
    text_of,
)
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.readings import (
    MOST_DOCUMENT_NAME,
    DocumentId,
    Reading,
    not_there,
)
from entropykv.server.http.bodies import read_body
from entropykv.server.http.errors import RequestError
from entropykv.server.http.users import user_of
from entropykv.server.models.registry import ModelRegistry
from entropykv.session.document import MOST_TEXT_BYTES

_CHECK_INTERVAL = 0.02
"""Seconds between two checks whether the files of a deleted document are gone."""
_READ_BEFORE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The text has been read before, under this name.",
        "content": {"application/json": {}},
    }
}


class NewDocument(BaseModel):
    """A text, and the name by which requests will ask it."""

    name: str = Field(max_length=MOST_DOCUMENT_NAME, description="A name without a folder.")
    text: str = Field(description=f"Up to {MOST_TEXT_BYTES:,} bytes of UTF-8.")
    model: Name | None = None
    filename: Name | None = Field(default=None, description="The file that the text came from.")


def document_routes(models: ModelRegistry, library: DocumentLibrary | None) -> APIRouter:
    """Return the routes; without a library they answer 501."""
    router = APIRouter(prefix="/v1/documents", tags=["Documents"])

    @router.post("", status_code=202, responses=_READ_BEFORE, openapi_extra=_BODY)
    async def create(request: Request) -> JSONResponse:
        kept = _kept(library)
        body, kind = await request.body(), request.headers.get("content-type", "")
        given = await run_in_threadpool(_new_document, body, kind)
        engine = await models.use(request, given.model)
        document = DocumentId(engine.model.name, user_of(request.scope), given.name)
        kept.path(document)  # Check the name.
        reading = Reading(document, given.text, [given.filename or given.name])
        loop, release = asyncio.get_running_loop(), models.keep(engine)

        def ended() -> None:
            with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile.
                loop.call_soon_threadsafe(release)

        reading.ended.append(ended)
        begins = False
        try:
            begins = await run_in_threadpool(kept.begin, reading)
        finally:
            if not begins:
                release()
        return JSONResponse(await run_in_threadpool(kept.status, document), 202 if begins else 200)

    @router.get("")
    def documents(request: Request) -> dict[str, Any]:
        kept, user = _kept(library), user_of(request.scope)
        found = (
            kept.status(DocumentId(held.name, user, name))
            for held in models.all()
            for name in kept.names(held.name, user)
        )
        return {"object": "list", "data": [each for each in found if each is not None]}

    @router.get("/{name}")
    def document(request: Request, name: str, model: Name | None = None) -> dict[str, Any]:
        kept = _kept(library)
        return _statuses(models, kept, user_of(request.scope), name, model)[0]

    _add_deleting(router, models, library)
    return router


def _add_deleting(
    router: APIRouter, models: ModelRegistry, library: DocumentLibrary | None
) -> None:
    @router.delete("/{name}")
    async def delete(request: Request, name: str, model: Name | None = None) -> dict[str, Any]:
        kept, user = _kept(library), user_of(request.scope)
        found = await run_in_threadpool(_statuses, models, kept, user, name, model)
        if len(found) > 1:
            raise RequestError(
                400,
                f"several models have a document {name!r}; name one of them as ?model=",
                param="model",
            )
        document = DocumentId(found[0]["model"], user, name)
        removal = await run_in_threadpool(kept.remove, document)
        while not removal.ended.is_set():
            await asyncio.sleep(_CHECK_INTERVAL)
        if removal.refusal is not None:
            raise removal.refusal
        for _, engine in models.loaded():
            await run_in_threadpool(engine.prefix_cache.forget_document, kept.path(document))
        return {"id": name, "object": "document", "deleted": True}


def _statuses(
    models: ModelRegistry, library: DocumentLibrary, user: str, name: str, model: str | None
) -> list[dict[str, Any]]:
    """Return what clients are told of a document, for each model that has one of this name."""
    several = models.all() if model is None else [models.find(model)]
    told = (library.status(DocumentId(held.name, user, name)) for held in several)
    found = [each for each in told if each is not None]
    if not found:
        raise not_there(name)
    return found


def _kept(library: DocumentLibrary | None) -> DocumentLibrary:
    if library is None:
        raise no_documents()
    return library


_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": NewDocument.model_json_schema()},
            MULTIPART: {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "name": {"type": "string"},
                        "model": {"type": "string"},
                    },
                }
            },
        },
    }
}


def _new_document(body: bytes, kind: str) -> NewDocument:
    """Return the document in a body of JSON, or of a form; raises RequestError."""
    if is_form(kind):
        given = _of_form(body, kind)
    else:
        given = cast(NewDocument, read_body(NewDocument, body))
    n_bytes = len(given.text.encode("utf-8", "replace"))
    if n_bytes > MOST_TEXT_BYTES:
        raise RequestError(
            413,
            f"text: it has {n_bytes:,} bytes, and a document can have {MOST_TEXT_BYTES:,}; split "
            "it",
            param="text",
        )
    if not given.text.strip():
        raise RequestError(400, "text: the document is empty", param="text")
    return given


def _of_form(body: bytes, kind: str) -> NewDocument:
    fields = fields_of(body, kind)
    if "file" not in fields:
        raise RequestError(400, "file: the form needs a file of this name", param="file")
    model = text_of(fields["model"], "model") if "model" in fields else None
    return NewDocument.model_construct(
        name=document_name(fields)[: MOST_DOCUMENT_NAME + 1],
        text=text_of(fields["file"], "file"),
        model=model or None,
        filename=fields["file"].filename[:MOST_NAME] or None,
    )
