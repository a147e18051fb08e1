"""Handle tools: the model's instructions, the constraint of its answer, and reading its calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from entropykv.constraint.constraint import Constraint
from entropykv.files import json_of
from entropykv.server.chat.constraints import embedded, made
from entropykv.server.dialects.fields import FIRST_ERROR, MOST_TOOLS, Description, Name
from entropykv.server.http.errors import RequestError
from entropykv.thinking.reader import begun

_BEGIN, _END = "<tool_call>", "</tool_call>"
_ARGUMENTS = frozenset({"arguments", "parameters"})
_OF_CALLS = _ARGUMENTS | {"name", "id", "type"}
"""The members that the JSON object of a call may have."""
_PLAIN = frozenset(
    {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
)
"""Keywords of a schema that do not say whether it allows properties which it does not name."""
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


def as_json(value: Any) -> str:
    """Return a value as JSON; as models write it, characters beyond ASCII are not escaped."""
    return json.dumps(value, ensure_ascii=False)


def call_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call in OpenAI's form; {} if the model has written no object."""
    arguments = json_of(call["function"]["arguments"])
    return arguments if isinstance(arguments, dict) else {}


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
    """The function of a NamedTool, or of the older field function_call."""

    name: Name


class NamedTool(BaseModel):
    """The one tool that the model must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS), FIRST_ERROR]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class ToolUse:
    """Hold the tools of one request; the prompt shows all of them.

    `required`: the answer must be a call. `only`: the name of the tool that it must call.
    `parallel`: whether an answer may have several calls; else what follows the first is left out.
    """

    tools: list[Tool]
    required: bool = False
    only: str | None = None
    parallel: bool = True

    @classmethod
    def of(
        cls, tools: list[Tool] | None, choice: ToolChoice | None, *, parallel: bool = True
    ) -> ToolUse | None:
        """Return the tools of a request, and how the answer may call them; None if it may call
        none.

        Raises RequestError for a choice that is not among the tools, and if a call is required
        without tools.
        """
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in [tool.name for tool in tools or []]:
                raise RequestError(
                    400, f"tool_choice: there is no tool {name!r} in tools", param="tool_choice"
                )
            return cls(tools or [], required=True, only=name, parallel=parallel)
        if choice == "required" and not tools:
            raise RequestError(400, "tool_choice: there are no tools", param="tool_choice")
        if not tools or choice == "none":
            return None
        return cls(tools, required=choice == "required", parallel=parallel)

    @property
    def callable_tools(self) -> list[Tool]:
        """Return the tools that may be called: all, or only the one that must be."""
        return [tool for tool in self.tools if self.only in (None, tool.name)]

    def definitions(self) -> list[dict[str, Any]]:
        """Return the tools as a chat template shows them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def instructions(self) -> str:
        """Return instructions for a model whose chat template shows no tools."""
        return _INSTRUCTIONS.format(tools="\n".join(map(as_json, self.definitions())))

    def constraint(self) -> Constraint | None:
        """Return the constraint of the answer; None if it may be text. Raises RequestError for a
        tool whose parameters are no schema that can be followed.
        """
        if not self.required:
            return None
        definitions: dict[str, Any] = {}
        calls = []
        for index, tool in enumerate(self.callable_tools):
            name = tool.name if tool.name not in definitions else f"{tool.name}-{index}"
            place = f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"
            parameters = tool.function.parameters or _NO_PARAMETERS
            # Refuse a deeply nested schema before other code recurses into it.
            made("tools", Constraint.json_schema, parameters)
            definitions[name] = {"type": "object", **embedded(_closed(parameters), place)}
            properties = {"name": {"const": tool.name}, "arguments": {"$ref": place}}
            calls.append(
                {"type": "object", "properties": properties, "required": [*properties]}
                | {"additionalProperties": False}
            )
        drafts = {definition.pop("$schema", None) for definition in definitions.values()}
        whole = {"anyOf": calls, "$defs": definitions}
        if len(drafts) == 1 and None not in drafts:
            whole = {"$schema": drafts.pop(), **whole}
        return made("tools", Constraint.json_schema, whole)

    def read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of an answer without its calls, and the calls in OpenAI's form."""
        reader = CallReader(self)
        parts = [reader.take(text), reader.finish()]
        return "".join(part.text for part in parts), [c for part in parts for c in part.calls]

    def calls_in(self, value: Any, *, tagged: bool) -> list[dict[str, Any]]:
        """Return the calls in a JSON value of an answer, which is one call or a list of calls;
        empty if anything in it is no call.

        `tagged`: the value stood behind <tool_call>. Without the tag, an object may be the answer
        itself: it is a call only if it has arguments, and no members that calls do not have.
        """
        items = value if isinstance(value, list) else [value]
        calls = [self._call(item, tagged=tagged) for item in items]
        found = [call for call in calls if call is not None]
        return found if len(found) == len(calls) else []

    def _call(self, item: Any, *, tagged: bool) -> dict[str, Any] | None:
        names = {tool.name for tool in self.callable_tools}
        if not isinstance(item, dict) or item.get("name") not in names:
            return None
        if not tagged and not (_ARGUMENTS & item.keys() and item.keys() <= _OF_CALLS):
            return None
        # Llama 3 writes `parameters`.
        arguments = item.get("arguments", item.get("parameters"))
        if arguments is None or arguments == "":
            arguments = {}
        text = arguments if isinstance(arguments, str) else as_json(arguments)
        function = {"name": item["name"], "arguments": text}
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


