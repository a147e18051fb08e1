"""Sample only what a grammar allows, within limits, and so that it can be stopped.

llama.cpp's own sampler of grammars holds every way in which a text may be meant as a stack of its
own. Ambiguous rules of a few hundred bytes make millions of them, and a call of it cannot be
stopped.
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
    """Be a llama_sampler; the chain that it is added to must be freed before this.

    What goes wrong within a call of llama.cpp is kept for check(), which must be called after
    every llama_sampler_apply() and llama_sampler_accept().
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

        `vocabulary` is the llama_vocab whose texts the trie has. `poll` is called every few
        milliseconds while it is found out which tokens may follow; what it raises ends that, and
        comes out of check(). Raises SettingsError for what is no grammar, or one too ambiguous or
        too large.
        """
        try:
            matcher = GrammarMatcher(
                grammar.encode("utf-8"),
                root,
                trie,
                limits or GrammarLimits(),
                partial(_token_of, vocabulary),
                poll or _go_on,
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
        """Return a new llama_sampler, which the chain that it is added to frees."""
        return llama_cpp.llama_sampler_init(ctypes.pointer(self._interface), None)

    def check(self) -> None:
        """Raise what went wrong in the latest call: SettingsError, or what `poll` raised."""
        error, self._calls.error = self._calls.error, None
        if isinstance(error, ValueError):
            raise _refused(error) from None
        if error is not None:
            raise error


class _Calls:
    """Take llama.cpp's calls; it knows nothing of the sampler, so that both are freed at once."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self.error: BaseException | None = None

    def apply(self, _: Any, candidates: Any) -> None:
        array = candidates.contents
        address = ctypes.cast(array.data, ctypes.c_void_p).value
        try:
            self._matcher.apply(address or 0, array.size)
        except BaseException as error:  # it must not pass through llama.cpp
            self.error = error

    def accept(self, _: Any, token: int) -> None:
        if self.error is not None:
            return
        try:
            self._matcher.accept(token)
        except BaseException as error:
            self.error = error


def _token_of(vocabulary: Any, text: str) -> int | None:
    """Return the token that a text such as <think> is; None if it is not exactly one."""
    data = text.encode("utf-8")
    tokens = (llama_cpp.llama_token * 2)()
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), tokens, len(tokens), False, True)
    return int(tokens[0]) if count == 1 else None


def _go_on() -> None:
    """Let Python handle signals, such as Ctrl-C."""


def _refused(error: ValueError) -> SettingsError:
    return SettingsError(f"the grammar cannot be used: {error}")
