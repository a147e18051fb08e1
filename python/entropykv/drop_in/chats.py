"""Answer chats of an EntropyLlama: a template or chat format makes the prompt."""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llama_cpp
from llama_cpp import llama_chat_format
from llama_cpp.llama_chat_format import ChatFormatterResponse

from entropykv.chat.chat_template import TemplateError
from entropykv.constraint.constraint import Constraint
from entropykv.errors import SettingsError
from entropykv.generation.events import CompletionReader, Event
from entropykv.llamacpp.model import Model
from entropykv.session.logprobs import CompletionLogprobs, TokenLogprob

_OF_PROMPT = ("messages", "functions", "function_call", "tools", "tool_choice")
"""The arguments of a chat that its format shows to the model."""
_OTHERS = ("response_format", "logprobs", "top_logprobs")


def formatter_of(llama: llama_cpp.Llama, model: Model) -> Any:
    """Return the function that makes the prompt of a chat; None if a chat handler does more than
    that.

    It renders the template of the model's file, unless another format was chosen: then it is the
    formatter of which llama-cpp-python has made a handler.
    """
    handler, name = llama.chat_handler, str(llama.chat_format)
    if handler is None:
        own = llama_chat_format.guess_chat_format_from_gguf_metadata(llama.metadata)
        if name in ("chat_template.default", own) and model.chat_template is not None:
            return _TemplateFormatter(model)
        handler = llama._chat_handlers.get(name) or llama_chat_format.get_chat_completion_handler(
            name
        )
    maker = llama_chat_format.chat_formatter_to_chat_completion_handler.__name__
    if not getattr(handler, "__qualname__", "").startswith(f"{maker}."):
        return None
    return inspect.getclosurevars(handler).nonlocals["chat_formatter"]


class _TemplateFormatter:
    """Make prompts with the chat template of a model, as the commands and the server do."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(
        self,
        *,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Any] | None,
        tools: Sequence[Any] | None,
        **_: Any,
    ) -> ChatFormatterResponse:
        try:
            text = self._model.chat_text(messages, tools=tools or _as_tools(functions))
        except (TemplateError, ValueError, TypeError) as error:
            raise SettingsError(
                f"messages: the model's chat template refuses them ({error}); change them, or "
                "choose another chat_format"
            ) from None
        return ChatFormatterResponse(prompt=text, added_special=True)


def answer_chat(llama: Any, formatter: Any, given: Mapping[str, Any]) -> Any:
    """Complete the prompt that a formatter makes of a chat, and return it as a chat.

    `given`: the arguments of create_chat_completion() by name. If a tool must be called, the
    completion is the arguments of the call. Raises SettingsError for a tool that there is not, and
    the errors of create_completion().
    """
    said = {name: llama.said(given[name]) for name in ("tools", "functions")}
    made = formatter(**{name: {**given, **said}[name] for name in _OF_PROMPT})
    rest = {name: each for name, each in given.items() if name not in (*_OF_PROMPT, *_OTHERS)}
    tool = _chosen_tool(given)
    if tool is not None:
        rest["grammar"] = Constraint.json_schema(tool.get("parameters") or {"type": "object"})
    answer = llama.create_completion(
        prompt=llama.tokenize(
            made.prompt.encode("utf-8"), add_bos=not made.added_special, special=True
        ),
        logprobs=(given["top_logprobs"] or 0) if given["logprobs"] else None,
        stopping_criteria=made.stopping_criteria,
        **{**rest, "stop": [*stops_of(given["stop"]), *stops_of(made.stop)]},
    )
    if tool is None:
        return llama_chat_format._convert_completion_to_chat(answer, stream=given["stream"])
    return llama_chat_format._convert_completion_to_chat_function(
        tool["name"], answer, given["stream"]
    )


def with_constraint(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a chat with a constraint in the place of its response_format.

    Raises SettingsError for a format without a schema, and for a schema that is refused.
    """
    asked = given["response_format"]
    if asked is None or asked.get("type") == "text":
        return given
    kind = asked.get("type")
    if kind == "json_object" and asked.get("schema") is None:
        return {**given, "response_format": None, "grammar": Constraint.json_object()}
    where = {"json_object": asked, "json_schema": asked.get("json_schema") or {}}
    schema = where.get(kind, {}).get("schema")
    if schema is None:
        raise SettingsError(
            f"response_format has the type {kind!r}, or no schema; use json_object, or json_schema "
            'with {"schema": ...}'
        )
    return {**given, "response_format": None, "grammar": Constraint.json_schema(schema)}


def with_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is empty if it is null, unless there are calls beside it."""
    calls = message.get("tool_calls") or message.get("function_call")
    if message.get("content") is None and not calls:
        return {**message, "content": ""}
    return dict(message)


def stops_of(stop: str | Sequence[str] | None) -> list[str]:
    """Return the texts that end an answer, as a list."""
    return [stop] if isinstance(stop, str) else [*(stop or ())]


def _as_tools(functions: Sequence[Any] | None) -> list[Any] | None:
    """Return functions, OpenAI's older name of tools, as tools."""
    return [{"type": "function", "function": each} for each in functions] if functions else None


def _chosen_tool(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the function that tool_choice or function_call names; None if neither names one.

    Raises SettingsError for a name that is not among the tools.
    """
    choice = given["tool_choice"] or given["function_call"]
    if not isinstance(choice, dict):
        return None
    name = choice.get("function", choice).get("name")
    tools = given["tools"] or _as_tools(given["functions"]) or ()
    found = next((each["function"] for each in tools if each["function"]["name"] == name), None)
    if found is None:
        raise SettingsError(f"tool_choice: there is no tool {name!r} in tools")
    return dict(found)


class LlamaCppWriter:
    """Write one completion as the dictionaries of llama_cpp.llama_types."""

    def __init__(self, model: str, echo: str, logprobs: CompletionLogprobs | None) -> None:
        """Write an answer of a model; `echo` is the text of the prompt if it is repeated.

        `logprobs` shows the values of tokens; None: they were not asked for.
        """
        self._head = {
            "id": f"cmpl-{uuid.uuid4()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = logprobs
        self._read = CompletionReader(echo, logprobs)
        self.tokens: list[int] = []
        """The tokens that were written."""

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Generate the answer to its end; returns it as one completion, with its usage."""
        said = self._read.whole(events)
        self.tokens += said.tokens
        n_prompt, n_written = self._read.n_prompt, 0 if said.ended is None else said.ended.n_tokens
        return {
            **self._part(said.text, said.values, said.reason or "stop"),
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_written,
                "total_tokens": n_prompt + n_written,
            },
        }

    def chunks(self, events: Iterator[Event]) -> Iterator[dict[str, Any]]:
        """Generate, and yield a chunk for every piece of text, and one that says why it ended."""
        for part in self._read.parts(events):
            self.tokens += part.tokens
            if part.text or part.values:
                yield self._part(part.text, part.values, None)
            if part.ended is not None:
                yield self._part("", (), part.reason)

    def _part(
        self, text: str, values: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs.shown(values)
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}
