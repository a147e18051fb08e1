"""What EntropyLlama and attach() are asked for, and what of llama_cpp.Llama a budget excludes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import llama_cpp
from llama_cpp import llama_chat_format

from entropykv.errors import SettingsError
from entropykv.llamacpp.context import GGML_TYPES
from entropykv.policy.names import AUTO
from entropykv.profile.profile import EntropyProfile
from entropykv.session.recovery import Climb, Recovery
from entropykv.settings.cores import usable_cores
from entropykv.settings.freezing import Freezing, check_freezing
from entropykv.settings.options import Budget, Settings, at_least

_IMAGE_HANDLERS = (llama_chat_format.Llava15ChatHandler, llama_chat_format.MTMDChatHandler)
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


_OF_POOL = ("n_sequences", "park", "park_limit")


@dataclass(frozen=True)
class EvictionEvent:
    """What one decode call dropped, of all KV heads."""

    evicted: int
    """Entries evicted in this call."""
    kept: int
    """Entries kept now."""
    position: int
    """Tokens read so far."""


@dataclass(frozen=True)
class BudgetArguments:
    """What EntropyLlama takes besides the arguments of llama_cpp.Llama; see Session."""

    kv_budget: Budget | str | float = 1.0
    policy: str = AUTO
    entropy_config: EntropyProfile | str | PathLike[str] | None = None
    kv_type: str = "auto"
    store: str = "auto"
    n_sinks: int = 4
    recent_window: int | None = None
    freeze: Freezing | str | None = None
    on_evict: Callable[[EvictionEvent], object] | None = None
    repeatable: bool = True
    recovery: Recovery | None = None
    on_climb: Callable[[Climb], object] | None = None
    n_sequences: int | None = None
    park: str = "ram"
    park_limit: str | int | None = None

    def __post_init__(self) -> None:
        """Raise SettingsError for a ladder that would take back what Llama has given out."""
        if self.recovery is not None and self.recovery.held_back:
            raise SettingsError(
                "recovery that generates tokens again is not possible with EntropyLlama, which "
                "gives out every token at once; use Recovery(highest=Rung.FULL), or a Session"
            )

    def with_types(self, arguments: Mapping[str, Any]) -> BudgetArguments:
        """With the kv_type of Llama's type_k and type_v, where they agree and kv_type is `auto`."""
        wanted = {arguments.get("type_k"), arguments.get("type_v")} - {None}
        names = [name for name, number in GGML_TYPES.items() if {number} == wanted]
        return replace(self, kv_type=names[0]) if self.kv_type == "auto" and names else self

    def of_session(self) -> dict[str, Any]:
        """Return the arguments that Session takes, too."""
        ours = ("on_evict", "repeatable", *_OF_POOL)
        return {name: value for name, value in vars(self).items() if name not in ours}

    def of_pool(self) -> dict[str, Any]:
        """Return the arguments that Pool takes, too."""
        ours = ("on_evict", "repeatable", "recovery", "on_climb")
        return {name: value for name, value in vars(self).items() if name not in ours}


def llama_arguments(given: Mapping[str, Any], budget: BudgetArguments) -> dict[str, Any]:
    """All arguments of llama_cpp.Llama, checked; raises SettingsError for those that cannot work.

    Llama itself ignores names that it does not know.
    """
    unknown = sorted(given.keys() - _DEFAULTS.keys())
    if unknown:
        raise SettingsError(
            f"{unknown[0]} is no argument of EntropyLlama; use those of llama_cpp.Llama and "
            f"{', '.join(BudgetArguments.__dataclass_fields__)}"
        )
    arguments = {**_DEFAULTS, **given}
    for name in ("n_threads", "n_threads_batch"):  # Llama's own default counts all of the machine
        arguments[name] = arguments[name] or usable_cores()
    at_least("n_batch", arguments["n_batch"], 1)
    Settings(
        kv_type=budget.kv_type,
        store=budget.store,
        n_ctx=arguments["n_ctx"],
        n_ubatch=arguments["n_ubatch"],
        n_threads=arguments["n_threads"] or 0,
        n_threads_batch=arguments["n_threads_batch"] or 0,
        n_gpu_layers=arguments["n_gpu_layers"],
        n_sinks=budget.n_sinks,
        recent_window=budget.recent_window,
    )
    check_freezing(Freezing.parse(budget.freeze), budget.store, budget.kv_type)
    check_kind(
        embedding=arguments["embedding"],
        vocab_only=arguments["vocab_only"],
        attention_type=arguments["attention_type"],
    )
    check_chat_handler(arguments["chat_handler"])
    for name in ("type_k", "type_v"):
        wanted = arguments[name]
        if wanted is not None and wanted != GGML_TYPES.get(budget.kv_type):
            raise SettingsError(
                f"{name} is {wanted} but kv_type is {budget.kv_type!r}; leave {name} out, and give "
                f"kv_type as one of {', '.join(GGML_TYPES)}"
            )
    return arguments


def check_kind(*, embedding: bool, vocab_only: bool, attention_type: int) -> None:
    """Raise SettingsError for a Llama that does not read a causal sequence."""
    refused = {
        "embedding=True": embedding,
        "vocab_only=True": vocab_only,
        "a non-causal attention_type": attention_type == llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL,
    }
    for what, given in refused.items():
        if given:
            raise SettingsError(
                f"{what} does not generate text, and has no KV cache to save; use llama_cpp.Llama"
            )


def check_chat_handler(handler: Any) -> None:
    """Raise SettingsError for a handler that decodes images in the context by itself."""
    if isinstance(handler, _IMAGE_HANDLERS):
        raise SettingsError(
            f"{type(handler).__name__} reads images into llama.cpp's own cache, not into a KV "
            "budget; use llama_cpp.Llama for images"
        )


def check_draft_model(draft_model: Any, may_evict: bool) -> None:
    """Raise SettingsError where what a wrong draft evicts could not be brought back."""
    if draft_model is not None and may_evict:
        raise SettingsError(
            "draft_model takes back the tokens that it guessed wrong, but what they evicted does "
            "not come back; use kv_budget=1.0 or no draft_model"
        )
