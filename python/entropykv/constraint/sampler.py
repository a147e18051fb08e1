"""Sample only tokens that a constraint allows, as a sampler of llama.cpp."""

from __future__ import annotations

import ctypes
import json
import math
import time
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from entropykv.constraint.constraint import SCHEMA, Constraint
from entropykv.constraint.vocabulary import TokenTexts
from entropykv.errors import SettingsError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""The layout of a llama_token_data of llama.cpp."""

LIMITS_OF_GRAMMARS = {
    "max_items_in_row": 500,
    "step_max_items": 20_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 250_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""llguidance's limits of what a constraint may cost, at every token and in memory.

An item is one way to parse the text so far. What an ambiguous grammar costs grows with the square
of their number: 500 items take 20 ms at one token, and 2,000 would take 300 ms.
"""
LIMITS_OF_SCHEMAS = {**LIMITS_OF_GRAMMARS, "max_items_in_row": 1_200, "step_max_items": 50_000}
"""The limits of JSON schemas, which allow more items, because an object has four items for every
property that may be the next one.
"""
MOST_SECONDS = 1.0
"""The most processor seconds that one token may take. This is the last bound, for constraints that
stay below the limits of items and take long all the same, such as a schema with 300 alternatives
that are arrays of itself.
"""


def limits_of(kind: str) -> dict[str, Any]:
    """Return the limits of a kind of constraint."""
    return LIMITS_OF_SCHEMAS if kind == SCHEMA else LIMITS_OF_GRAMMARS


def _limits(kind: str) -> LLParserLimits:
    from llguidance import LLParserLimits  # noqa: PLC0415  # Few texts need it.

    return LLParserLimits(**limits_of(kind))


def compiled(constraint: Constraint, texts: TokenTexts) -> LLMatcher:
    """Compile a constraint for a vocabulary; Python's interpreter lock is released meanwhile.

    Raises SettingsError for a constraint that cannot be used.
    """
    from llguidance import LLMatcher  # noqa: PLC0415

    grammar = constraint.compiled(texts.token_of, texts.ends)
    matcher = LLMatcher(texts.tokenizer, grammar, log_level=0, limits=_limits(constraint.kind))
    if matcher.is_error():
        raise constraint.refused(matcher.get_error(), _reason)
    return matcher


class ConstraintSampler:
    """Provide a llama_sampler; the chain that it is added to must be freed before this object.

    An error within a call of llama.cpp is stored for check(), which must be called after every
    llama_sampler_apply() and llama_sampler_accept().
    """

    def __init__(self, constraint: Constraint, texts: TokenTexts) -> None:
        """Compile a constraint for a vocabulary; raises SettingsError for one that cannot be
        used.
        """
        matcher = compiled(constraint, texts)
        self._calls = _Calls(matcher, texts.tokenizer.vocab_size, constraint.kind)
        self._interface = llama_cpp.llama_sampler_i(
            name=llama_cpp.llama_sampler_i_name(lambda _: b"entropykv-constraint"),
            apply=llama_cpp.llama_sampler_i_apply(self._calls.apply),
            accept=llama_cpp.llama_sampler_i_accept(self._calls.accept),
        )

    def handle(self) -> Any:
        """Return a new llama_sampler, which the sampler chain frees."""
        return llama_cpp.llama_sampler_init(ctypes.pointer(self._interface), None)

    def check(self) -> None:
        """Raise and forget the error of the latest calls, mostly SettingsError, if there was
        one.
        """
        error, self._calls.error = self._calls.error, None
        if error is not None:
            raise error


class _Calls:
    """Implement the callbacks of llama_sampler; they do not refer to the ConstraintSampler, so that
    no reference cycle delays its end.
    """

    def __init__(self, matcher: LLMatcher, n_tokens: int, kind: str) -> None:
        self._matcher = matcher
        self._kind = kind
        self._mask = np.zeros((n_tokens + 31) // 32, np.uint32)
        self.error: BaseException | None = None

    def apply(self, _: Any, candidates: Any) -> None:
        start = time.thread_time()
        try:
            array = candidates.contents
            self._apply(_array_of(array), is_in_order=not array.sorted)
            self._check_time(start)
        except BaseException as error:  # An exception must not pass through llama.cpp.
            self.error = error

    def accept(self, _: Any, token: int) -> None:
        if self.error is not None:
            return
        start = time.thread_time()
        try:
            if not self._matcher.consume_token(token):
                raise self._failed()
            self._check_time(start)
        except BaseException as error:
            self.error = error

    def _apply(self, data: Any, *, is_in_order: bool) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():  # The mask would say that the text may end.
            raise self._failed()
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little").view(bool)
        if is_in_order and data["id"][-1] == len(data) - 1:
            allowed = allowed[: len(data)]
        else:
            allowed = allowed[data["id"]]
        np.copyto(data["logit"], -math.inf, where=~allowed)

    def _check_time(self, start: float) -> None:
        if time.thread_time() - start > MOST_SECONDS:
            raise SettingsError(
                f"the {self._kind} takes more than {MOST_SECONDS:g} s for one token; make it "
                "smaller, or less ambiguous"
            )

    def _failed(self) -> SettingsError:
        reason = self._matcher.get_error().partition("\n")[0]
        if "NoExtension" in reason or not reason:
            return SettingsError(
                f"the {self._kind} allows no token here, and the text may not end either; give "
                "one that a text can follow"
            )
        if "items" in reason:
            reason = "it is too large or too ambiguous, as a text may be meant in too many ways"
        return SettingsError(f"the {self._kind} cannot be followed any further: {reason}")


def _array_of(candidates: Any) -> Any:
    """Return the candidates of a llama_token_data_array as an array that shares their memory."""
    address = ctypes.cast(candidates.data, ctypes.c_void_p).value or 0
    size = candidates.size * CANDIDATE.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), CANDIDATE)


def _reason(schema: Any) -> str:
    """Return what llguidance says against a schema; "" if nothing."""
    from llguidance import LLMatcher  # noqa: PLC0415

    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    return LLMatcher.validate_grammar(grammar, limits=_limits(SCHEMA))
