"""Translate requests of Ollama's API to chats and completions of this server, and answer them."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from entropykv.generation.events import Event
from entropykv.server.chat.chat_request import ChatRequest
from entropykv.server.chat.tool_calls import call_arguments
from entropykv.server.dialects.answers import AnswerForm, SaidPart
from entropykv.server.dialects.fields import (
    FIRST_ERROR,
    MOST_MESSAGES,
    MOST_SUFFIX,
    MOST_TOKENS,
    MOST_TOOLS,
    Name,
    Seed,
    Stop,
    Tokens,
    sampler,
)
from entropykv.server.dialects.requests import DOCUMENT, CompletionRequest, Request
from entropykv.server.engine.answering import Answering
from entropykv.server.http.errors import RequestError, invalid
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.thinking.tags import template_switch

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "repeat_last_n", "typical_p"),
    *("mirostat_tau", "mirostat_eta"),
)
"""Options that our own requests have under the same name."""
_NANOSECONDS = 1_000_000_000
_LATEST = ":latest"
Asked = TypeVar("Asked", ChatRequest, CompletionRequest)


class OllamaOptions(Request):
    """Hold the options of an answer, and num_ctx, of which OllamaRequest.check() refuses a value
    above the server's context; other options, such as those of loading a model, are ignored.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    num_predict: int | None = Field(default=None, ge=-2, le=MOST_TOKENS)
    num_ctx: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    temperature: float | None = sampler("temperature")
    top_k: int | None = sampler("top_k")
    top_p: float | None = sampler("top_p")
    min_p: float | None = sampler("min_p")
    seed: Seed | None = None
    stop: Stop | None = None
    repeat_penalty: float | None = sampler("repeat_penalty")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repeat_last_n: int | None = sampler("repeat_last_n")
    typical_p: float | None = sampler("typical_p")
    mirostat: int | None = sampler("mirostat")
    mirostat_tau: float | None = Field(default=None, ge=0, le=10)
    mirostat_eta: float | None = Field(default=None, ge=0.001, le=1)

    def fields(self) -> dict[str, Any]:
        """Return the given options as fields of our own requests."""
        fields = {name: getattr(self, name) for name in _SAMPLING}
        fields["mirostat_mode"] = self.mirostat
        if self.num_predict is not None and self.num_predict > 0:
            fields["max_tokens"] = self.num_predict
        return {name: value for name, value in fields.items() if value is not None}


class OllamaRequest(Request):
    """Hold the fields that requests of /api/chat and /api/generate share."""

    model: Name
    document: Name | None = DOCUMENT
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions = OllamaOptions()
    keep_alive: str | float | None = None
    """Accepted and ignored: the server itself decides how long a model stays loaded."""
    think: bool | Literal["low", "medium", "high"] | None = None

    @property
    def model_name(self) -> str:
        """Return the model's name without the tag that Ollama's clients append."""
        return self.model.removesuffix(_LATEST)

    @property
    def only_loads(self) -> bool:
        """Tell whether the request has no text to answer: then it only loads the model."""
        return False

    @abstractmethod
    def asked(self, model: LoadedModel) -> ChatRequest | CompletionRequest:
        """Return the equivalent request of our own API; raises RequestError if there is none."""

    @abstractmethod
    def piece(self, texts: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of an answer for texts by the keys content, thinking, tool_calls."""

    def call(self, job: Answering, started: float, loaded: float) -> Any:
        """Generate, and return the answer or an iterator over its lines; raises the errors of
        asked(), and those of the request that it returns.

        `started` and `loaded` are the times of time.monotonic() when the request arrived and when
        its model was loaded.
        """
        return self.asked(job.model).call(job, partial(_Writer, self, started, loaded))

    def check(self, model: LoadedModel) -> None:
        """Raise RequestError if num_ctx exceeds the context, or a model cannot think but should."""
        if self.options.num_ctx is not None and self.options.num_ctx > model.n_ctx:
            raise RequestError(
                400,
                f"options.num_ctx: the server's context is {model.n_ctx}; start it with a larger "
                "-c, or leave num_ctx out",
                param="options.num_ctx",
            )
        if self.think and not model.thinks:
            raise RequestError(
                400, f"{self.model!r} does not support thinking; leave think out", param="think"
            )

    def template_fields(self) -> dict[str, Any]:
        """Return the fields of a chat completion that have the effect of the field `think`."""
        if self.think is None:
            return {}
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        return {"chat_template_kwargs": template_switch(thinks=self.think)}


class OllamaFunction(BaseModel):
    """Hold a function that the model called in an earlier message."""

    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(BaseModel):
    """Hold a tool call of the model in an earlier message."""

    function: OllamaFunction


class OllamaMessage(BaseModel):
    """Hold one message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = ""
    thinking: str | None = None
    images: list[Any] | None = Field(default=None, max_length=MOST_MESSAGES)
    tool_calls: Annotated[list[OllamaCall], FIRST_ERROR] | None = Field(
        default=None, max_length=MOST_TOOLS
    )
    tool_name: Name | None = None

    def as_ours(self) -> dict[str, Any]:
        """Return the message in OpenAI's form."""
        content = _content(self.content or "", self.images)
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": call.function.model_dump()}
                for call in self.tool_calls
            ]
        if self.role == "tool" and self.tool_name is not None:
            message["name"] = self.tool_name
        return message


