"""Define limits and types of the fields of requests, those of samplers, and checks of bodies.

Texts that the model reads (prompts, messages) have no limit of their own: the bytes of the body and
the tokens of the context limit them. Lists are validated up to their first error, because a body of
a megabyte can hold hundreds of thousands of invalid items.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from entropykv.server.http.errors import RequestError
from entropykv.settings.options import declared
from entropykv.settings.sampling import (
    SAMPLER_LETTERS,
    SAMPLERS,
    Sampling,
    is_random_seed,
    new_seed,
)
from entropykv.thinking.tags import MOST_MESSAGE

MOST_NAME = 256
"""The most characters of a name or an id: model, user, conversation, function, call."""
MOST_DESCRIPTION = 65_536
"""The most characters of a description of a tool or a schema."""
MOST_STOPS, MOST_STOP = 64, 1_024
"""The most strings of `stop`, and characters of each: all are searched after every token."""
MOST_BIASES = 4_096
"""The most tokens of `logit_bias`."""
MOST_METADATA = 16
"""The most entries of `metadata`; names have up to 64 characters, values 512, as in
OpenAI's API.
"""
MOST_MESSAGES = 4_096
"""The most messages of a chat, items of a response's input, and parts of a message."""
MOST_TOOLS = 128
"""The most tools of a request, and calls of a message, as in OpenAI's API."""
MOST_LOGPROBS = 100
"""The most alternatives of a token that a request may ask for, with their log probabilities."""
MOST_GRAMMAR = 1 << 20
"""The most characters of `grammar`; its complexity is limited by the parser."""
MOST_SUFFIX = 65_536
"""The most characters of `suffix`, which every choice reads."""
MOST_TEMPLATE_ARGUMENTS = 64
"""The most members of `chat_template_kwargs`."""
MOST_SAMPLERS = 32
"""The most samplers of a chain."""
MOST_BREAKERS, MOST_BREAKER = 64, 128
"""The most texts at which repetitions end, and characters of each."""
MOST_NUMBER = 1000.0
"""The largest value of a sampler's setting, such as a temperature."""
MOST_TOKENS = (1 << 31) - 1
MOST_PIECES = 65_536
"""The most tokens that /tokenize returns with their pieces; each is a separate object."""
MOST_DEPTH = 128
"""The deepest nesting of objects and lists in a body, because templates and tools read it
recursively.
"""
MOST_VALUES = 50_000
"""The most objects, lists and members of objects in a body; in memory they take up to 30 times the
bytes of the body.
"""
FIRST_ERROR = Field(fail_fast=True)
"""Marks a list that is validated up to its first error."""


