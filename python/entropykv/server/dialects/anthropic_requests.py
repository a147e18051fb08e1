"""Serve Anthropic's Messages API by converting each request to a chat completion.

What a request asks for and this server does not do is refused by name: tools that Anthropic runs
itself, files that are kept between requests, and blocks of unknown types.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from entropykv.generation.events import Event
from entropykv.server.chat.chat_request import ChatRequest
from entropykv.server.chat.tool_calls import call_arguments
from entropykv.server.dialects.answers import AnswerForm
from entropykv.server.dialects.fields import (
    FIRST_ERROR,
    MOST_MESSAGES,
    MOST_TOKENS,
    MOST_TOOLS,
    OTHERS,
    Description,
    Name,
    OtherFields,
    Stop,
    TemplateArguments,
    TokenCount,
    sampler,
)
from entropykv.server.dialects.requests import DOCUMENT, Request
from entropykv.server.engine.answering import Answering
from entropykv.server.http.errors import RequestError, invalid, invalid_within
from entropykv.thinking.tags import template_switch

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use"}
"""Anthropic's names for reasons why an answer ended; _end() has the names of all other reasons."""

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by their status; anthropic_error() has those of other statuses."""


def anthropic_error(error: dict[str, Any], status: int) -> dict[str, Any]:
    """Return an error in Anthropic's form; `error` is the member of that name in OpenAI's form."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {**error, "type": kind}}


class MessageWriter:
    """Write an answer as a message, whole or as events: its blocks follow each other, and each has
    a number.
    """

    def __init__(self, head: dict[str, Any], form: AnswerForm) -> None:
        """Write the answer that `form` describes; `head`: the fields at the beginning of the
        message.
        """
        self._head, self._form, self._job = head, form, form.job
        self._index = -1
        self._open: str | None = None
        """The type of the block that is being written."""

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Generate the answer to its end; returns it as one message, with its usage."""
        said = self._form.whole(events)
        blocks: list[dict[str, Any]] = []
        if said.thought:
            blocks.append({"type": "thinking", "thinking": said.thought, "signature": ""})
        if said.text:
            blocks.append({"type": "text", "text": said.text})
        blocks += [_call_block(call, call_arguments(call)) for call in said.calls]
        ended = {**self._head, "content": blocks, **_end(said.reason, self._job.stop)}
        return {**ended, "usage": self._usage()}

    def chunks(self, events: Iterator[Event]) -> Iterator[dict[str, Any]]:
        """Generate the answer, and yield its events, the first one once the prompt was read."""
        reason, has_begun = None, False
        for part in self._form.parts(events):
            if not has_begun:
                yield self._start()
                has_begun = True
            reason = part.reason or reason
            yield from self._more("thinking", part.thought)
            yield from self._more("text", part.text)
            for call in part.calls:
                yield from self._call(call)
        yield from self._close()
        end = _end(reason, self._job.stop)
        yield {"type": "message_delta", "delta": end, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _start(self) -> dict[str, Any]:
        message = {**self._head, "content": [], **_end(None), "usage": self._usage()}
        return {"type": "message_start", "message": message}

    def _usage(self) -> dict[str, int]:
        """Return the numbers of tokens so far; tokens of the prompt that were read before count
        separately.
        """
        job = self._job
        return {
            "input_tokens": job.n_prompt - job.n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": job.n_cached,
            "output_tokens": job.n_written,
        }

    def _more(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not text:
            return
        if self._open != kind:
            empty = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            yield from self._begin(kind, empty)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._begin("tool_use", _call_block(call, {}))
        given = json.dumps(call_arguments(call), ensure_ascii=False)
        yield self._delta({"type": "input_json_delta", "partial_json": given})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None


def _end(reason: str | None, stop: str | None = None) -> dict[str, Any]:
    """Return the fields that say why a message ended; reason None: it has not ended. `stop`: the
    text of stop_sequences that has ended it.
    """
    shown = None if reason is None else _REASONS.get(reason, "end_turn")
    if reason == "stop" and stop is not None:
        shown = "stop_sequence"
    return {"stop_reason": shown, "stop_sequence": stop if shown == "stop_sequence" else None}


def _call_block(call: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": call["function"]["name"],
        "input": given,
    }


_OTHERS = OTHERS.besides(
    {
        "container": "no code is run; leave it out",
        "context_management": "messages are shown to the model as they are sent; leave it out",
        "mcp_servers": "tools are run by the client; give them as tools",
    }
)
_BILLING = re.compile(r"\A(x-anthropic-billing-header:[^\n]*?\bcch=)[0-9a-f]+")
"""The beginning of Claude Code's system texts: group 1, and a number that differs every time."""


