"""What a request may ask for, and the arguments of llama-cpp-python that it becomes."""

from __future__ import annotations

import math
from typing import Any, Literal

import llama_cpp
import numpy as np
from llama_cpp.llama_grammar import LlamaGrammar
from llama_cpp.server.types import CreateChatCompletionRequest, CreateCompletionRequest
from pydantic import Field

from entropykv.llama.entropy_llama import EntropyLlama
from entropykv.server.errors import RequestError

_NOT_ARGUMENTS = frozenset(
    {"n", "best_of", "user", "logit_bias", "logit_bias_type", "min_tokens", "grammar"}
    | {"max_completion_tokens"}
)


class CompletionRequest(CreateCompletionRequest):
    """llama_cpp.server's, without values that it would misunderstand or leave out."""

    n: Literal[1] | None = 1
    best_of: Literal[1] | None = 1
    max_tokens: int | None = Field(default=16, ge=1)

    def call(self, llama: EntropyLlama) -> Any:
        """Generate: a response, or an iterator of chunks."""
        prompt = self.prompt
        if isinstance(prompt, list):
            if len(prompt) > 1:
                raise RequestError(400, "prompt: one at a time is possible here", param="prompt")
            prompt = prompt[0] if prompt else ""
        arguments = {**_arguments(self, llama), "prompt": prompt}
        _check_logprobs(llama, self.logprobs is not None)
        return llama.create_completion(**arguments)


class ChatRequest(CreateChatCompletionRequest):
    """llama_cpp.server's, without values that it would misunderstand or leave out."""

    n: Literal[1] | None = 1
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """OpenAI's newer name of max_tokens."""

    def call(self, llama: EntropyLlama) -> Any:
        """Generate: a response, or an iterator of chunks."""
        arguments = _arguments(self, llama)
        _check_logprobs(llama, bool(self.logprobs))
        if self.max_tokens is None:
            arguments["max_tokens"] = self.max_completion_tokens
        return llama.create_chat_completion(**arguments)


def _arguments(request: CompletionRequest | ChatRequest, llama: EntropyLlama) -> dict[str, Any]:
    arguments = request.model_dump(exclude=set(_NOT_ARGUMENTS))
    processors = []
    if request.logit_bias:
        processors.append(_bias(_token_biases(request, llama)))
    if request.min_tokens > 0:
        processors.append(llama_cpp.MinTokensLogitsProcessor(request.min_tokens, llama.token_eos()))
    if processors:
        # not as logit_bias: llama-cpp-python drops both where there is another processor
        arguments["logits_processor"] = llama_cpp.LogitsProcessorList(processors)
    if request.grammar is not None:
        arguments["grammar"] = LlamaGrammar.from_string(request.grammar, verbose=False)
    return arguments


def _check_logprobs(llama: EntropyLlama, wanted: bool) -> None:
    if wanted and not llama._logits_all:
        raise RequestError(
            400, "logprobs: only a server started with --logits_all true has them", param="logprobs"
        )


def _token_biases(
    request: CompletionRequest | ChatRequest, llama: EntropyLlama
) -> dict[int, float]:
    """Token id -> what is added to its logit; RequestError for what is not in the vocabulary."""
    biases: dict[int, float] = {}
    for key, bias in (request.logit_bias or {}).items():
        if request.logit_bias_type == "tokens":
            ids = llama.tokenize(key.encode("utf-8"), add_bos=False, special=True)
        else:
            ids = [int(key)] if key.isascii() and key.isdigit() and len(key) < 10 else [-1]
        if not all(0 <= token < llama.n_vocab() for token in ids):
            raise RequestError(
                400,
                f"logit_bias: {key!r} is no token; they are 0 to {llama.n_vocab() - 1}",
                param="logit_bias",
            )
        if not math.isfinite(bias) or abs(bias) > 1000.0:
            raise RequestError(
                400, f"logit_bias: {bias} is not between -1000 and 1000", param="logit_bias"
            )
        biases.update(dict.fromkeys(ids, bias))
    return biases


def _bias(biases: dict[int, float]) -> Any:
    ids = np.array(list(biases), dtype=np.intp)
    values = np.array(list(biases.values()), dtype=np.single)

    def add(_: Any, scores: Any) -> Any:
        scores[ids] += values
        return scores

    return add
