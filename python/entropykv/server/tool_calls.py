"""Handle tools: the model's instructions, the grammar of its answer, and reading its calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from llama_cpp.llama_grammar import LlamaGrammar
from pydantic import BaseModel, Field

from entropykv.server.errors import RequestError
from entropykv.server.fields import FIRST_ERROR, MOST_TOOLS, Description, Name
from entropykv.server.schema_grammar import check, definition_names, grammar_of

_BEGIN, _END = "<tool_call>", "</tool_call>"
_NO_PARAMETERS = {"type": "object", "properties": {}}
_INSTRUCTIONS = """\
You may call tools. They are described here as JSON, within <tools></tools>:
<tools>
{tools}
</tools>
To call one, write an object with its name and its arguments within <tool_call></tool_call>:
<tool_call>
{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}
</tool_call>"""


class Function(BaseModel):
    """A function that the model may call."""

    name: Name
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool, which is a function."""

    type: Literal["function"] = "function"
    function: Function

    @property
    def name(self) -> str:
        """Return the function's name."""
        return self.function.name


class NamedFunction(BaseModel):
    """The name of a function."""

    name: Name


class NamedTool(BaseModel):
    """The one tool that the model must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS), FIRST_ERROR]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class ToolUse:
    """Hold the tools of one request, all of which the model is told of.

    `required`: the answer must be a call. `only`: the name of the tool that it must call.
    """

    tools: list[Tool]
    required: bool = False
    only: str | None = None

    @classmethod
    def of(cls, tools: list[Tool] | None, choice: ToolChoice | None) -> ToolUse | None:
        """Return what a request asks for; None if no tool may be called.

        Raises RequestError for a choice that is not among the tools.
        """
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in [tool.name for tool in tools or []]:
                raise RequestError(
                    400, f"tool_choice: there is no tool {name!r} in tools", param="tool_choice"
                )
            return cls(tools or [], required=True, only=name)
        if choice == "required" and not tools:
            raise RequestError(400, "tool_choice: there are no tools", param="tool_choice")
        if not tools or choice == "none":
            return None
        return cls(tools, required=choice == "required")

    @property
    def callable_tools(self) -> list[Tool]:
        """Return the tools that may be called."""
        return [tool for tool in self.tools if self.only in (None, tool.name)]

    def definitions(self) -> list[dict[str, Any]]:
        """Return the tools as a chat template shows them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def instructions(self) -> str:
        """Return instructions for a model whose chat template shows no tools."""
        return _INSTRUCTIONS.format(tools="\n".join(map(json.dumps, self.definitions())))

    def grammar(self) -> LlamaGrammar | None:
        """Return the grammar of the answer; None if it may be text. Raises the errors of
        grammar_of().
        """
        if not self.required:
            return None
        definitions: dict[str, Any] = {}
        calls = []
        for index, tool in enumerate(self.callable_tools):
            parameters = tool.function.parameters or _NO_PARAMETERS
            check(parameters, "tools")
            properties = {
                "name": {"const": tool.name},
                "arguments": definition_names(parameters, f"tool{index}", definitions),
            }
            calls.append({"properties": properties, "required": ["name", "arguments"]})
        strict = any(tool.function.strict for tool in self.callable_tools)
        return grammar_of({"oneOf": calls, "$defs": definitions}, "tools", strict=strict)

    def read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text part of an answer, and its calls in OpenAI's form."""
        before, found, after = text.partition(_BEGIN)
        if found:
            calls = [
                call
                for piece in (found + after).split(_BEGIN)[1:]
                for call in self._calls(piece.partition(_END)[0])
            ]
            return (before.rstrip(), calls) if calls else (text, [])
        calls = self._calls(text)
        return ("", calls) if calls else (text, [])

    def _calls(self, text: str) -> list[dict[str, Any]]:
        """Return the calls in a JSON text, which may be one or a list; empty if it is neither."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # A model may also write endless brackets.
            return []
        calls = [self._call(item) for item in (value if isinstance(value, list) else [value])]
        return [call for call in calls if call is not None] if all(calls) else []

    def _call(self, item: Any) -> dict[str, Any] | None:
        names = {tool.name for tool in self.callable_tools}
        if not isinstance(item, dict) or item.get("name") not in names:
            return None
        # Llama 3 writes `parameters`.
        arguments = item.get("arguments", item.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": item["name"], "arguments": text}
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


@dataclass
class CallReader:
    """Read an answer while it is written; text is passed on once it can no longer be a call."""

    use: ToolUse
    _held: str = ""
    _said: bool = field(default=False)

    def take(self, text: str) -> str:
        """Add the next piece of the answer; returns the text that can be shown now."""
        self._held += text
        if self.use.required or (not self._said and self._held.lstrip()[:1] in ("", "{", "[")):
            return ""
        begin = self._held.find(_BEGIN)
        if begin < 0:
            begin = len(self._held) - _begun(self._held)
        shown, self._held = self._held[:begin], self._held[begin:]
        self._said = self._said or bool(shown)
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the text, and the calls."""
        return self.use.read(self._held)


def _begun(text: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a call."""
    sizes = range(min(len(_BEGIN) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(_BEGIN[:size])), 0)


def as_deltas(calls: list[dict[str, Any]], *, legacy: bool) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a stream for calls; with `legacy`, the first call under both names."""
    for index, call in enumerate(calls):
        older = {"function_call": call["function"]} if legacy and index == 0 else {}
        yield {"tool_calls": [{"index": index, **call}], **older}
