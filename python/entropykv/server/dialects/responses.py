"""Serve OpenAI's Responses API by converting each request to a chat completion.

Nothing is stored: each request has the whole conversation. Features that need a store, or a tool of
OpenAI's, are refused by name.
"""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from entropykv.server.chat.chat_request import (
    ChatRequest,
    JsonSchema,
    ObjectFormat,
    Reasoning,
    SchemaFormat,
    TextFormat,
)
from entropykv.server.chat.tool_calls import Function, NamedFunction, NamedTool, Tool
from entropykv.server.dialects.fields import (
    FIRST_ERROR,
    MOST_MESSAGES,
    MOST_TOOLS,
    Metadata,
    Name,
    Seed,
    TokenCount,
)
from entropykv.server.dialects.requests import DOCUMENT, Request
from entropykv.server.dialects.response_events import ResponseWriter
from entropykv.server.dialects.unknown_fields import OTHERS, OtherFields
from entropykv.server.documents.asked_document import document_named
from entropykv.server.engine.answering import Answering
from entropykv.server.http.errors import RequestError, invalid_within
from entropykv.server.models.loaded_model import LoadedModel

_NOTHING_KEPT = "nothing is kept between requests; send the whole conversation as input"
_OTHERS = OTHERS.besides(
    {
        **dict.fromkeys(("previous_response_id", "conversation", "background"), _NOTHING_KEPT),
        "prompt": "no prompts are kept; send the whole conversation as input",
        "return_progress": "chats tell how much of the prompt was read",
    }
)


class NamedSchema(JsonSchema):
    """A schema that the answer must follow, as the Responses API has it."""

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
    """A request for a response."""

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
        """Return the document that the request names, also in an item; raises RequestError."""
        items = self.input if isinstance(self.input, list) else ()
        return document_named(self.document, (item.get("content") for item in items))

    def call(self, job: Answering) -> Any:
        """Generate, and return a response or an iterator of events; raises RequestError."""
        return self.chat().call(job, partial(ResponseWriter, self._head(job.model)))

    def chat(self) -> ChatRequest:
        """Return the same request as a chat completion."""
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
    """Return the input's items as messages of a chat; calls of one turn are one message."""
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
        elif kind != "reasoning":  # As in OpenAI's API, thoughts are not shown to the model again.
            raise RequestError(
                400, f"input.{index}: items of type {kind!r} are not possible here", param="input"
            )
    return messages