def _few(most: int) -> BeforeValidator:
    """Return a validator that refuses an object with more than `most` members before any of them is
    validated.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError(
                "too_long",
                "it has {given} members, and {most} are the most",
                {"given": len(value), "most": most},
            )
        return value

    return BeforeValidator(check)


Name = Annotated[str, Field(max_length=MOST_NAME)]
Description = Annotated[str, Field(max_length=MOST_DESCRIPTION)]
Stop = Annotated[
    list[Annotated[str, Field(max_length=MOST_STOP)]],
    Field(max_length=MOST_STOPS),
    FIRST_ERROR,
    BeforeValidator(
        lambda stop: [stop] if isinstance(stop, str) else stop,
        json_schema_input_type=str | list[str],
    ),
    AfterValidator(lambda stop: [each for each in stop if each]),
]
"""Texts that end an answer. Empty ones are left out, because they would end it before it begins."""
Tokens = Annotated[list[int], FIRST_ERROR]
_Mixed = Annotated[list[int | str], FIRST_ERROR]
PromptField = (
    str
    | Tokens
    | Annotated[list[str], FIRST_ERROR]
    | Annotated[list[Tokens], FIRST_ERROR]
    | _Mixed
    | Annotated[list[str | _Mixed], FIRST_ERROR]
)
"""One prompt (a text, a list of tokens, or a list of texts and tokens), or a list of prompts. As in
llama-server, a list with a token in it is one prompt.
"""


def _pairs(given: Any) -> Any:
    """Return biases as pairs of a token, or a text, and its bias."""
    return list(given.items()) if isinstance(given, dict) else given


Biases = Annotated[
    list[tuple[int | Name, float | Literal[False]]],
    Field(max_length=MOST_BIASES),
    FIRST_ERROR,
    BeforeValidator(_pairs, json_schema_input_type=dict[str, float | bool] | list[Any]),
]
"""What is added to the logits of tokens: an object of tokens by their numbers, as in OpenAI's API,
or a list of pairs, in which a text stands for all of its tokens, as in llama-server's. False
forbids a token.
"""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    _few(MOST_METADATA),
]
Seed = Annotated[
    int,
    Field(ge=-(1 << 63), lt=1 << 64),
    AfterValidator(lambda seed: new_seed() if is_random_seed(seed) else seed),
]
"""A seed; -1 means another one every time."""
TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
TokenLimit = Annotated[int, Field(ge=-2, le=MOST_TOKENS)]
"""The most tokens of an answer. 0: the prompt is only read; -1, and llama.cpp's -2: until the model
or the context ends.
"""
RepeatPenalty = Annotated[float, Field(gt=0)]
"""The penalty of repetitions; 1, the default as in llama-server, is none. The default of
llama_cpp.server, 1.1, prevents repetitions that were asked for.
"""


_OF_TEMPLATES = frozenset(
    {"messages", "tools", "functions", "function_call", "tool_choice", "bos_token", "eos_token"}
    | {"add_generation_prompt", "raise_exception", "strftime_now", "llama", "self"}
)
"""Variables of a chat template that the server sets itself."""


def _free_names(value: Any) -> Any:
    """Refuse template arguments with a name that the server uses."""
    taken = sorted(_OF_TEMPLATES & value.keys()) if isinstance(value, dict) else []
    if taken:
        raise PydanticCustomError(
            "taken",
            "{name} is what the server tells the template; leave it out",
            {"name": taken[0]},
        )
    return value


TemplateArguments = Annotated[
    dict[Name, Any], _few(MOST_TEMPLATE_ARGUMENTS), BeforeValidator(_free_names)
]
ThoughtBudget = Annotated[int, Field(ge=-1, le=MOST_TOKENS)]
ThoughtEnding = Annotated[str, Field(max_length=MOST_MESSAGE)]


_OF_LETTERS = {letter: name for name, letter in SAMPLER_LETTERS.items()}
_OTHER_NAMES = {"typical_p": "typ_p", "typ-p": "typ_p", "top-k": "top_k", "top-p": "top_p"}


def _sampler_names(given: Any) -> Any:
    """Return names of samplers for the letters that stand for them, and for their other names."""
    if isinstance(given, str):
        return [_OF_LETTERS.get(letter, letter) for letter in given[: MOST_SAMPLERS + 1]]
    if isinstance(given, list):
        return [_OTHER_NAMES.get(each, each) if isinstance(each, str) else each for each in given]
    return given


def _known_sampler(name: str) -> str:
    """Refuse a sampler that does not exist."""
    if name not in SAMPLERS:
        names = {"names": ", ".join(SAMPLERS)}
        raise PydanticCustomError("unknown", "there is no such sampler; use some of {names}", names)
    return name


Samplers = Annotated[
    list[Annotated[str, AfterValidator(_known_sampler)]],
    Field(max_length=MOST_SAMPLERS),
    FIRST_ERROR,
    BeforeValidator(_sampler_names, json_schema_input_type=str | list[str]),
]
Breakers = Annotated[
    list[Annotated[str, Field(max_length=MOST_BREAKER)]],
    Field(min_length=1, max_length=MOST_BREAKERS),
    FIRST_ERROR,
]


def sampler(name: str, default: Any = None, *, least: float = 0, description: str = "") -> Any:
    """Return the pydantic field of a request for the field `name` of Sampling, with the same
    limits.

    Numbers that Sampling does not limit are from `least` to MOST_NUMBER in requests.
    """
    said = declared(Sampling)[name]
    limits = (least, MOST_NUMBER) if said.least is None else (said.least, said.most)
    return Field(default=default, ge=limits[0], le=limits[1], description=description or None)


class SamplerFields(BaseModel):
    """Hold samplers that OpenAI's requests do not know, and further fields of llama-server."""

    typical_p: float | None = sampler("typical_p")
    top_n_sigma: float | None = sampler("top_n_sigma", least=-1)
    xtc_probability: float | None = sampler("xtc_probability")
    xtc_threshold: float | None = sampler("xtc_threshold")
    dynatemp_range: float | None = sampler("dynatemp_range")
    dynatemp_exponent: float | None = sampler("dynatemp_exponent")
    repeat_last_n: int | None = sampler("repeat_last_n")
    dry_multiplier: float | None = sampler("dry_multiplier")
    dry_base: float | None = sampler("dry_base", least=1)
    dry_allowed_length: int | None = sampler("dry_allowed_length")
    dry_penalty_last_n: int | None = sampler("dry_penalty_last_n")
    dry_sequence_breakers: Breakers | None = None
    samplers: Samplers | None = Field(
        default=None, description="Which samplers there are, in their order, or their letters."
    )
    ignore_eos: bool = Field(default=False, description="Never end the text by a token.")
    cache_prompt: bool = Field(
        default=True, description="Whether a prompt goes on from what was read of it before."
    )
    id_slot: int | None = Field(
        default=None,
        ge=-1,
        le=MOST_TOKENS,
        description="Changes nothing: each request gets the slot that is free, and finds what was "
        "read of its text in whatever slot it was.",
    )


