"""Read the messages of a chat, and convert them to what a template can show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from entropykv.chat.template_traits import TemplateTraits
from entropykv.server.chat.image_parts import KINDS, ImageParts
from entropykv.server.chat.tool_calls import as_json
from entropykv.server.dialects.fields import FIRST_ERROR, MOST_MESSAGES, MOST_TOOLS, Name
from entropykv.server.documents.asked_document import is_document_part
from entropykv.server.http.errors import RequestError

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field with the text of a content part, by the part's type."""
_WITH_DOCUMENTS = ("user", "system", "developer")
"""The roles whose messages can name a document, which stands before all of them."""


class CalledFunction(BaseModel):
    """A function that the model called before."""

    name: Name
    arguments: str | dict[str, Any] = ""


class ToolCall(BaseModel):
    """A call of a tool that the model made before."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message; `content` is text, a list of text parts, or null."""

    # Templates may show fields that only some clients add.
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: (
        str
        | Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES, fail_fast=True)]
        | None
    ) = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_ERROR] | None = Field(
        default=None, min_length=1, max_length=MOST_TOOLS
    )
    tool_call_id: Name | None = None
    function_call: CalledFunction | None = None

    def text(self, place: str, images: ImageParts) -> str | None:
        """Return the text, with parts joined by line ends as in llama-server; content that is null
        is empty, and stays null beside calls.

        `images` collects the images of a user, and returns their markers for the text. `place`
        names the message in a RequestError, for parts of another kind.
        """
        if self.content is None:
            return None if self.role == "assistant" and self.calls() else ""
        if isinstance(self.content, str):
            return self.content
        parts = [(part, f"{place}.content.{i}") for i, part in enumerate(self.content)]
        return "\n".join(
            images.take(part, where)
            if self.role == "user" and part.get("type") in KINDS
            else _text_of(part, where)
            for part, where in parts
            if not (self.role in _WITH_DOCUMENTS and is_document_part(part))
        )

    def calls(self) -> list[ToolCall]:
        """Return the calls, including those of the older `function_call`."""
        if self.tool_calls:
            return self.tool_calls
        return [ToolCall(function=self.function_call)] if self.function_call else []


def _text_of(part: dict[str, Any], place: str) -> str:
    kind = part.get("type")
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise RequestError(
            400,
            f"{place}: parts of type {kind!r} are not possible inside a KV budget; send text "
            "(type 'text'), or images (type 'image_url') of the user",
            param=place,
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise RequestError(400, f"{place}.{field}: it must be a string", param=f"{place}.{field}")
    return text


def template_messages(
    messages: Sequence[Message],
    traits: TemplateTraits,
    instructions: str | None,
    images: ImageParts,
) -> list[dict[str, Any]]:
    """Return the messages for the chat template; raises RequestError for content that cannot be
    shown.

    `instructions` are put at the beginning, into the system message; `images` collects the images.
    The role developer is the newer name of system. For a template without tools, calls and results
    are shown as text.
    """
    shown = []
    for index, message in enumerate(messages):
        text = message.text(f"messages.{index}", images)
        show = _with_tools if traits.shows_calls else _as_text
        shown.append(show(message, text, traits))
    if instructions is not None:
        shown = _with_instructions(shown, instructions)
    return shown


def _with_tools(message: Message, text: str | None, traits: TemplateTraits) -> dict[str, Any]:
    """Return a message for a template that shows tool calls and results itself."""
    entry = message.model_dump(exclude_none=True, exclude={"function_call", "content"})
    entry["role"] = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    entry["content"] = "" if text is None and not traits.null_content else text
    calls = [call.model_dump(exclude_none=True) for call in message.calls()]
    if traits.thinking_field and calls and entry.get("reasoning_content"):
        entry["thinking"], entry["content"] = entry.pop("reasoning_content"), ""
    for call in calls:
        call["function"]["arguments"] = _arguments(
            call["function"]["arguments"], as_object=traits.object_arguments
        )
    return {**entry, "tool_calls": calls} if calls else entry


def _as_text(message: Message, text: str | None, _: TemplateTraits) -> dict[str, Any]:
    """Return a message with only the roles and the text that every template shows."""
    if message.role in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    role = "system" if message.role == "developer" else message.role
    calls = [
        {
            "name": call.function.name,
            "arguments": _arguments(call.function.arguments, as_object=True),
        }
        for call in message.calls()
    ]
    lines = [f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in calls]
    return {"role": role, "content": "\n".join([*([text] if text else []), *lines])}


def _arguments(arguments: str | dict[str, Any], *, as_object: bool) -> Any:
    """Return the arguments of a call as JSON text or as an object; text that is not JSON is
    unchanged.
    """
    if not as_object:
        return arguments if isinstance(arguments, str) else as_json(arguments)
    if isinstance(arguments, str):
        try:
            return json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            return arguments
    return arguments


def _with_instructions(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
