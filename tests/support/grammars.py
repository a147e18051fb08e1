"""Make grammars, and compare them with regular languages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def bomb(depth: int) -> str:
    """Return rules with 2 ** depth possible beginnings before anything is read."""
    rules = ["root ::= x0"]
    rules += [f'x{i} ::= x{i + 1} "a" | x{i + 1} "b"' for i in range(depth)]
    return "\n".join([*rules, f'x{depth} ::= "z"'])


AMBIGUOUS = 'root ::= s\ns ::= "a" | s s | s s s'
"""A grammar by which a text of n letters has more than 3 ** n parses."""


@dataclass(frozen=True)
class Words:
    """Define a set of words, as a regular language: `kind` is none, empty, letters, then, either or
    repeat.
    """

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

    def has(self, word: str) -> bool:
        """Tell whether a word is in the set."""
        rest = self
        for letter in word:
            rest = rest.after(letter)
        return rest.has_empty

    def after(self, letter: str) -> Words:
        """Return the rests of all words that begin with a letter (the derivative of the set)."""
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
        """Return GBNF for the set, as a part of a rule."""
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