class OllamaChat(OllamaRequest):
    """Hold a request of /api/chat."""

    messages: Annotated[list[OllamaMessage], FIRST_ERROR] = Field(
        default_factory=list, max_length=MOST_MESSAGES
    )
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = Field(
        default=None, max_length=MOST_TOOLS
    )

    @property
    def only_loads(self) -> bool:
        """Tell whether there is no message: then the request only loads the model."""
        return not self.messages

    def asked(self, model: LoadedModel) -> ChatRequest:
        """Return the equivalent chat completion request; raises RequestError if there is none."""
        self.check(model)
        messages = [each.as_ours() for each in self.messages]
        return _chat_of(self, messages, self.tools)

    def piece(self, texts: dict[str, Any]) -> dict[str, Any]:
        """Return the message with the given texts."""
        return {"message": {"role": "assistant", "content": "", **texts}}


class OllamaGenerate(OllamaRequest):
    """Hold a request of /api/generate: one turn of a chat, or with `raw` or `suffix` a text to
    continue, without `system` and thoughts.
    """

    prompt: str = ""
    suffix: str | None = Field(default=None, max_length=MOST_SUFFIX)
    system: str | None = None
    template: str | None = None
    context: Tokens | None = None
    images: list[Any] | None = Field(default=None, max_length=MOST_MESSAGES)
    raw: bool = False

    @property
    def only_loads(self) -> bool:
        """Tell whether there is no prompt: then the request only loads the model."""
        return not self.prompt

    def asked(self, model: LoadedModel) -> ChatRequest | CompletionRequest:
        """Return the equivalent request of our own API; raises RequestError if there is none."""
        self.check(model)
        if self.template:
            raise RequestError(
                400,
                "template: start the server with --chat-template, or send raw with the whole text",
                param="template",
            )
        if self.context:
            raise RequestError(
                400,
                "context: nothing is kept between requests; send a conversation to /api/chat",
                param="context",
            )
        if not self.raw and not self.suffix:
            system = [{"role": "system", "content": self.system}] if self.system else []
            turn = {"role": "user", "content": _content(self.prompt, self.images)}
            return _chat_of(self, [*system, turn], None)
        if self.images:
            raise RequestError(
                400,
                "images: a text to continue has no images; leave out raw and suffix, or the images",
                param="images",
            )
        schema: Any = self.format or None
        if isinstance(schema, str):
            schema = {"type": "object"}
        limit = model.request_defaults.get("max_tokens")
        fields = {"max_tokens": -1 if limit is None else limit, **self.options.fields()}
        fields["prompt"] = self.prompt
        fields |= {"suffix": self.suffix, "json_schema": schema, "stream": self.stream}
        return _validated(CompletionRequest, fields)

    def piece(self, texts: dict[str, Any]) -> dict[str, Any]:
        """Return the given texts with the names of /api/generate."""
        thinking = {"thinking": texts["thinking"]} if "thinking" in texts else {}
        return {"response": texts.get("content", ""), **thinking}


