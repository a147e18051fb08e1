"""Define the fields that all requests have in common, and those of completions, and make a
GenerationRequest of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from llama_cpp.server.types import CreateCompletionRequest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from entropykv.constraint.constraint import Constraint
from entropykv.errors import SettingsError
from entropykv.generation.prompt import GenerationRequest, Prompt, infill_prompt
from entropykv.server.chat.constraints import ConstraintFields, single
from entropykv.server.dialects.answers import (
    AnswerForm,
    CompletionWriter,
    Writer,
    usage,
    written,
)
from entropykv.server.dialects.fields import (
    MOST_LOGPROBS,
    MOST_SUFFIX,
    MOST_TOKENS,
    Biases,
    Name,
    PromptField,
    RepeatPenalty,
    SamplerFields,
    Seed,
    Stop,
    TokenLimit,
    sampler,
)
from entropykv.server.engine.answering import Answering
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.session.passages import MOST_PASSAGES
from entropykv.settings.sampling import Sampling

_MOST_SEEDS = 2**32


def seed_of(seed: int | None, number: int) -> int | None:
    """Return the seed of one of the choices of a prompt.

    The first choice has the request's seed, the others the following numbers, because equal seeds
    would give equal choices.
    """
    return None if seed is None else (seed + number) % _MOST_SEEDS if number else seed


@dataclass
class Choices:
    """Join the answers, or the streams of chunks, of `n` choices of every prompt.

    The tokens of a prompt count once for all its choices. `usage`: whether the end of a stream has
    the numbers of tokens.
    """

    n: int
    usage: bool = False
    _shown: dict[str, Any] = field(default_factory=dict)
    """Id, time and model of the first chunk, which all chunks get."""
    _costs: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The numbers of tokens of every choice that has ended."""
    _times: dict[str, Any] = field(default_factory=dict)
    """The field `timings` of the choice that has ended first."""

    def whole(self, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one answer with the choices of `answers`, which are those of the first prompt,
        then those of the next one.
        """
        choices = [{**each["choices"][0], "index": i} for i, each in enumerate(answers)]
        self._costs = {i: each["usage"] for i, each in enumerate(answers)}
        return {**answers[0], "choices": choices, "usage": self._cost()}

    def chunk(self, index: int, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Return a chunk of choice `index` as a chunk of the joined answer; None for a chunk with
        only numbers of tokens, which end() adds up.
        """
        if not chunk["choices"]:
            self._costs[index] = chunk["usage"]
            if not self._times and "timings" in chunk:
                self._times = {"timings": chunk["timings"]}
            return None
        self._shown = self._shown or _head(chunk)
        choice = {**chunk["choices"][0], "index": index}
        cost = {"usage": None} if self.usage else {}
        return {**chunk, **self._shown, "choices": [choice], **cost}

    def end(self) -> dict[str, Any] | None:
        """Return the chunk with the numbers of tokens that ends a stream; None unless `usage` is
        set.
        """
        if not self.usage:
            return None
        return {**self._shown, "choices": [], "usage": self._cost(), **self._times}

    def _cost(self) -> dict[str, Any]:
        prompts = [cost for index, cost in self._costs.items() if index % self.n == 0]
        details = [cost.get("completion_tokens_details") for cost in self._costs.values()]
        thoughts = [each["reasoning_tokens"] for each in details if each is not None]
        return usage(
            sum(cost["prompt_tokens"] for cost in prompts),
            sum(cost["prompt_tokens_details"]["cached_tokens"] for cost in prompts),
            sum(cost["completion_tokens"] for cost in self._costs.values()),
            sum(thoughts) if thoughts else None,
        )


def _head(chunk: dict[str, Any]) -> dict[str, Any]:
    keys = ("id", "object", "created", "model", "system_fingerprint")
    return {key: chunk[key] for key in keys if key in chunk}


MOST_CHOICES = 128
"""The most choices of one prompt, as in OpenAI's API."""
_SAMPLING = frozenset(each.name for each in fields(Sampling)) - {"grammar", "logit_bias"}
"""Fields of requests that say how tokens are chosen, by the names of Sampling."""


DOCUMENT: Any = Field(
    default=None,
    description="The document that is asked, which POST /v1/documents has read: the text of the "
    "request stands behind it.",
)


PASSAGES: Any = Field(
    default=0,
    ge=0,
    le=MOST_PASSAGES,
    description="How many passages of the document that the answer looked at are returned with "
    "each choice, as `passages`.",
)


class StreamOptions(BaseModel):
    """Hold whether the last chunk of a stream has the numbers of tokens."""

    include_usage: bool = False


class Request(BaseModel):
    """Define the fields that all requests have in common. A null field gets its default."""

    model_config = ConfigDict(allow_inf_nan=False)
    _choice: int = PrivateAttr(0)
    """The number of the choice that a part of the request asks for: see parted()."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}

    @property
    def n_jobs(self) -> int:
        """Return how many answers the response has."""
        return 1

    def parts(self) -> Sequence[Any]:
        """Return one request for each answer; raises RequestError if the fields ask for no answer
        that is possible.
        """
        return [self]


class GeneratingRequest(Request, ConstraintFields, SamplerFields):
    """Define the fields that completions and chats have in common."""

    document: Name | None = DOCUMENT
    min_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    logit_bias: Biases | None = None
    logit_bias_type: Literal["input_ids", "tokens"] | None = None
    timings_per_token: bool = Field(
        default=False, description="Whether every chunk of a stream has the times so far."
    )
    return_progress: bool = Field(
        default=False, description="Whether a stream tells how much of the prompt was read."
    )

    def document_name(self) -> str | None:
        """Return the name of the document that the request names; None without one. Raises
        RequestError for several documents.
        """
        return self.document

    def most_written(self) -> int | None:
        """Return the limit of the answer's tokens that the request itself names, if that is not in
        its field max_tokens: see TokenLimit; None if it names none.
        """
        return None


class CompletionRequest(GeneratingRequest, CreateCompletionRequest):  # type: ignore[misc]
    """Define a completion as in llama_cpp.server; values that would be misunderstood
    raise errors.
    """

    model: Name | None = None
    prompt: PromptField = Field(  # type: ignore[assignment]
        description="A text or its tokens, or a list of those."
    )
    passages: int = PASSAGES
    suffix: str | None = Field(default=None, max_length=MOST_SUFFIX)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    max_tokens: TokenLimit | None = Field(
        default=16, validation_alias=AliasChoices("max_tokens", "n_predict")
    )
    stop: Stop | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    seed: Seed | None = None
    user: Name | None = None
    top_k: int = sampler("top_k", 40)
    repeat_penalty: RepeatPenalty = Field(
        default=1.0, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    stream_options: StreamOptions = StreamOptions()

    @property
    def n_jobs(self) -> int:
        """Return how many choices all prompts of the request have together."""
        return self.n * (1 if _is_one(self.prompt) else len(self.prompt))

    def call(self, job: Answering, make: Callable[[AnswerForm], Writer] = CompletionWriter) -> Any:
        """Generate one choice of one prompt; returns the answer, or with `stream` an iterator of
        its chunks, in the form of the writer that `make` returns. Raises RequestError for fields
        that contradict each other or the model, and the errors of Answering.answer().
        """
        check_passages(self.passages, job)
        (only,) = self._prompts()
        field, constraint = single(self.constraints()) or ("grammar", None)
        request = GenerationRequest(
            self._prompt(only, job),
            sampling_of(self, job.model, constraint),
            most_tokens(self, job.model),
            stops_of(self, job.model),
            n_logprobs=self.logprobs,
            prompt_logprobs=self.echo and self.logprobs is not None,
            reads_anew=not self.cache_prompt,
        )
        form = AnswerForm(
            job,
            request.prompt,
            self.model or job.model.name,
            logprobs=self.logprobs is not None,
            timed=self.timings_per_token,
            echoes=self.echo,
        )
        return written(
            make(form),
            job,
            request,
            streams=bool(self.stream),
            constrained_by=field,
            n_passages=self.passages,
            tells_progress=self.return_progress,
        )

    def _prompt(self, prompt: str | list[int | str], job: Answering) -> Prompt:
        """Return the prompt of one answer: the document's tokens, then those of `prompt`. Raises
        RequestError for an empty prompt, unknown tokens, and echo or suffix beside a document.
        """
        model, document = job.model, job.document_tokens()
        if document and (self.echo or self.suffix):
            name = "echo" if self.echo else "suffix"
            raise RequestError(400, f"{name}: it cannot go with a document", param=name)
        tokens = mixed_tokens(prompt, model, begins=not document)
        if self.suffix:
            tokens = infilled(tokens, self.suffix, model)
        if not tokens:
            raise RequestError(400, "prompt: it is empty", param="prompt")
        text = prompt if isinstance(prompt, str) else ""
        return Prompt(document + tokens, text, n_document=len(document))

    def parts(self) -> list[CompletionRequest]:
        """Return a request for every choice of every prompt; raises RequestError for an empty list
        of prompts, and for a best_of that asks to compare choices.
        """
        if self.best_of not in (None, 1, self.n):
            raise RequestError(400, "best_of: choices are not compared here", param="best_of")
        return [
            parted(self, number, n=1, best_of=None, prompt=prompt)
            for prompt in self._prompts()
            for number in range(self.n)
        ]

    def _prompts(self) -> Sequence[str | list[int | str]]:
        prompt: Any = self.prompt
        if not isinstance(prompt, str) and not prompt:
            raise RequestError(400, "prompt: the list is empty", param="prompt")
        return [prompt] if _is_one(prompt) else prompt


def _is_one(prompt: Any) -> bool:
    """Tell whether this is one prompt, not a list of prompts: a text, or a list with a token."""
    return isinstance(prompt, str) or any(isinstance(each, int) for each in prompt)


Parted = TypeVar("Parted", bound=GeneratingRequest)


def parted(request: Parted, number: int, **others: Any) -> Parted:
    """Return a copy of a request that asks for one choice, that with this number; `others`: the
    fields of the copy that differ.
    """
    part = request.model_copy(update=others)
    part._choice = number
    return part


def mixed_tokens(
    prompt: str | Sequence[int | str],
    model: LoadedModel,
    *,
    begins: bool,
    special: bool = True,
    param: str = "prompt",
) -> list[int]:
    """Return the tokens of a text, or of a list of tokens and texts; raises RequestError for tokens
    that are not in the vocabulary, and for a text that takes too long to tokenise.

    `begins`: a text at the beginning gets the token with which texts of the model begin. `special`:
    names of control tokens become such tokens.
    """
    parts: Sequence[int | str] = [prompt] if isinstance(prompt, str) else prompt
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, int):
            tokens.append(part)
        else:
            tokens += model.tokenize(part, add_bos=begins and index == 0, special=special)
    check_tokens(tokens, model, param)
    return tokens


def infilled(tokens: list[int], suffix: str, model: LoadedModel) -> list[int]:
    """Return the prompt of a text between `tokens` and a suffix; raises RequestError for a model
    that was not trained for that.
    """
    prompt = infill_prompt(model.model, tokens, model.tokenize(suffix, special=False))
    if prompt is None:
        raise RequestError(
            400,
            "suffix: the model was not trained to write a text before another one; leave it out, "
            "or use a model for code",
            param="suffix",
        )
    return prompt.tokens


def check_passages(n: int, job: Answering) -> None:
    """Raise RequestError for passages that are asked for without a document."""
    if n and job.document is None:
        raise RequestError(
            400,
            "passages: they are those of a document; name one in the field document",
            param="passages",
        )


def check_tokens(tokens: list[int], model: LoadedModel, param: str) -> None:
    """Raise RequestError for tokens that are not in the vocabulary."""
    n_vocab = model.model.n_vocab
    if not all(0 <= token < n_vocab for token in tokens):
        raise RequestError(400, f"{param}: tokens are 0 to {n_vocab - 1}", param=param)


def given(request: Request, model: LoadedModel, name: str) -> Any:
    """Return a field of a request, or the server's default if the request leaves it out."""
    if name not in request.model_fields_set and name in model.request_defaults:
        return model.request_defaults[name]
    return getattr(request, name)


def sampling_of(
    request: GeneratingRequest, model: LoadedModel, constraint: Constraint | None
) -> Sampling:
    """Return how the tokens of an answer are chosen; raises RequestError for values that cannot be
    used, alone or together, and the errors of biases_of().
    """
    names = _SAMPLING & (type(request).model_fields.keys() | model.request_defaults.keys())
    values = {
        name: given(request, model, name)
        if name in type(request).model_fields
        else model.request_defaults[name]
        for name in names
    }
    values["seed"] = seed_of(values.get("seed"), request._choice)
    if "mirostat" not in request.model_fields_set:  # Other forms name it mirostat_mode.
        values["mirostat"] = given(request, model, "mirostat_mode")
    if constraint is not None and request.min_tokens > 0:
        raise RequestError(
            400,
            "min_tokens cannot go with a grammar, a response_format or a tool",
            param="min_tokens",
        )
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }
    biases = tuple(biases_of(request, model).items())
    try:
        return Sampling(**values, grammar=constraint, logit_bias=biases)
    except SettingsError as error:
        raise RequestError(400, str(error)) from None