class Thinking(BaseModel):
    """Hold whether the model thinks before it answers, and for how many tokens."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)


class OutputFormat(BaseModel):
    """Hold the schema that the answer must follow."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputSettings(BaseModel):
    """Hold how much the model thinks, and the form of its answer."""

    model_config = ConfigDict(extra="forbid")

    effort: Name | None = None
    format: OutputFormat | None = None


class OfferedTool(BaseModel):
    """Define a tool that the client runs."""

    model_config = ConfigDict(extra="ignore")

    name: Name
    description: Description | None = None
    input_schema: dict[str, Any]
    type: Name | None = None


class ChosenTool(BaseModel):
    """Hold which tool the model may, or must, call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class AboutClient(BaseModel):
    """Hold who the request is for."""

    user_id: Name | None = None


class SentMessage(BaseModel):
    """Hold one message; `content` is text or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES), FIRST_ERROR]


class CountedMessages(Request):
    """Define the fields of a request that make up its prompt."""

    other_fields: ClassVar[OtherFields] = _OTHERS
    model: Name | None = None
    messages: Annotated[list[SentMessage], FIRST_ERROR] = Field(
        min_length=1, max_length=MOST_MESSAGES
    )
    system: (
        str | Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES), FIRST_ERROR] | None
    ) = None
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = Field(
        default=None, max_length=MOST_TOOLS
    )
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    output_config: OutputSettings = OutputSettings()
    chat_template_kwargs: TemplateArguments | None = Field(
        default=None, description="What the chat template is told besides the messages."
    )

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of a chat completion with the same prompt; raises RequestError for
        blocks and tools that are not possible here, and for a choice of a tool without its name.
        """
        fields: dict[str, Any] = {"model": self.model, "messages": [*self._messages()]}
        if self.tools:
            fields["tools"] = [_tool(tool, i) for i, tool in enumerate(self.tools)]
        fields["tool_choice"] = self._tool_choice()
        if self.tool_choice is not None:
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        fields["reasoning_effort"] = self.output_config.effort
        given = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            given = {**template_switch(thinks=thinks), **given}
            fields["thinking_budget_tokens"] = self.thinking.budget_tokens if thinks else None
        fields["chat_template_kwargs"] = given or None
        if self.output_config.format is not None:
            schema = {"schema": self.output_config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if choice is None:
            return None
        if choice.type != "tool":
            return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
        if choice.name is None:
            raise RequestError(400, "tool_choice.name: the tool is missing", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": _system_text(self.system, "system")}
        for index, message in enumerate(self.messages):
            place = f"messages.{index}"
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
            elif message.role == "system":
                yield {"role": "system", "content": _system_text(message.content, place)}
            elif message.role == "assistant":
                yield _said(message.content, place)
            else:
                yield from _asked(message.content, place)

    def chat(self, **more: Any) -> ChatRequest:
        """Return the equivalent ChatRequest, with `more` as further fields; raises RequestError for
        whatever a chat completion cannot have.
        """
        try:
            return ChatRequest.model_validate({**self.chat_fields(), **more})
        except ValidationError as error:
            raise invalid(error.errors(include_url=False, include_input=False)) from None


class MessagesRequest(CountedMessages):
    """Define a request of /v1/messages."""

    document: Name | None = DOCUMENT
    max_tokens: TokenCount | None = None
    stream: bool = False
    stop_sequences: Stop | None = None
    temperature: float | None = Field(default=None, ge=0, le=1000)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = sampler("top_k")
    metadata: AboutClient | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def user(self) -> str | None:
        """Return the name of the conversation, which is metadata.user_id; None without it."""
        return None if self.metadata is None else self.metadata.user_id

    def document_name(self) -> str | None:
        """Return the name of the document that the request names; None without one."""
        return self.document

    def call(self, job: Answering) -> Any:
        """Generate, and return a message or an iterator of events; raises the errors of chat() and
        ChatRequest.call().
        """
        chat = self.chat(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            stream=self.stream,
        )
        head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.model or job.model.name,
        }
        return chat.call(job, partial(MessageWriter, head))


def _system_text(given: str | list[dict[str, Any]], place: str) -> str:
    """Return a system prompt as text; 0 replaces Claude Code's number, so that prefixes match."""
    texts = [given] if isinstance(given, str) else [_text(b, place) for b in given]
    return "\n\n".join(_BILLING.sub(r"\g<1>0", text) for text in texts)


