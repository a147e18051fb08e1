"""Find out what a model's chat template shows of tools, by rendering test conversations.

Templates differ: some show no tools, some need the arguments of a call as an object, some cannot
render a message without text. llama.cpp examines them in the same way (common/chat).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

_NAME, _VALUE, _RESULT = "probed_function", "probed_value", "probed_result"
_ID = "call00001"  # Nine characters, as Mistral's templates require.
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class TemplateTraits:
    """Hold what a template shows; by default only text."""

    shows_tools: bool = False
    """True if it shows the definitions of the tools."""
    shows_calls: bool = False
    """True if it shows an assistant's calls, and messages of role tool."""
    object_arguments: bool = False
    """True if arguments of a call must be objects, because JSON text would be quoted a
    second time.
    """
    null_content: bool = False
    """True if a message with tool calls may have null as its content."""
    thinking_field: bool = False
    """True if it reads the thought before a call from the field `thinking`, as gpt-oss's template
    does.
    """


Render = Callable[[list[dict[str, Any]], list[Any]], str]


def traits_of(source: str, render: Render) -> TemplateTraits:
    """Return what the template with this text shows; `render` makes a prompt of messages and
    tools.
    """
    return replace(_Probe(render).traits(), thinking_field="message.thinking" in source)


class _Probe:
    """Render a template with a conversation that has one tool, and one call of it."""

    def __init__(self, render: Render) -> None:
        self._rendered = render

    def traits(self) -> TemplateTraits:
        as_object, as_text = {"key": _VALUE}, json.dumps({"key": _VALUE})
        shows_object, shows_text = self._shows(as_object), self._shows(as_text)
        arguments = as_text if shows_text else as_object
        without_text = self._with_call(arguments, None)
        return TemplateTraits(
            shows_tools=_NAME in self._render([{"role": "user", "content": "Hi"}], [_TOOL]),
            shows_calls=shows_object or shows_text,
            object_arguments=shows_object and not shows_text,
            null_content=_VALUE in without_text
            and without_text.count("None") <= self._with_call(arguments, "").count("None"),
        )

    def _shows(self, arguments: Any) -> bool:
        """Tell whether a prompt has the arguments of a call, quoted only once, and its result."""
        shown = self._with_call(arguments, "")
        return bool(re.search(rf"""(?<!\\)["']{_VALUE}(?!\\)["']""", shown)) and _RESULT in shown

    def _with_call(self, arguments: Any, content: str | None) -> str:
        function = {"name": _NAME, "arguments": arguments}
        call = {"id": _ID, "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": _RESULT},
        ]
        return self._render(messages, [_TOOL])

    def _render(self, messages: list[dict[str, Any]], tools: list[Any]) -> str:
        """Return the prompt; empty if the template refuses the messages in any way."""
        try:
            return self._rendered(messages, tools)
        except Exception:  # A template is a program of the model's author, and may raise anything.
            return ""