def _chat_of(
    request: OllamaRequest, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> ChatRequest:
    fields = {**request.options.fields(), **request.template_fields(), "messages": messages}
    if isinstance(request.format, dict):
        schema = {"name": "format", "schema": request.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif request.format:
        fields["response_format"] = {"type": "json_object"}
    return _validated(
        ChatRequest,
        {**fields, "model": request.model_name, "tools": tools or None, "stream": request.stream}
        | {"reasoning_format": "auto"},
    )


def _validated(kind: type[Asked], fields: dict[str, Any]) -> Asked:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False)) from None


def _content(text: str, images: list[Any] | None) -> str | list[dict[str, Any]]:
    """Return a text with its images, which Ollama's clients send in base64, in OpenAI's form."""
    if not images:
        return text
    # The type in the URL is not used: the bytes of the file show what it is.
    urls = [f"data:image/png;base64,{image}" for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}]


class _Writer:
    """Write an answer as lines, or as a single one, with its numbers of tokens and durations."""

    def __init__(
        self, request: OllamaRequest, started: float, loaded: float, form: AnswerForm
    ) -> None:
        """Write the answer that `form` describes; for the times see OllamaRequest.call()."""
        self._request, self._form = request, form
        self._started, self._loaded = started, loaded

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Generate the answer to its end; returns it as one object, with the totals."""
        return self._last(self._form.whole(events))

    def chunks(self, events: Iterator[Event]) -> Iterator[dict[str, Any]]:
        """Yield a line for every part that says something, and a last one with the totals."""
        end = SaidPart()
        for part in self._form.parts(events):
            end = SaidPart(reason=part.reason)
            if texts := _texts_of(part):
                yield {**_head(self._request), **self._request.piece(texts), "done": False}
        yield self._last(end)

    def _last(self, said: SaidPart) -> dict[str, Any]:
        """Return a line of what was said with the totals; durations are in nanoseconds."""
        job = self._form.job
        return {
            **_head(self._request),
            **self._request.piece(_texts_of(said)),
            "done": True,
            "done_reason": "length" if said.reason == "length" else "stop",
            "total_duration": _nanoseconds(time.monotonic() - self._started),
            "load_duration": _nanoseconds(self._loaded - self._started),
            "prompt_eval_count": job.n_prompt,
            "prompt_eval_duration": _nanoseconds(job.prompt_seconds),
            "eval_count": job.n_written,
            "eval_duration": _nanoseconds(job.answer_seconds),
        }


def _head(request: OllamaRequest) -> dict[str, Any]:
    return {"model": request.model, "created_at": now()}


def _texts_of(part: SaidPart) -> dict[str, Any]:
    """Return what a part of an answer says, with Ollama's names."""
    calls = [
        {"function": {"name": call["function"]["name"], "arguments": call_arguments(call)}}
        for call in part.calls
    ]
    texts = {"thinking": part.thought, "content": part.text, "tool_calls": calls}
    return {name: said for name, said in texts.items() if said}


def only_loaded(request: OllamaRequest) -> dict[str, Any]:
    """Return the answer to a request without text, which has only loaded the model."""
    return {**_head(request), **request.piece({}), "done": True, "done_reason": "load"}


def now() -> str:
    """Return the current time in UTC as Ollama writes it, in the form of ISO 8601."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * _NANOSECONDS))