def _said(blocks: list[dict[str, Any]], place: str) -> dict[str, Any]:
    """Return the blocks of an assistant's message as a message of a chat completion; raises
    RequestError for a block that is no text, thought or call of a tool.
    """
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        where = f"{place}.content.{index}"
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_text(block, where, field="thinking"))
        elif kind == "tool_use":
            name, given = block.get("name"), block.get("input", {})
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            texts.append(_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _asked(blocks: list[dict[str, Any]], place: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of a user's turn: results of tools, then what the user says.

    Images in results are shown with what the user says, because templates show them nowhere else.
    """
    parts = []
    for index, block in enumerate(blocks):
        where = f"{place}.content.{index}"
        if block.get("type") != "tool_result":
            parts.append(_part(block, where))
            continue
        content = block.get("content") or ""
        shown = [content] if isinstance(content, str) else []
        for number, each in enumerate(content if isinstance(content, list) else ()):
            part = _part(each if isinstance(each, dict) else {}, f"{where}.content.{number}")
            if part["type"] == "text":
                shown.append(part["text"])
            else:
                parts.append(part)
        text = "\n".join(shown)
        failed = "Error: " if block.get("is_error") else ""
        yield {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": failed + text,
        }
    if parts:
        yield {"role": "user", "content": parts}


def _part(block: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a part of a user's message; raises RequestError for what cannot be shown."""
    if block.get("type") != "image":
        return {"type": "text", "text": _text(block, place)}
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "base64":
        kind, data = source.get("media_type", "image/png"), source.get("data", "")
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    if source.get("type") == "url":  # ChatRequest refuses all but data: URLs.
        return {"type": "image_url", "image_url": {"url": source.get("url")}}
    raise RequestError(
        400,
        f"{place}.source: images of type {source.get('type')!r} are not read here; send base64",
        param=place,
    )


def _text(block: dict[str, Any], place: str, *, field: str = "text") -> str:
    """Return the text of a block whose type is `field`, or of a document that is plain text; raises
    RequestError for any other block, and without a text.
    """
    kind, source = block.get("type"), block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        title = f"{block['title']}\n" if isinstance(block.get("title"), str) else ""
        return title + _text({"type": "text", "text": source.get("data")}, f"{place}.source")
    if kind != field:
        raise RequestError(
            400,
            f"{place}: blocks of type {kind!r} are not possible here; send text, images, tool_use, "
            "tool_result, or a document that is plain text",
            param=place,
        )
    text = block.get(field)
    if not isinstance(text, str):
        raise RequestError(400, f"{place}.{field}: it must be a string", param=f"{place}.{field}")
    return text


def _tool(given: dict[str, Any], index: int) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise RequestError(
            400,
            f"tools.{index}: tools of type {kind!r} are not run here; give tools with a name and "
            "an input_schema, which the client runs",
            param="tools",
        )
    try:
        tool = OfferedTool.model_validate(given)
    except ValidationError as error:
        raise invalid_within(f"tools.{index}", error) from None
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}
