"""Define the routes of documents, and read the forms in which files are sent."""

from __future__ import annotations

import asyncio
import contextlib
import email.parser
import email.policy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import PurePath
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from entropykv.files import NOT_UTF8
from entropykv.server.dialects.fields import MOST_NAME, Name
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.readings import (
    MOST_DOCUMENT_NAME,
    DocumentId,
    Reading,
    no_documents,
    not_there,
)
from entropykv.server.http.access import user_of
from entropykv.server.http.bodies import read_body
from entropykv.server.http.errors import RequestError
from entropykv.server.models.registry import ModelRegistry
from entropykv.session.document import MOST_TEXT_BYTES

MULTIPART = "multipart/form-data"
_MOST_PARTS = 16
"""The most parts of a form."""
_MOST_HEAD_BYTES = 8 << 10
"""The most bytes of a part's headers."""
_MOST_BOUNDARY = 70
"""The longest boundary: what RFC 2046 allows."""
_IDENTITIES = ("", "7bit", "8bit", "binary")
"""The encodings of a part that change nothing."""


@dataclass(frozen=True)
class FormField:
    """Hold one field of a form."""

    data: bytes
    filename: str = ""
    """The name of the file without its folder; empty if the field is not a file."""


def is_form(kind: str) -> bool:
    """Tell whether a request with this content type has a form."""
    return kind.partition(";")[0].strip().lower() == MULTIPART


def fields_of(body: bytes, kind: str) -> dict[str, FormField]:
    """Return the fields of a form by their names; `kind` is the request's content type.

    The body is searched once. Python's own parser of messages goes line by line: a body of 16 MiB
    that consists of line breaks would take it eight seconds.

    Of parts with the same name, the last one is returned. Raises RequestError (400) for a body that
    cannot be read as a form, or has more than 16 parts.
    """
    fields = {}
    for start, end in _parts(body, _boundary(kind)):
        name, field = _field(body, start, end)
        fields[name] = field
    return fields


def document_name(fields: Mapping[str, FormField]) -> str:
    """Return the name of the document that a form sends: the field `name`, or its file's name
    without the ending; empty without both. Raises RequestError (400) for a field that is not UTF-8.
    """
    if "name" in fields:
        return text_of(fields["name"], "name")
    return PurePath(fields["file"].filename).stem if "file" in fields else ""


def text_of(field: FormField, name: str) -> str:
    """Return the text of a field; raises RequestError (400) if its bytes are not UTF-8."""
    try:
        return field.data.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(400, f"{name}: it is {NOT_UTF8}", param=name) from None


def _boundary(kind: str) -> bytes:
    boundary = _headers(f"content-type: {kind}").get_boundary() or ""
    if not 0 < len(boundary) <= _MOST_BOUNDARY or not boundary.isascii():
        raise RequestError(400, "the form's content type has no boundary; let your client set it")
    return boundary.encode()


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the parts begin and end."""
    line = re.compile(rb"(?:\A|\r\n)--" + re.escape(boundary) + rb"(--)?[ \t]*(?=\r\n|\Z)")
    start = None
    for number, found in enumerate(line.finditer(body)):
        if number > _MOST_PARTS:
            raise RequestError(400, f"the form has more than {_MOST_PARTS} parts")
        if start is not None:
            yield start, found.start()
        start = found.end()
        if found[1]:
            return
    raise RequestError(400, "the form ends before its last boundary; send a file and its name")


def _field(body: bytes, start: int, end: int) -> tuple[str, FormField]:
    """Return the name of the part between two offsets, and the part."""
    blank = body.find(b"\r\n\r\n", start, min(end, start + _MOST_HEAD_BYTES))
    if blank < 0:
        raise RequestError(
            400, f"a part of the form has no headers, or more than {_MOST_HEAD_BYTES:,} bytes"
        )
    headers = _headers(body[start + 2 : blank].decode("utf-8", "replace"))
    encoding = str(headers.get("content-transfer-encoding", "")).strip().lower()
    if encoding not in _IDENTITIES:
        raise RequestError(
            400, "the form has a part with a content-transfer-encoding; send its bytes as they are"
        )
    disposition = headers.get("content-disposition")
    parameters: Mapping[str, str] = getattr(disposition, "params", {})
    filename = PurePath(parameters.get("filename", "").replace("\\", "/")).name
    return parameters.get("name", ""), FormField(body[blank + 4 : end], filename)


def _headers(text: str) -> EmailMessage:
    parser = email.parser.HeaderParser(_class=EmailMessage, policy=email.policy.HTTP)
    return parser.parsestr(text, headersonly=True)


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
    """Return the routes of documents; without a library they answer 501."""
    router = APIRouter(prefix="/v1/documents", tags=["Documents"])

    @router.post("", status_code=202, responses=_READ_BEFORE, openapi_extra=_BODY)
    async def create(request: Request) -> JSONResponse:
        kept = _kept(library)
        body, kind = await request.body(), request.headers.get("content-type", "")
        given = await run_in_threadpool(_new_document, body, kind)
        engine = await models.use(request, given.model)
        document = DocumentId(engine.model.name, user_of(request.scope), given.name)
        kept.path(document)  # Refuse an impossible name.
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
    """Return the status of a document for clients, for each model that has one of this name; raises
    RequestError (404) if none has.
    """
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
    """Return the document in a body of JSON, or of a form; raises RequestError for a body that
    cannot be read, and for a text that is empty or too long.
    """
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
