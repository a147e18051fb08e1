"""Walk through grammars over a small vocabulary, and compare with the theory of regular
languages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropykv._core import GrammarLimits, GrammarMatcher, TokenTrie

KIND = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def bomb(depth: int) -> str:
    """Return rules with 2 ** depth possible stacks before anything is read."""
    rules = ["root ::= x0"]
    rules += [f'x{i} ::= x{i + 1} "a" | x{i + 1} "b"' for i in range(depth)]
    return "\n".join([*rules, f'x{depth} ::= "z"'])


class Walk:
    """Hold a text's state in a grammar, over a vocabulary of bytes, words, and an end token."""

    def __init__(
        self,
        grammar: str,
        words: Sequence[bytes] = (),
        *,
        poll: Callable[[], object] = lambda: None,
        **limits: int,
    ) -> None:
        self.texts = [bytes([byte]) for byte in range(256)] + list(words) + [b"<end>"]
        self.end = len(self.texts) - 1
        trie = TokenTrie(self.texts, [False] * self.end + [True])
        given = GrammarLimits()
        for name, limit in limits.items():
            setattr(given, name, limit)
        self.matcher = GrammarMatcher(grammar.encode(), "root", trie, given, lambda _: None, poll)
        self._data = np.zeros(len(self.texts), KIND)

    def allowed(self) -> set[int]:
        """Return the tokens that may follow."""
        self._data["id"] = np.arange(len(self.texts))
        self._data["logit"] = 0.0
        self.matcher.apply(self._data.ctypes.data, len(self.texts))
        return set(np.flatnonzero(self._data["logit"] == 0.0).tolist())

    def take(self, text: str | bytes) -> Walk:
        """Return the state after more text, read byte by byte; raises ValueError if it is not
        allowed.
        """
        for byte in text.encode() if isinstance(text, str) else text:
            self.matcher.accept(byte)
        return self


def takes(grammar: str, text: str) -> bool:
    """Tell whether a grammar accepts a whole text."""
    try:
        return Walk(grammar).take(text).matcher.may_end
    except ValueError as error:
        if "does not allow" not in str(error):
            raise
        return False


# --- sets of words, by their derivatives (Brzozowski 1964) ----------------------------------------


@dataclass(frozen=True)
class Words:
    """Define a set of words: `kind` is none, empty, letters, then, either or repeat."""

    kind: str
    parts: tuple[Any, ...] = ()

    @property
    def has_empty(self) -> bool:
        """Tell whether the set contains the empty word."""
        match self.kind:
            case "empty":
                return True
            case "then":
                return all(part.has_empty for part in self.parts)
            case "either":
                return any(part.has_empty for part in self.parts)
            case "repeat":
                return self.parts[1] == 0 or self.parts[0].has_empty
        return False

    def after(self, letter: str) -> Words:
        """Return the rest of all words that begin with a letter (the derivative)."""
        match self.kind:
            case "letters":
                return EMPTY if letter in self.parts[0] else NONE
            case "then":
                first, second = self.parts
                rest = then(first.after(letter), second)
                return either(rest, second.after(letter)) if first.has_empty else rest
            case "either":
                return either(*(part.after(letter) for part in self.parts))
            case "repeat":
                part, least, most = self.parts
                if most == 0:
                    return NONE
                fewer = None if most is None else most - 1
                return then(part.after(letter), repeat(part, max(least - 1, 0), fewer))
        return NONE

    def gbnf(self) -> str:
        """Return the set as a part of a grammar."""
        match self.kind:
            case "empty":
                return '("b"{0})'
            case "letters":
                return f"[{self.parts[0]}]" if len(self.parts[0]) > 1 else f'"{self.parts[0]}"'
            case "then":
                return " ".join(part.gbnf() for part in self.parts)
            case "either":
                return f"({' | '.join(part.gbnf() for part in self.parts)})"
            case "repeat":
                part, least, most = self.parts
                return f"({part.gbnf()}){{{least},{'' if most is None else most}}}"
        raise AssertionError(self.kind)


NONE, EMPTY = Words("none"), Words("empty")


def then(first: Words, second: Words) -> Words:
    if NONE in (first, second):
        return NONE
    return (
        second if first == EMPTY else first if second == EMPTY else Words("then", (first, second))
    )


def either(*parts: Words) -> Words:
    some = tuple(dict.fromkeys(part for part in parts if part != NONE))
    return Words("either", some) if len(some) > 1 else some[0] if some else NONE


def repeat(part: Words, least: int, most: int | None) -> Words:
    if part in (NONE, EMPTY) or most == 0:
        return EMPTY if least == 0 or part == EMPTY or most == 0 else NONE
    return Words("repeat", (part, least, most))