@dataclass(frozen=True)
class AnswerPart:
    """Hold what the next piece of an answer shows: text, and calls that it has completed."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of a tool's parameters that forbids parameters which it does not name; the
    schema itself if it names none, or has a keyword that may allow or forbid further ones.
    """
    is_plain = parameters.keys() <= _PLAIN and "properties" in parameters
    return {**parameters, "additionalProperties": False} if is_plain else parameters


@dataclass
class CallReader:
    """Read an answer while it is written; text is passed on once it can no longer be a call.

    A call is JSON after <tool_call>, or at the beginning of an answer, and ends where its JSON
    does: its strings may hold any tag. What only looks like a call stays text. White space around
    calls is left out.
    """

    use: ToolUse
    _held: str = ""
    """What was written, but neither shown nor read as a call yet."""
    _spaces: str = ""
    """White space before _held, which is shown if text follows."""
    _bare: bool = True
    """Whether nothing but calls came before, so that another one needs no tag."""
    _called: bool = False
    """Whether a call came before."""
    _behind: bool = False
    """Whether nothing but white space and an end tag came since the last call."""
    _ends: bool = False
    """Whether the end tag of the last call may follow."""
    is_over: bool = False
    """Whether the answer ends behind the call that came, because only one is allowed."""

    def take(self, text: str) -> AnswerPart:
        """Add the next piece of the answer; returns what can be shown now."""
        self._held += text
        return self._read(ended=False)

    def finish(self) -> AnswerPart:
        """Return what was held back, once the answer has ended."""
        part = self._read(ended=True)
        spaces = "" if self._called else self._spaces
        return AnswerPart(part.text + spaces, part.calls)

    def _read(self, *, ended: bool) -> AnswerPart:
        text, calls = "", []
        if self.is_over:
            self._held = ""
        while self._skip_end_tag(ended=ended) and self._held:
            begin, size = self._candidate(ended=ended)
            text += self._show(begin)
            if size < 0:
                break
            found = _json_at(self._held, size, ended=ended)
            if found is _OPEN:
                break
            value, end = found
            new = self.use.calls_in(value, tagged=size > 0)
            if new and not self.use.parallel:
                self._held, self._called, self.is_over = "", True, True
                return AnswerPart(text, new[:1])
            calls += new
            if new:
                self._held = self._held[end:]
                self._called = self._behind = self._ends = True
            else:
                self._bare = False
                text += self._show(end)
        return AnswerPart(text, calls)

    def _skip_end_tag(self, *, ended: bool) -> bool:
        """Leave out white space and an end tag behind a call; returns False if more text may belong
        to these.
        """
        if not self._behind:
            return True
        rest = self._held.lstrip()
        if self._ends and rest.startswith(_END):
            rest, self._ends = rest[len(_END) :].lstrip(), False
        elif self._ends and not ended and _END.startswith(rest):
            return False
        self._held = rest
        self._behind = rest == ""
        return not self._behind

    def _candidate(self, *, ended: bool) -> tuple[int, int]:
        """Return where in _held something begins that may be a call, and how long its tag is (0: it
        has none). With -1 as the second number there is no such place, and the text before the
        first one may be shown.
        """
        if self._bare:
            begin = len(self._held) - len(self._held.lstrip())
            rest = self._held[begin:]
            if rest[:1] in ("{", "["):
                return begin, 0
            if not ended and _BEGIN.startswith(rest):
                return 0, -1
            self._bare = rest.startswith(_BEGIN)
        begin = self._held.find(_BEGIN)
        if begin >= 0:
            return begin, len(_BEGIN)
        return len(self._held) - (0 if ended else begun(self._held, (_BEGIN,))), -1

    def _show(self, size: int) -> str:
        """Take `size` characters from the beginning of _held, and return what of them can be shown;
        white space at their end waits for more text.
        """
        text = self._spaces + self._held[:size]
        self._held = self._held[size:]
        shown = text.rstrip()
        self._spaces = text[len(shown) :]
        return shown


_OPEN: Any = object()
"""Returned for JSON that has not ended yet."""
_LONGEST_WORD = 16
"""More characters than any word or escape of JSON, which may be incomplete at the end of a text."""
_DECODER = json.JSONDecoder(strict=False)
"""Accepts line breaks in strings, which models write although JSON requires escapes."""


def _json_at(text: str, begin: int, *, ended: bool) -> Any:
    """Return the JSON object or list behind white space at `begin`, and the place where it ends.

    If there is none, return None, and the place before which the text is no call; _OPEN: only more
    text can tell. `ended`: no more text follows.
    """
    first = begin + len(text[begin:]) - len(text[begin:].lstrip())
    if first == len(text) and not ended:
        return _OPEN
    if text[first : first + 1] not in ("{", "["):
        return None, begin or 1
    try:
        return _DECODER.raw_decode(text, first)
    except RecursionError:  # A model may also write endless brackets.
        return None, begin or 1
    except ValueError as error:
        place = error.pos if isinstance(error, json.JSONDecodeError) else len(text)
        in_string = str(error).startswith("Unterminated string")
        goes_on = in_string or len(text) - place < _LONGEST_WORD
        return _OPEN if goes_on and not ended else (None, begin or 1)


def as_deltas(
    calls: Sequence[dict[str, Any]], *, first: int, legacy: bool
) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a stream for calls; `first` is how many calls came before. With `legacy`,
    the very first call of the answer is also in OpenAI's older field function_call.
    """
    for index, call in enumerate(calls, first):
        older = {"function_call": call["function"]} if legacy and index == 0 else {}
        yield {"tool_calls": [{"index": index, **call}], **older}