def most_tokens(request: GeneratingRequest, model: LoadedModel) -> int:
    """Return the most tokens of the answer: see GenerationRequest."""
    limit = request.most_written()
    if limit is None:
        limit = given(request, model, "max_tokens")
    return -1 if limit is None or limit < 0 else int(limit)


def stops_of(request: GeneratingRequest, model: LoadedModel) -> tuple[str, ...]:
    """Return the texts that end the answer."""
    return tuple(given(request, model, "stop") or ())


def biases_of(request: GeneratingRequest, model: LoadedModel) -> dict[int, float]:
    """Return the values to add to the logits of tokens, -inf for the end tokens with `ignore_eos`;
    raises RequestError for unknown tokens, and for values that are not between -1000 and 1000.
    """
    biases: dict[int, float] = {}
    n_vocab = model.model.n_vocab
    for key, bias in request.logit_bias or ():
        ids = _biased_tokens(key, model, as_text=request.logit_bias_type == "tokens")
        if not all(0 <= token < n_vocab for token in ids):
            raise RequestError(
                400,
                f"logit_bias: {key!r} is not a token; tokens are 0 to {n_vocab - 1}",
                param="logit_bias",
            )
        if not abs(bias) <= 1000.0:
            raise RequestError(
                400, f"logit_bias: {bias} is not between -1000 and 1000", param="logit_bias"
            )
        biases.update(dict.fromkeys(ids, -math.inf if bias is False else bias))
    if request.ignore_eos:
        biases.update(dict.fromkeys(model.model.end_tokens, -math.inf))
    return biases


def _biased_tokens(key: int | str, model: LoadedModel, *, as_text: bool) -> list[int]:
    """Return the token that a key of logit_bias is the number of, or else the tokens of its text;
    with `as_text`, a string of digits is a text, too.
    """
    if isinstance(key, int):
        return [key]
    if not as_text and re.fullmatch("-?[0-9]+", key):
        return [int(key)] if len(key) < 10 else [-1]
    return model.tokenize(key)
