"""Define the fields common to all requests, and completions, and convert them for
llama-cpp-python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp.server.types import CreateCompletionRequest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from entropykv.drop_in.entropy_llama import EntropyLlama
from entropykv.server.chat.constraints import ConstraintFields, single
from entropykv.server.dialects.choices import seeds, with_passages, with_usage
from entropykv.server.dialects.fields import (
    MOST_LOGPROBS,
    MOST_SUFFIX,
    MOST_TOKENS,
    Biases,
    Name,
    Prompt,
    RepeatPenalty,
    Seed,
    Stop,
    TokenLimit,
    TopK,
)
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loading import ServedLlama
from entropykv.session.passages import MOST_PASSAGES

if TYPE_CHECKING:
    from entropykv.server.chat.chat_request import ChatRequest

MOST_CHOICES = 128
"""The most choices of one prompt, as in OpenAI's API."""
_ARGUMENTS = frozenset(
    {"model", "suffix", "max_tokens", "temperature", "top_p", "min_p", "echo", "stop", "stream"}
    | {"logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "top_k"}
    | {"repeat_penalty", "mirostat_mode", "mirostat_tau", "mirostat_eta"}
)
"""Fields of a request that are passed to llama-cpp-python unchanged."""


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


class Request(ConstraintFields):
    """Define the fields that completions and chats have in common. A null field gets its
    default.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class CompletionRequest(Request, CreateCompletionRequest):
    """Define a completion as in llama_cpp.server, without values that it would misunderstand."""

    model: Name | None = None
    prompt: Prompt = Field(  # type: ignore[assignment]
        description="A text or its tokens, or a list of those."
    )
    document: Name | None = DOCUMENT
    passages: int = PASSAGES
    suffix: str | None = Field(default=None, max_length=MOST_SUFFIX)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    max_tokens: TokenLimit | None = 16
    min_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    stop: Stop | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    logit_bias: Biases | None = None  # type: ignore[assignment]
    seed: Seed | None = None
    user: Name | None = None
    top_k: TopK = 40
    repeat_penalty: RepeatPenalty = 1.0
    stream_options: StreamOptions = StreamOptions()

    def document_name(self) -> str | None:
        """Return the document that the request names."""
        return self.document

    def most_written(self) -> int | None:
        """Return the most tokens of the answer that the request itself names; see TokenLimit."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    @property
    def n_jobs(self) -> int:
        """Return how many choices all of its prompts have together."""
        return self.n * (1 if _is_one(self.prompt) else len(self.prompt))

    def call(self, llama: ServedLlama) -> Any:
        """Generate one choice of one prompt; returns a response or its chunks. Raises
        RequestError.
        """
        (only,) = self._prompts()
        llama.thought = None
        ask_for_passages(self.passages, llama)
        prompt = self._behind_document(_checked(only, llama), llama)
        arguments = {**sampling_arguments(self, llama), "prompt": prompt, "seed": self.seed}
        if asked := single(self.constraints()):
            llama.constrained_by, arguments["grammar"] = asked
        answer = llama.create_completion(**arguments)
        if self.passages:
            answer = with_passages(answer, llama)
        return with_usage(answer, llama)

    def _behind_document(self, prompt: str | list[int], llama: ServedLlama) -> str | list[int]:
        """Return the prompt with the document before it, if the request names one; raises
        RequestError.
        """
        if llama.asked is None:
            return prompt
        if self.echo or self.suffix:
            name = "echo" if self.echo else "suffix"
            raise RequestError(400, f"{name}: it cannot go with a document", param=name)
        if isinstance(prompt, str):
            prompt = llama.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)
        return llama.document_tokens() + prompt

    def parts(self) -> list[CompletionRequest]:
        """Return a request for every choice of every prompt; raises RequestError."""
        if self.best_of not in (None, 1, self.n):
            raise RequestError(400, "best_of: choices are not compared here", param="best_of")
        one = {"n": 1, "best_of": None}
        return [
            self.model_copy(update={**one, "prompt": prompt, "seed": seed})
            for prompt in self._prompts()
            for seed in seeds(self.seed, self.n)
        ]

    def _prompts(self) -> Sequence[str | list[int | str]]:
        prompt: Any = self.prompt
        if not isinstance(prompt, str) and not prompt:
            raise RequestError(400, "prompt: the list is empty", param="prompt")
        return [prompt] if _is_one(prompt) else prompt


