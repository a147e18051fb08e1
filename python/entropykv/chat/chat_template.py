"""Render the messages of a chat as the text that a model was trained to continue, and find out what
its template shows of tools.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import llama_cpp
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from entropykv.errors import SettingsError
from entropykv.thinking.tags import AnswerFrame, ThoughtTags, frame_of, tags_of

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
    """Hold what a template shows; by default only text.

    Templates differ: some show no tools, some need the arguments of a call as an object, some
    cannot render a message without text. Test conversations are rendered to find that out, as
    llama.cpp does (common/chat).
    """

    shows_tools: bool = False
    """True if the template shows the definitions of the tools."""
    shows_calls: bool = False
    """True if the template shows an assistant's calls, and messages of role tool."""
    object_arguments: bool = False
    """True if arguments of a call must be objects, because JSON text would be quoted a
    second time.
    """
    null_content: bool = False
    """True if a message with tool calls may have null as its content."""
    thinking_field: bool = False
    """True if the template reads the thought before a call from the field `thinking`, as gpt-oss's
    does.
    """


Render = Callable[[list[dict[str, Any]], list[Any]], str]


def traits_of(source: str, render: Render) -> TemplateTraits:
    """Return which parts of a chat (tools, calls, thoughts) the template with the text `source`
    shows; `render` makes a prompt of messages and tools.
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


Messages = Sequence[Mapping[str, Any]]
_LONGEST_KEY = 1_024
"""The most characters of arguments, as JSON, whose AnswerFrame is remembered."""
_MOST_FRAMES = 64
"""How many AnswerFrames are remembered, one for each set of arguments in requests."""


class ChatTemplate:
    """Hold a template: Jinja text from a model file, or the name of one of llama.cpp's
    templates.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        arguments: Mapping[str, Any] | None = None,
        named: bool = False,
    ) -> None:
        """Compile the text, or with `named` look for a template of llama.cpp's.

        `bos` and `eos` are the texts of these tokens, and `arguments` the variables that every chat
        gets. Raises jinja2.TemplateError for text that is no template, and SettingsError for an
        unknown name.
        """
        self.source = source
        self.arguments = dict(arguments or {})
        self._bos, self._eos = bos, eos
        self._frames: dict[str, AnswerFrame] = {}
        self._compiled = None if named else _ENVIRONMENT.from_string(source)
        if named:
            _rendered_by_name(source, [{"role": "user", "content": "-"}], opens_answer=True)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> str:
        """Return the prompt; `opens_answer`: it ends with the beginning of the model's answer.

        `arguments` take precedence over those of every chat. The text begins with a BOS token if
        the template writes one. A named template ignores tools and arguments. Raises
        jinja2.TemplateError, ValueError or TypeError for what the template, a program of its
        author, refuses.
        """
        if self._compiled is None:
            return _rendered_by_name(self.source, messages, opens_answer=opens_answer)
        variables = {**self.arguments, **(arguments or {})}
        return self._compiled.render(
            messages=messages,
            tools=tools,
            functions=None,
            function_call=None,
            tool_choice=None,
            bos_token=self._bos,
            eos_token=self._eos,
            add_generation_prompt=opens_answer,
            raise_exception=_refuse,
            strftime_now=_now,
            **variables,
        )

    @functools.cached_property
    def traits(self) -> TemplateTraits:
        """Return what the template shows; a named one shows only text."""
        if self._compiled is None:
            return TemplateTraits()
        return traits_of(self.source, lambda m, tools: self.render(m, tools=tools))

    @functools.cached_property
    def tags(self) -> ThoughtTags | None:
        """Return the tags of the model's thoughts; None if the template has none, or is named."""
        return None if self._compiled is None else tags_of(self.source)

    def frame(self, arguments: Mapping[str, Any] | None = None) -> AnswerFrame:
        """Return what the template writes before an answer, with these arguments; an empty frame if
        it refuses them.
        """
        key = json.dumps(arguments or {}, sort_keys=True, default=str)
        found = self._frames.get(key)
        if found is None:
            try:
                found = frame_of(lambda messages: self.render(messages, arguments=arguments))
            except Exception:  # A template is a program of its author, and may raise anything.
                found = AnswerFrame()
            if len(self._frames) >= _MOST_FRAMES:
                self._frames.clear()
            if len(key) <= _LONGEST_KEY:
                self._frames[key] = found
        return found


class _Generation(Extension):
    """Render what stands within {% generation %}, with which trainers mark answers."""

    tags = {"generation"}  # noqa: RUF012  # of Extension

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Transformers' templates expect it: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    """Let a template refuse what it cannot show."""
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment in which templates can do nothing but write text."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return environment


_ENVIRONMENT = _environment()


def _rendered_by_name(name: str, messages: Messages, *, opens_answer: bool) -> str:
    """Apply one of llama.cpp's templates; raises SettingsError for an unknown name."""
    said = [(str(each["role"]), str(each["content"] or "")) for each in messages]
    roles = [(role.encode(), content.encode()) for role, content in said]
    chat = (llama_cpp.llama_chat_message * len(roles))(
        *(llama_cpp.llama_chat_message(role, content) for role, content in roles)
    )
    size = 1024 + 2 * sum(len(role) + len(content) for role, content in roles)
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama_cpp.llama_chat_apply_template(
            name.encode(), chat, len(roles), opens_answer, buffer, size
        )
        if n < 0:
            raise SettingsError(
                f"llama.cpp knows no chat template named {name!r}; give a name such as chatml, or "
                "Jinja text (--chat-template, --chat-template-file)"
            )
        if n <= size:
            return buffer.raw[:n].decode("utf-8")
        size = n


TemplateError = jinja2.TemplateError
"""Raised for a template that cannot be compiled or rendered."""
