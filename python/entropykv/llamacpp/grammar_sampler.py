"""Sample only tokens that a grammar allows, within limits of time and memory, and stoppable.

llama.cpp's own grammar sampler keeps a separate stack for every possible parse of a text. Ambiguous
rules of a few hundred bytes create millions of stacks, and a call cannot be stopped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import llama_cpp

from entropykv._core import GrammarLimits, GrammarMatcher, TokenTrie
from entropykv.errors import SettingsError


class GrammarSampler:
    """Provide a llama_sampler; the chain that it is added to must be freed before this object.

    An error within a call of llama.cpp is stored for check(), which must be called after every
    llama_sampler_apply() and llama_sampler_accept().
    """

    def __init__(
        self,
        grammar: str,
        vocabulary: Any,
        trie: TokenTrie,
        *,
        root: str = "root",
        poll: Callable[[], object] | None = None,
        limits: GrammarLimits | None = None,
    ) -> None:
        """Read a grammar in llama.cpp's notation (GBNF).

        `vocabulary` is the llama_vocab whose token texts are in `trie`. `poll` is called every few
        milliseconds while the allowed tokens are computed; an exception that it raises ends the
        computation, and check() raises it again. Raises SettingsError for an invalid grammar, or
        one that is too ambiguous or too large.
        """
        try:
            matcher = GrammarMatcher(
                grammar.encode("utf-8"),
                root,
                trie,
                limits or GrammarLimits(),
                partial(_token_of, vocabulary),
                poll or _handle_signals,
            )
        except ValueError as error:
            raise _refused(error) from None
        self._calls = _Calls(matcher)
        self._interface = llama_cpp.llama_sampler_i(
            name=llama_cpp.llama_sampler_i_name(lambda _: b"entropykv-grammar"),
            apply=llama_cpp.llama_sampler_i_apply(self._calls.apply),
            accept=llama_cpp.llama_sampler_i_accept(self._calls.accept),
        )

    def handle(self) -> Any:
        """Return a new llama_sampler, which the sampler chain frees."""
        return llama_cpp.llama_sampler_init(ctypes.pointer(self._interface), None)

    def check(self) -> None:
        """Raise the error of the latest call: SettingsError, or the exception that `poll`
        raised.
        """
        error, self._calls.error = self._calls.error, None
        if isinstance(error, ValueError):
            raise _refused(error) from None
        if error is not None:
            raise error


class _Calls:
    """Implement the callbacks of llama_sampler; without a reference to the sampler, both are freed
    at once.
    """

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self.error: BaseException | None = None

    def apply(self, _: Any, candidates: Any) -> None:
        array = candidates.contents
        address = ctypes.cast(array.data, ctypes.c_void_p).value
        try:
            self._matcher.apply(address or 0, array.size)
        except BaseException as error:  # An exception must not pass through llama.cpp.
            self.error = error

    def accept(self, _: Any, token: int) -> None:
        if self.error is not None:
            return
        try:
            self._matcher.accept(token)
        except BaseException as error:
            self.error = error


def _token_of(vocabulary: Any, text: str) -> int | None:
    """Return the token whose text is exactly `text`, such as <think>; None if there is no single
    one.
    """
    data = text.encode("utf-8")
    tokens = (llama_cpp.llama_token * 2)()
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), tokens, len(tokens), False, True)
    return int(tokens[0]) if count == 1 else None


def _handle_signals() -> None:
    """Let Python handle signals, such as Ctrl-C; the default of `poll`."""


def _refused(error: ValueError) -> SettingsError:
    return SettingsError(f"the grammar cannot be used: {error}")
