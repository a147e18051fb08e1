"""Find the document that a request asks about, and put it before its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import Scope

from entropykv.errors import EntropyKVError, PoolError
from entropykv.server.http.errors import RequestError

_SCOPE = "entropykv.document"
_KINDS = ("file", "input_file")
"""Types of content parts that name a document: in chat completions, and in responses."""


@dataclass(frozen=True)
class AskedDocument:
    """Hold the name and the file of a document that a request asks about."""

    name: str
    path: Path

    def refusal(self, error: EntropyKVError) -> RequestError:
        """Return the error for a document that cannot be loaded, without its path."""
        said = str(error).replace(str(self.path), f"the document {self.name!r}")
        if isinstance(error, PoolError):
            return RequestError(503, said)
        return RequestError(409, said, param="document", code="document_unusable")


def note_document(scope: Scope, document: AskedDocument) -> None:
    """Record the document of a request, for the jobs that answer it."""
    scope[_SCOPE] = document


def document_of(scope: Scope) -> AskedDocument | None:
    """Return the document that a request asks about."""
    found: AskedDocument | None = scope.get(_SCOPE)
    return found


def is_document_part(part: dict[str, Any]) -> bool:
    """Tell whether a content part of a message names a document."""
    return part.get("type") in _KINDS


def document_named(field_value: str | None, contents: Iterable[Any]) -> str | None:
    """Return the document that a request names, in its field `document` or in a part of a message.

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
