"""Serve OpenAI's Responses API by converting each request to a chat completion.

Nothing is stored: each request has the whole conversation. Features that need a store, or a tool of
OpenAI's, are refused by name.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from entropykv.generation.events import Event
from entropykv.server.chat.chat_request import (
    ChatRequest,
    JsonSchema,
    ObjectFormat,
    Reasoning,
    SchemaFormat,
    TextFormat,
)
from entropykv.server.chat.messages import document_named
from entropykv.server.chat.tool_calls import Function, NamedFunction, NamedTool, Tool
from entropykv.server.dialects.answers import AnswerForm, timings_of, usage_of
from entropykv.server.dialects.fields import (
    FIRST_ERROR,
    MOST_MESSAGES,
    MOST_TOOLS,
    OTHERS,
    Metadata,
    Name,
    OtherFields,
    Seed,
    TokenCount,
)
from entropykv.server.dialects.requests import DOCUMENT, Request
from entropykv.server.engine.answering import Answering
from entropykv.server.http.errors import RequestError, invalid_within
from entropykv.server.models.loaded_model import LoadedModel


def message_item(item_id: str, text: str | None) -> dict[str, Any]:
    """Return a message item; without text, one that has just begun."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "in_progress" if text is None else "completed",
        "content": [] if text is None else [_text_part(text)],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought_item(item_id: str, text: str | None) -> dict[str, Any]:
    """Return a reasoning item; without text, one that has just begun."""
    return {
        "id": item_id,
        "type": "reasoning",
        "status": "in_progress" if text is None else "completed",
        "summary": [],
        "content": [] if text is None else [_thought_part(text)],
        "encrypted_content": None,
    }


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def call_item(call: dict[str, Any]) -> dict[str, Any]:
    """Return a function call item, from a call of a chat completion."""
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def with_end(
    head: dict[str, Any], output: list[dict[str, Any]], reason: str | None, usage: dict[str, Any]
) -> dict[str, Any]:
    """Return a response with its output, and the reason why it ended, in the words of chat
    completions; `usage`: see usage_of().
    """
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    whole = reason != "length"
    return {
        **head,
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": details,
            "total_tokens": usage["total_tokens"],
        },
    }