def _is_one(prompt: Any) -> bool:
    """Tell whether this is one prompt, not a list of prompts: a text, or a list with a token."""
    return isinstance(prompt, str) or any(isinstance(each, int) for each in prompt)


def _checked(prompt: str | list[int | str], llama: ServedLlama) -> str | list[int]:
    """Return a prompt with at least one token, all in the vocabulary; texts in a list become their
    tokens. Raises RequestError.
    """
    begins = llama._model.add_bos_token() and llama.token_bos() != -1
    if isinstance(prompt, str):
        if not prompt and not begins:
            raise RequestError(400, "prompt: it is empty", param="prompt")
        return prompt
    tokens: list[int] = []
    for index, part in enumerate(prompt):
        if isinstance(part, int):
            tokens.append(part)
        else:
            first = begins and index == 0
            tokens += llama.tokenize(part.encode("utf-8"), add_bos=first, special=True)
    check_tokens(tokens, llama, "prompt")
    if not tokens:
        raise RequestError(400, "prompt: it is empty", param="prompt")
    return tokens


def ask_for_passages(n: int, llama: ServedLlama) -> None:
    """Let the next answer find n passages of its document; raises RequestError without one."""
    if n and llama.asked is None:
        raise RequestError(
            400,
            "passages: they are those of a document; name one in the field document",
            param="passages",
        )
    llama.n_passages, llama.passages = n, None


def check_tokens(tokens: list[int], llama: EntropyLlama, param: str) -> None:
    """Raise RequestError for tokens that are not in the vocabulary."""
    n_vocab = llama.n_vocab()
    if not all(0 <= token < n_vocab for token in tokens):
        raise RequestError(400, f"{param}: tokens are 0 to {n_vocab - 1}", param=param)


def sampling_arguments(
    request: CompletionRequest | ChatRequest, llama: ServedLlama
) -> dict[str, Any]:
    """Return the sampling arguments for llama-cpp-python, without prompt and seed."""
    arguments = request.model_dump(include=set(_ARGUMENTS))
    for name, value in llama.request_defaults.items():
        if name not in request.model_fields_set:
            arguments[name] = value
    limit = request.most_written()
    if limit is None:
        limit = arguments["max_tokens"]
    llama.reads_only = limit == 0
    arguments["max_tokens"] = limit if limit is not None and limit > 0 else None
    arguments["model"] = request.model or llama.served_name
    processors = []
    if request.logit_bias:
        processors.append(_bias(_token_biases(request, llama)))
    if request.min_tokens > 0:
        processors.append(llama_cpp.MinTokensLogitsProcessor(request.min_tokens, llama.token_eos()))
    if processors:
        # Do not pass them as logit_bias: llama-cpp-python ignores it if there is another processor.
        arguments["logits_processor"] = llama_cpp.LogitsProcessorList(processors)
    return arguments


def _token_biases(
    request: CompletionRequest | ChatRequest, llama: EntropyLlama
) -> dict[int, float]:
    """Return the values to add to the logits of tokens; raises RequestError for unknown tokens."""
    biases: dict[int, float] = {}
    for key, bias in request.logit_bias or ():
        ids = _biased_tokens(key, llama, as_text=request.logit_bias_type == "tokens")
        if not all(0 <= token < llama.n_vocab() for token in ids):
            raise RequestError(
                400,
                f"logit_bias: {key!r} is not a token; tokens are 0 to {llama.n_vocab() - 1}",
                param="logit_bias",
            )
        if not abs(bias) <= 1000.0:
            raise RequestError(
                400, f"logit_bias: {bias} is not between -1000 and 1000", param="logit_bias"
            )
        biases.update(dict.fromkeys(ids, -math.inf if bias is False else bias))
    return biases


def _biased_tokens(key: int | str, llama: EntropyLlama, *, as_text: bool) -> list[int]:
    """Return the tokens of a key of logit_bias: a number, or with `as_text` always a text."""
    if isinstance(key, int):
        return [key]
    if not as_text and re.fullmatch("-?[0-9]+", key):
        return [int(key)] if len(key) < 10 else [-1]
    return llama.tokenize(key.encode("utf-8"), add_bos=False, special=True)


def _bias(biases: dict[int, float]) -> Any:
    ids = np.array(list(biases), dtype=np.intp)
    values = np.array(list(biases.values()), dtype=np.single)

    def add(_: Any, scores: Any) -> Any:
        scores[ids] += values
        return scores

    return add
