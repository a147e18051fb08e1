"""Split the arguments of EntropyLlama and attach(), and refuse those that a budget excludes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import llama_cpp
from llama_cpp.llama_grammar import LlamaGrammar

from entropykv.constraint.constraint import Constraint
from entropykv.errors import SettingsError
from entropykv.llamacpp.context import GGML_PAIRS, kv_type_of_numbers
from entropykv.session.recovery import Climb
from entropykv.settings.cache_options import CacheArguments, CacheOptions
from entropykv.settings.cores import usable_cores
from entropykv.settings.freezing import check_freezing
from entropykv.settings.options import Budget, at_least
from entropykv.settings.sampling import SAMPLERS, Sampling

_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


_OURS = frozenset(each.name for each in fields(CacheOptions) if each.init)
_SHARED = _OURS & _DEFAULTS.keys()
"""Fields of CacheOptions that llama_cpp.Llama has under the same name."""


@dataclass(frozen=True)
class EvictionEvent:
    """Hold how many entries one decode call evicted, counted over all KV heads."""

    evicted: int
    """How many entries were evicted in this call."""
    kept: int
    """How many entries are kept now."""
    position: int
    """How many tokens were read so far."""


@dataclass(frozen=True)
class BudgetArguments:
    """Hold the cache options of an EntropyLlama, and its own further arguments."""

    cache: CacheOptions
    on_evict: Callable[[EvictionEvent], object] | None = None
    repeatable: bool = True
    on_climb: Callable[[Climb], object] | None = None
    parse_special: bool = False

    def __post_init__(self) -> None:
        """Raise SettingsError for a ladder that would replace tokens that Llama has already
        returned.
        """
        recovery = self.cache.recovery
        if recovery is not None and recovery.held_back:
            raise SettingsError(
                "recovery that generates tokens again is not possible with EntropyLlama, which "
                "gives out every token at once; use Recovery(highest=Rung.FULL), or a Session"
            )

    def keywords(self) -> dict[str, Any]:
        """Return the arguments by name for EntropyLlama, without those that Llama has, too."""
        cache = {name: getattr(self.cache, name) for name in _OURS - _SHARED}
        ours = ("on_evict", "repeatable", "on_climb", "parse_special")
        return {**cache, **{name: getattr(self, name) for name in ours}}


def split_arguments(
    options: CacheOptions | None, given: Mapping[str, Any]
) -> tuple[CacheOptions, dict[str, Any]]:
    """Return the cache options in keyword arguments, and the arguments of llama_cpp.Llama.

    Arguments that both have are taken from `given`, else from `options`, else from Llama's
    defaults. Raises SettingsError for impossible combinations, and for unknown names, which Llama
    itself ignores.
    """
    unknown = sorted(given.keys() - _DEFAULTS.keys() - _OURS)
    if unknown:
        raise SettingsError(
            f"{unknown[0]} is no argument of EntropyLlama; use those of llama_cpp.Llama and "
            f"on_evict, repeatable, on_climb, parse_special, {', '.join(sorted(_OURS - _SHARED))}"
        )
    said = {} if options is None else {name: getattr(options, name) for name in _SHARED}
    arguments = {**_DEFAULTS, **said, **{n: v for n, v in given.items() if n in _DEFAULTS}}
    # Llama's own default counts all cores of the machine.
    for name in ("n_threads", "n_threads_batch"):
        arguments[name] = arguments[name] or usable_cores()
    at_least("n_batch", arguments["n_batch"], 1)
    asked = {name: value for name, value in given.items() if name in _OURS}
    for name in _SHARED - {"n_ubatch"}:
        asked[name] = arguments[name]
    cache = _with_types(CacheOptions.of(options, asked), arguments)
    arguments["n_ubatch"] = cache.micro_batch
    check_freezing(cache.freezing, cache.store, cache.kv_type)
    check_kind(
        embedding=arguments["embedding"],
        vocab_only=arguments["vocab_only"],
        attention_type=arguments["attention_type"],
    )
    return cache, arguments


def _with_types(cache: CacheOptions, arguments: Mapping[str, Any]) -> CacheOptions:
    """Return `cache`, whose kv_type `auto` becomes that of Llama's type_k and type_v; raises
    SettingsError if these differ from another kv_type.
    """
    numbers = (arguments["type_k"], arguments["type_v"])
    if cache.kv_type == "auto" and numbers != (None, None):
        return replace(cache, kv_type=kv_type_of_numbers(*numbers))
    stored = GGML_PAIRS.get(cache.kv_type, (None, None))
    for name, number, of_stored in zip(("type_k", "type_v"), numbers, stored, strict=True):
        if number is not None and number != of_stored:
            raise SettingsError(
                f"{name} is {number} but kv_type is {cache.kv_type!r}; leave {name} out, and give "
                f"kv_type as one of {', '.join(GGML_PAIRS)}"
            )
    return cache


def attached_options(kv_budget: Budget | str | float, given: Mapping[str, Any]) -> CacheOptions:
    """Return the options of attach(); raises SettingsError for a name that attach() does not have,
    such as one that the loaded model determines.
    """
    foreign = sorted(given.keys() - CacheArguments.__annotations__.keys())
    if foreign:
        raise SettingsError(
            f"{foreign[0]} is no argument of attach(), whose model is loaded already; use "
            f"{', '.join(CacheArguments.__annotations__)}, or an EntropyLlama"
        )
    return CacheOptions(kv_budget=kv_budget, **given)


def check_kind(*, embedding: bool, vocab_only: bool, attention_type: int) -> None:
    """Raise SettingsError for a Llama that generates no text from a causal sequence."""
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


def with_draft_model(budget: BudgetArguments, draft_model: Any) -> BudgetArguments:
    """Return the arguments for a Llama with a draft_model, which drafts inside the budget.

    Returns `budget` unchanged if `draft_model` is None. Raises SettingsError if the cache options
    already name a draft model.
    """
    if draft_model is None:
        return budget
    if budget.cache.spec_draft_model is not None:
        raise SettingsError(
            "draft_model and spec_draft_model both guess tokens ahead; leave one of them out"
        )
    return replace(budget, cache=replace(budget.cache, spec_draft_model=draft_model))


def sampling_of(given: Mapping[str, Any], seed: int, last_n_tokens: int) -> Sampling:
    """Return how tokens are chosen, from the arguments of llama_cpp.Llama's methods by name.

    As in llama_cpp.Llama, mirostat gets no temperature, and a temperature below 0 samples from all
    tokens. Raises SettingsError for values that Sampling or Constraint refuses.
    """
    temperature = given["temperature"] if "temperature" in given else given["temp"]
    grammar = given["grammar"]
    if isinstance(grammar, LlamaGrammar):
        grammar = Constraint.gbnf(grammar._grammar, grammar._root)
    samplers = ("penalties",) if temperature < 0.0 else SAMPLERS
    if temperature < 0.0 or (temperature > 0.0 and given["mirostat_mode"]):
        temperature = 1.0
    same = ("top_p", "min_p", "typical_p", "repeat_penalty", "frequency_penalty")
    biases = given.get("logit_bias") or {}
    return Sampling(
        temperature=temperature,
        top_k=max(-1, given["top_k"]),
        presence_penalty=given["presence_penalty"],
        mirostat=given["mirostat_mode"],
        mirostat_tau=given["mirostat_tau"],
        mirostat_eta=given["mirostat_eta"],
        repeat_last_n=last_n_tokens,
        logit_bias=tuple((int(token), float(bias)) for token, bias in biases.items()),
        seed=seed,
        grammar=grammar,
        samplers=samplers,
        **{name: given[name] for name in same},
    )