class ResponseWriter:
    """Write an answer as a response, whole or as numbered events: first those of its texts while
    they are written, then its calls.
    """

    def __init__(self, head: dict[str, Any], form: AnswerForm) -> None:
        """Write the answer that `form` describes; `head`: the fields of a response that has just
        begun.
        """
        self._head, self._form = head, form
        self._output: list[dict[str, Any]] = []
        """The completed items."""
        self._open: _TextItem | None = None

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Generate the answer to its end; returns it as one response, with usage and timings."""
        said, job = self._form.whole(events), self._form.job
        texts = ((thought_item, "rs", said.thought), (message_item, "msg", said.text))
        output = [make(f"{name}_{uuid.uuid4().hex}", text) for make, name, text in texts if text]
        output += [call_item(call) for call in said.calls]
        ended = with_end(self._head, output, said.reason, usage_of(job))
        return {**ended, "timings": timings_of(job)}

    def chunks(self, events: Iterator[Event]) -> Iterator[dict[str, Any]]:
        """Generate the answer, and yield its events; the last one has the whole response."""
        for number, event in enumerate(self._events(events)):
            yield {**event, "sequence_number": number}

    def _events(self, events: Iterator[Event]) -> Iterator[dict[str, Any]]:
        yield {"type": "response.created", "response": self._head}
        yield {"type": "response.in_progress", "response": self._head}
        calls, reason, job = list[dict[str, Any]](), "stop", self._form.job
        for part in self._form.parts(events):
            calls += part.calls
            reason = part.reason or reason
            for is_thought, text in ((True, part.thought), (False, part.text)):
                for event in self._more(text, is_thought=is_thought):
                    yield {**event, "timings": timings_of(job)} if self._form.timed else event
        yield from self._end_of_text()
        for call in calls:
            self._output.append(call_item(call))
            yield from _call_events(self._output[-1], len(self._output) - 1)
        ended = with_end(self._head, self._output, reason, usage_of(job))
        yield {
            "type": f"response.{ended['status']}",
            "response": ended,
            "timings": timings_of(job),
        }

    def _more(self, text: str, *, is_thought: bool) -> Iterator[dict[str, Any]]:
        if not text:
            return
        if self._open is None or not self._open.continues(is_thought=is_thought):
            yield from self._end_of_text()
            self._open = _TextItem(len(self._output), is_thought=is_thought)
            yield from self._open.begin()
        yield self._open.more(text)

    def _end_of_text(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            yield from self._open.end()
            self._output.append(self._open.item)
        self._open = None


class _TextItem:
    """Make the events of one item whose text is streamed: a message, or a thought."""

    def __init__(self, index: int, *, is_thought: bool) -> None:
        """Start the item with this index in the output."""
        self._index, self._is_thought = index, is_thought
        self._kind = f"response.{'reasoning' if is_thought else 'output'}_text"
        self._extra: dict[str, Any] = {} if is_thought else {"logprobs": []}
        self._make, prefix = (thought_item, "rs") if is_thought else (message_item, "msg")
        self._id = f"{prefix}_{uuid.uuid4().hex}"
        self._text = ""

    @property
    def item(self) -> dict[str, Any]:
        """Return the item in its current state."""
        return self._make(self._id, self._text)

    def continues(self, *, is_thought: bool) -> bool:
        """Tell whether the next text, a thought or not, belongs to this item."""
        return self._is_thought == is_thought

    def begin(self) -> Iterator[dict[str, Any]]:
        item = self._make(self._id, None)
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}
        yield {"type": "response.content_part.added", **self._place(), "part": self._part()}

    def more(self, text: str) -> dict[str, Any]:
        self._text += text
        return {"type": f"{self._kind}.delta", **self._place(), "delta": text, **self._extra}

    def end(self) -> Iterator[dict[str, Any]]:
        text = self._text
        yield {"type": f"{self._kind}.done", **self._place(), "text": text, **self._extra}
        yield {"type": "response.content_part.done", **self._place(), "part": self._part()}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.item}

    def _part(self) -> dict[str, Any]:
        """Return the only part of the item."""
        return _thought_part(self._text) if self._is_thought else _text_part(self._text)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}


def _call_events(item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    begun = {**item, "arguments": "", "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    place = {"item_id": item["id"], "output_index": index}
    arguments = item["arguments"]
    kind = "response.function_call_arguments"
    yield {"type": f"{kind}.delta", **place, "delta": arguments}
    yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


_NOTHING_KEPT = "nothing is kept between requests; send the whole conversation as input"
_OTHERS = OTHERS.besides(
    {
        **dict.fromkeys(("previous_response_id", "conversation", "background"), _NOTHING_KEPT),
        "prompt": "no prompts are kept; send the whole conversation as input",
        "return_progress": "chats tell how much of the prompt was read",
    }
)


class NamedSchema(JsonSchema):
    """A schema that the answer must follow, in the form of the Responses API."""

    type: Literal["json_schema"]


class TextSettings(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(extra="ignore")

    format: TextFormat | ObjectFormat | NamedSchema | None = Field(
        default=None, discriminator="type"
    )


class NamedChoice(BaseModel):
    """The one function that the model must call."""

    type: Literal["function"]
    name: Name


class ResponsesRequest(Request):
    """A request of /v1/responses."""

    other_fields: ClassVar[OtherFields] = _OTHERS
    model: Name | None = None
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES), FIRST_ERROR] = (
        Field(min_length=1)
    )
    document: Name | None = DOCUMENT
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: float | None = None
    top_p: float | None = Field(default=None, ge=0.0, le=1.0)
    seed: Seed | None = None
    stream: bool = False
    reasoning: Reasoning = Reasoning()
    text: TextSettings = TextSettings()
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = Field(
        default=None, max_length=MOST_TOOLS
    )
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool = True
    metadata: Metadata | None = None
    store: bool = False
    user: Name | None = None
    timings_per_token: bool = Field(
        default=False, description="Whether every piece of text in a stream has the times so far."
    )

    def document_name(self) -> str | None:
        """Return the name of the document that the request names in its field `document` or in an
        item; None without one. Raises RequestError for several documents, and for a file in an
        item.
        """
        items = self.input if isinstance(self.input, list) else ()
        return document_named(self.document, (item.get("content") for item in items))

    def call(self, job: Answering) -> Any:
        """Generate, and return a response or an iterator of events; raises the errors of chat() and
        ChatRequest.call().
        """
        return self.chat().call(job, partial(ResponseWriter, self._head(job.model)))

    def chat(self) -> ChatRequest:
        """Return the same request as a chat completion; raises RequestError for items and tools
        that are not possible here.
        """
        entries = [{"role": "system", "content": self.instructions}] if self.instructions else []
        entries += _messages(self.input)
        fields: dict[str, Any] = {
            "messages": entries,
            "model": self.model,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "reasoning_effort": self.reasoning.effort,
            "stream": self.stream,
            "timings_per_token": self.timings_per_token,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        try:
            request = ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise invalid_within("input", error) from None
        request.tools = [_tool(tool, i) for i, tool in enumerate(self.tools or [])] or None
        if isinstance(self.tool_choice, NamedChoice):
            request.tool_choice = NamedTool(function=NamedFunction(name=self.tool_choice.name))
        else:
            request.tool_choice = self.tool_choice
        asked = self.text.format
        if isinstance(asked, NamedSchema):
            request.response_format = SchemaFormat(type="json_schema", json_schema=asked)
        else:
            request.response_format = asked
        return request

    def _head(self, model: LoadedModel) -> dict[str, Any]:
        """Return the fields of a response that are known before it is written."""
        choice = self.model_dump()["tool_choice"]
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "model": self.model or model.name,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": self.text.model_dump(by_alias=True, exclude_none=True)
            or {"format": {"type": "text"}},
            "tool_choice": choice or "auto",
            "tools": self.tools or [],
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _tool(tool: dict[str, Any], index: int) -> Tool:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise RequestError(
            400,
            f"tools.{index}: tools of type {tool.get('type')!r} are not possible here; give "
            "functions with a name",
            param="tools",
        )
    try:
        return Tool(function=Function.model_validate(tool))
    except ValidationError as error:
        raise invalid_within(f"tools.{index}", error) from None


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the input's items as messages of a chat; calls of one turn are one message. Raises
    RequestError for an item of another type.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            answer = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append({"role": "tool", **answer})
        # Thoughts are accepted, and not shown to the model again. (OpenAI shows it those around
        # function calls again.)
        elif kind != "reasoning":
            raise RequestError(
                400, f"input.{index}: items of type {kind!r} are not possible here", param="input"
            )
    return messages
