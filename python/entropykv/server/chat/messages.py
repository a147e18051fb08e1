"""Read the messages of a chat and their images, convert them to what a template can show, and make
the prompt of them.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from entropykv.chat.chat_template import TemplateTraits
from entropykv.errors import ImageError
from entropykv.generation.prompt import Prompt, ShownImages, text_prompt, thought_of
from entropykv.server.chat.tool_calls import as_json
from entropykv.server.dialects.fields import FIRST_ERROR, MOST_MESSAGES, MOST_TOOLS, Name
from entropykv.server.engine.answering import Answering
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.session.images import Images

KINDS = ("image_url", "input_image")
"""Types of content parts with an image: in chat completions, and in OpenAI's Responses API."""
_DOCUMENT_KINDS = ("file", "input_file")
"""Types of content parts that name a document: in chat completions, and in the Responses API."""


class ImageParts:
    """Collect the image files of a request, in the order in which the model reads them.

    Messages contain them as data: URLs. URLs of other machines are refused: the server would fetch
    them with its own access to the network, for an unknown time and in an unknown size.
    """

    def __init__(self, images: Images | None) -> None:
        """Start without images. `images`: the model's image reader; None: it has no projector."""
        self._images = images
        self.files: list[bytes] = []

    def take(self, part: dict[str, Any], place: str) -> str:
        """Store the image of a content part, and return its marker for the text.

        Raises RequestError, which names the `place` of the part in the request, for a model without
        projector, for too many images, and for a part without an image file in base64 or with too
        large a one.
        """
        images = self._images
        if images is None:
            raise RequestError(
                400,
                f"{place}: no images are read here; start the server with --mmproj FILE, the "
                "model's projector, or send text",
                param=place,
            )
        if len(self.files) >= images.limits.number:
            raise RequestError(
                400,
                f"{place}: the request has more than {images.limits.number} images (--max-images); "
                "send fewer",
                param=place,
            )
        self.files.append(_file_of(part, place, images.limits.file_bytes))
        return images.marker


def _file_of(part: dict[str, Any], place: str, most: int) -> bytes:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise RequestError(400, f"{place}: it has no image_url", param=place)
    scheme = url[:16].partition(":")[0].lower()
    if scheme != "data":
        raise RequestError(
            400,
            f"{place}: images are not fetched from addresses ({scheme}:); send the file itself as "
            "data:image/png;base64,...",
            param=place,
        )
    head, found, data = url.partition(",")
    if not found or not head.lower().endswith(";base64"):
        raise RequestError(
            400,
            f"{place}: it is not a data:image/png;base64,... URL with a file in base64",
            param=place,
        )
    try:
        # Decode at most three bytes more than allowed, which is enough to refuse the file.
        file = base64.b64decode(data[: (most // 3 + 1) * 4], validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(400, f"{place}: its base64 is damaged", param=place) from None
    if len(file) > most or len(data) > (most // 3 + 1) * 4:
        raise RequestError(
            400,
            f"{place}: the image has more than {most:,} bytes (--max-image-bytes); send a smaller "
            "one",
            param=place,
        )
    return file


_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field with the text of a content part, by the part's type."""
_WITH_DOCUMENTS = ("user", "system", "developer")
"""The roles whose messages can name a document, which stands before all messages."""


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
    """One message; `content` is text, a list of parts (texts, images, documents), or null."""

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
        """Return the text of the message: its parts joined by line ends as in llama-server, without
        those that name a document. Null content is an empty text, or None if an assistant's message
        has calls.

        `images` collects the images of a user, and returns their markers for the text. Raises
        RequestError, which names the message `place`, for parts of any other kind, and the errors
        of ImageParts.take().
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


def is_document_part(part: dict[str, Any]) -> bool:
    """Tell whether a content part of a message names a document."""
    return part.get("type") in _DOCUMENT_KINDS


def document_named(field_value: str | None, contents: Iterable[Any]) -> str | None:
    """Return the name of the document that a request asks about, from its field `document` or from
    a part of a message; None if it names none.

    `contents` are the contents of the request's messages. Raises RequestError (400) for several
    documents, and for a part that contains a file itself.
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


@dataclass(frozen=True)
class ChatParts:
    """Hold the arguments of the chat template for one chat, and its images."""

    messages: list[dict[str, Any]]
    tools: Sequence[Any] | None
    arguments: Mapping[str, Any]
    files: Sequence[bytes] = ()
    """The images, whose markers are in the messages."""
    opens_answer: bool = True
    """Whether the prompt ends with the beginning of an answer."""
    begun: str = ""
    """The beginning of the answer, which the model continues."""

    def text(self, model: LoadedModel, messages: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the text of the prompt for LoadedModel.tokenize(), which finds no control tokens
        in what users, tools and documents say, because their names are marked. `messages` None:
        those of this object.

        Raises RequestError for an answer that cannot be continued, and the errors of the template.
        """
        try:
            text = model.model.chat_text(
                self.messages if messages is None else messages,
                tools=self.tools,
                arguments=self.arguments,
                opens_answer=self.opens_answer,
            )
        except TypeError as error:  # A template joined a text and a missing value.
            raise RequestError(
                400, f"the chat template refuses this: {error}", param="messages"
            ) from None
        tags = model.model.thought_tags
        if self.begun and tags is not None and tags.is_open_after(text):
            raise RequestError(
                400,
                "messages: the last one cannot be continued, because the model thinks first; send "
                'chat_template_kwargs {"enable_thinking": false}',
                param="messages",
            )
        return text + str(model.model.said(self.begun, is_answer=True))


def chat_prompt_of(job: Answering, parts: ChatParts) -> Prompt:
    """Return the prompt of a chat.

    Raises RequestError for images that cannot be read or shown and a text that takes too long to
    tokenise, ContextError for images of too many tokens, and the errors of ChatParts.text().
    """
    model = job.model
    text = parts.text(model)
    model.control_tokens.check(text.encode("utf-8", "replace"))
    is_chat = model.model.chat_template is not None
    shown = None
    if parts.files and model.images is not None:
        if model.images.marker not in text:
            raise RequestError(
                400,
                "messages: the model's chat template does not show the images; start the server "
                "with one that does (--chat-template)",
                param="messages",
            )
        owner = job.caller.tenant(shared_prefixes=model.shared_prefixes)
        shown = ShownImages(model.images, parts.files, model.n_ctx, owner, job.check)
    try:
        return text_prompt(
            model.model,
            text,
            add_bos=False if is_chat else None,
            shown=shown,
            is_answer=is_chat,
            arguments=parts.arguments,
        )
    except ImageError as error:
        raise RequestError(400, str(error), param="messages") from None


def question_prompt(job: Answering, parts: ChatParts) -> Prompt:
    """Return the prompt of a chat about the job's document: the document's tokens, then the chat's.

    The template shows a mark where the document stands, and only the text behind the mark is
    tokenised: a question goes on in the user's turn that the document began. Raises RequestError
    for a document that cannot be loaded, a chat that does not begin with the user and a text that
    takes too long to tokenise, and the errors of ChatParts.text().
    """
    model, document = job.model, job.document_tokens()
    mark = f"[document {secrets.token_hex(16)}]"
    text = parts.text(model, _about_document(parts.messages, mark)).partition(mark)[2]
    tokens = [*document, *model.tokenize(text)]
    thought = thought_of(model.model, text, tokens, parts.arguments)
    return Prompt(tokens, n_document=len(document), thought=thought)


def _about_document(messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return the messages of a chat with the document's mark at their beginning.

    Text of system messages stands behind the document, before the question, because the document
    was read without it. Raises RequestError (400) if the first other message is not the user's.
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