def check_values(body: Any) -> None:
    """Raise RequestError (400) for JSON that is nested too deeply, or has too many values.

    Numbers and texts in a list do not count, because a prompt may be a list of tokens.
    """
    n_values = 0
    rest = [(body, 1)]
    while rest:
        value, depth = rest.pop()
        if depth > MOST_DEPTH:
            raise RequestError(
                400, f"the body has more than {MOST_DEPTH} objects and lists within each other"
            )
        inner: Any = value
        n_values += 1
        if isinstance(value, dict):
            n_values += len(value)
            inner = value.values()
        elif not isinstance(value, list):
            continue
        nested = ((each, depth + 1) for each in inner if isinstance(each, dict | list))
        rest.extend(islice(nested, MOST_VALUES))
        if n_values + len(rest) > MOST_VALUES:
            raise RequestError(
                400,
                f"the body has more than {MOST_VALUES:,} objects, lists and members of objects; "
                "send less at a time",
            )


_MOST_NAMES, _MOST_NAME = 3, 64
"""The most fields that a refusal names, and characters of each."""


def _is_off(value: Any) -> bool:
    return not value or (isinstance(value, int | float) and value <= 0)


def _is_true(value: Any) -> bool:
    return value is True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Refusal = tuple[Callable[[Any], bool], str]
"""A function that tells whether a value of a field changes nothing, and what to do instead of
sending another value.
"""


@dataclass(frozen=True)
class OtherFields:
    """Declare the fields that requests of one API may have, and that are not read.

    Some change no answer, and are accepted; others ask for what is not done here, and are refused
    by name: see check_names().
    """

    without_effect: frozenset[str]
    """Fields that change no answer."""
    refused: Mapping[str, Refusal]

    def besides(self, refused: Mapping[str, str]) -> OtherFields:
        """Return the declaration of an API with further fields, which are refused; `refused` says
        what to do instead of each. Values that switch a field off (null, false, empty, 0 or less)
        are accepted.
        """
        more = {name: (_is_off, instead) for name, instead in refused.items()}
        return OtherFields(self.without_effect, {**self.refused, **more})


