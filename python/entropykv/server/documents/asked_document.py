"""Find the document that a request asks about, wait until it was read, and put it before the
text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.readings import DocumentId, not_there
from entropykv.server.engine.answering import AskedDocument
from entropykv.server.engine.engine import Engine
from entropykv.server.http.errors import RequestError
from entropykv.server.http.users import user_of
from entropykv.server.models.registry import ModelRegistry, until_answered

_KINDS = ("file", "input_file")
"""Types of content parts that name a document: in chat completions, and in responses."""


async def asked_document(
    request: Request, models: ModelRegistry, engine: Engine, name: str | None
) -> AskedDocument | None:
    """Return the document that a request names, which stays until the answer was sent; None if it
    names none.

    The request waits while the document is being read, as long as its client is connected. Raises
    RequestError.
    """
    if name is None:
        return None
    reader = engine.documents
    if reader is None:
        raise no_documents()
    kept, document = reader.library, reader.id_of(user_of(request.scope), name)
    path = until_answered(request).enter_context(kept.in_use(document))
    if not await run_in_threadpool(kept.hold, document):
        if await run_in_threadpool(kept.status, document) is None:
            raise await run_in_threadpool(_of_another_model, models, kept, document)
        with engine.admission.jobs_of(1):  # Whoever waits counts as a job.
            await engine.admission.in_time(request, reader.until_ready(document))
        if not await run_in_threadpool(kept.hold, document):
            raise not_there(name)
    return AskedDocument(name, path)


def no_documents() -> RequestError:
    """Return the error for requests for documents at a server that keeps none."""
    return RequestError(501, "documents are not kept by this server; start it with --documents DIR")


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


def is_document_part(part: dict[str, Any]) -> bool:
    """Tell whether a content part of a message names a document."""
    return part.get("type") in _KINDS


def document_named(field_value: str | None, contents: Iterable[Any]) -> str | None:
    """Return the name of the document that a request asks about, from its field `document` or from
    a part of a message; None if it names none.

    `contents` are the contents of its messages. Raises RequestError (400) for several documents,
    and for a part that contains a file itself.
    """
    names = [] if field_value is None else [field_value]
    for content in contents:
        parts = content if isinstance(content, list) else ()
        files = (part for part in parts if isinstance(part, dict) and is_document_part(part))
        names.extend(_name_in(part) for part in files)
    if len(set(names)) > 1:
        raise RequestError(
            400,
            f"document: a request asks about one document, and this one names {len(set(names))}; "
            "read their texts as one document, or send the shorter text in the message",
            param="document",
        )
    return names[0] if names else None


def _name_in(part: dict[str, Any]) -> str:
    given = part.get("file", part)
    name = given.get("file_id") if isinstance(given, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            400,
            "a part of type file needs the file_id of a document; send files to POST "
            "/v1/documents first",
            param="messages",
        )
    return name


def about_document(messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return the messages of a chat with the document's mark at their beginning.

    A system message would stand before the document, which was read without it: it is shown behind
    the document, before the question. Raises RequestError (400) if the first other message is not
    the user's.
    """
    system = [str(each["content"]) for each in messages if each["role"] == "system"]
    others = [each for each in messages if each["role"] != "system"]
    if not others or others[0]["role"] != "user":
        raise RequestError(
            400,
            "messages: a chat about a document begins with a message of the user",
            param="messages",
        )
    text = "\n\n".join([*system, str(others[0]["content"] or "").strip()])
    return [{**others[0], "content": mark + text}, *others[1:]]
