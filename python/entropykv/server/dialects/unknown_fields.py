"""Say which fields the requests of an API may have besides those that are read here: OtherFields.

Some change no answer, and are accepted; others ask for what is not done here, and are refused by
name, as is every field that nobody has declared.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import AliasChoices, BaseModel

from entropykv.server.http.errors import RequestError

_MOST_NAMES, _MOST_NAME = 3, 64
"""The most fields that a refusal names, and characters of each."""


def _is_off(value: Any) -> bool:
    return not value or (isinstance(value, int | float) and value <= 0)


def _is_true(value: Any) -> bool:
    return value is True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Refusal = tuple[Callable[[Any], bool], str]
"""Which values of a field change nothing, and what to do instead of others."""


@dataclass(frozen=True)
class OtherFields:
    """Declare the fields that requests of one API may have, and that are not read."""

    without_effect: frozenset[str]
    """Fields that change no answer."""
    refused: Mapping[str, Refusal]

    def besides(self, refused: Mapping[str, str]) -> OtherFields:
        """Return the declaration of an API that has more fields, with what to do instead of each;
        those that are off may be there.
        """
        more = {name: (_is_off, instead) for name, instead in refused.items()}
        return OtherFields(self.without_effect, {**self.refused, **more})


_WITHOUT_EFFECT = frozenset(
    (
        # OpenAI and Anthropic have these: who asks, what is kept or charged, how fast it goes.
        *("cache_control", "client_metadata", "include", "inference_geo", "metadata", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        *("store", "user"),
        # llama-server's page sends these, and clients of vLLM.
        *("api_key", "priority", "spaces_between_special_tokens"),
        # Ollama has these, and Open WebUI sends them to others: how a model is loaded, how long.
        *("keep_alive", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread"),
        *("use_mlock", "use_mmap"),
    )
)
_REFUSED: dict[str, Refusal] = {
    # llama-server has these.
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
    # OpenAI's.
    "truncation": (lambda value: value == "disabled", "a text that is too long is refused"),
    "web_search_options": (_is_off, "nothing is searched here; give a tool"),
    # OpenRouter's, as LibreChat sends it.
    "include_reasoning": (_is_true, "thoughts have a field of their own; read the other one"),
    # Ollama's.
    "shift": (_is_off, "an answer ends where the context does"),
    "truncate": (_is_off, "a text that is too long is refused"),
    # vLLM's and SGLang's.
    "length_penalty": (lambda value: value == 1, "answers are not searched by beams; leave it out"),
    "skip_special_tokens": (_is_true, "control tokens are not shown; leave it out"),
    "stop_token_ids": (_is_off, "give texts as stop"),
    "use_beam_search": (_is_off, "tokens are sampled; leave it out"),
}
OTHERS = OtherFields(_WITHOUT_EFFECT, _REFUSED)
"""Those of OpenAI's completions and chats, of llama-server, and of Ollama, whose clients send them
to all routes.
"""


def check_names(
    model: type[BaseModel], body: Mapping[str, Any], *, ignores_unknown: bool = False
) -> None:
    """Raise RequestError (400) for fields of a body that the model of a request does not have; its
    `other_fields` are those of its API.

    Fields that ask for nothing (null, false, an empty text, list or object) may be there, and so
    may those whose value does not change the answer. `ignores_unknown`: refuse only fields that are
    known to be impossible here.
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
    """Return the names and aliases of a model's fields."""
    names = set(model.model_fields)
    for field in model.model_fields.values():
        alias = field.validation_alias
        given = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names.update(each for each in given if isinstance(each, str))
    return frozenset(names)