_WITHOUT_EFFECT = frozenset(
    (
        # OpenAI's and Anthropic's fields for who asks, what is kept or charged, and how fast it
        # goes.
        *("cache_control", "client_metadata", "include", "inference_geo", "metadata", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        *("store", "user"),
        # Fields that llama-server's page and clients of vLLM send.
        *("api_key", "priority", "spaces_between_special_tokens"),
        # Ollama's fields for how and how long a model is loaded; Open WebUI sends them to all
        # servers.
        *("keep_alive", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread"),
        *("use_mlock", "use_mmap"),
    )
)
_REFUSED: dict[str, Refusal] = {
    # Fields of llama-server.
    "min_keep": (_is_off, "samplers keep at least one token; leave it out"),
    "adaptive_target": (lambda value: not _is_number(value) or value < 0, "use temperature"),
    "post_sampling_probs": (_is_off, "probabilities are those before sampling; leave it out"),
    "backend_sampling": (_is_off, "tokens are chosen on the CPU; leave it out"),
    "image_data": (_is_off, "send images as prompt.multimodal_data, or in a chat"),
    "system_prompt": (_is_off, "write it into the prompt, or send a chat"),
    "lora": (_is_off, "adapters stay as they are; start the server with --lora"),
    "grammar_lazy": (_is_off, "a grammar describes all of the answer; leave it out"),
    "t_max_predict_ms": (_is_off, "limit the tokens (n_predict), or close the connection"),
    "n_indent": (_is_off, "ask for indentation by a grammar"),
    # Fields of OpenAI's API.
    "truncation": (lambda value: value == "disabled", "a text that is too long is refused"),
    "web_search_options": (_is_off, "nothing is searched here; give a tool"),
    # A field of OpenRouter that LibreChat sends.
    "include_reasoning": (_is_true, "thoughts have a field of their own; read the other one"),
    # Fields of Ollama.
    "shift": (_is_off, "an answer ends where the context does"),
    "truncate": (_is_off, "a text that is too long is refused"),
    # Fields of vLLM and SGLang.
    "length_penalty": (lambda value: value == 1, "answers are not searched by beams; leave it out"),
    "skip_special_tokens": (_is_true, "control tokens are not shown; leave it out"),
    "stop_token_ids": (_is_off, "give texts as stop"),
    "use_beam_search": (_is_off, "tokens are sampled; leave it out"),
}
OTHERS = OtherFields(_WITHOUT_EFFECT, _REFUSED)
"""The declared fields of several APIs that are not read; clients send them to all routes."""


def check_names(
    model: type[BaseModel], body: Mapping[str, Any], *, ignores_unknown: bool = False
) -> None:
    """Raise RequestError (400) for fields of a body that `model`, the class of the request, does
    not have; the class's `other_fields`, else OTHERS, declares further fields of the API.

    Undeclared fields that ask for nothing (null, false, an empty text, list or object) may be
    there, and so may declared ones whose value does not change the answer. `ignores_unknown`:
    refuse only fields that are known to be impossible here.
    """
    names, unknown = _names_of(model), []
    others: OtherFields = getattr(model, "other_fields", OTHERS)
    for name, value in body.items():
        if value is None or name in names or name in others.without_effect:
            continue
        changes_nothing, instead = others.refused.get(name, (_asks_nothing, ""))
        if changes_nothing(value):
            continue
        if instead:
            raise RequestError(400, f"{name}: it is not possible here; {instead}", param=name)
        unknown.append(name)
    if unknown and not ignores_unknown:
        shown = ", ".join(name[:_MOST_NAME] for name in unknown[:_MOST_NAMES])
        if len(unknown) > _MOST_NAMES:
            shown += f" and {len(unknown) - _MOST_NAMES} more"
        raise RequestError(
            400,
            f"{shown}: there is no such field{_similar(unknown[0], names)}; leave it out, or start "
            "the server with --ignore-unknown-fields true",
            param=unknown[0][:_MOST_NAME],
        )


def _asks_nothing(value: Any) -> bool:
    return value is False or value in ("", [], {})


def _similar(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name[:_MOST_NAME], known, 1, 0.75)
    return f" (did you mean {close[0]}?)" if close else ""


@cache
def _names_of(model: type[BaseModel]) -> frozenset[str]:
    """Return the names and aliases of the fields of a request's class."""
    names = set(model.model_fields)
    for field in model.model_fields.values():
        alias = field.validation_alias
        given = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names.update(each for each in given if isinstance(each, str))
    return frozenset(names)
