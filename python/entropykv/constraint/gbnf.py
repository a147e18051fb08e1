"""Read grammars in llama.cpp's format (GBNF)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from entropykv.errors import SettingsError

MOST_COUNT = 1_000_000
"""The largest number in a repetition such as {2,5}."""
MOST_PARTS = 100_000
"""The most characters, sets, tokens and names of rules in all rules together."""
MOST_NESTED = 60
"""The most groups within each other, and the most rules that are written into one expression."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}


@dataclass(frozen=True)
class Chars:
    """Match one character of some ranges of code points, which are in order and do not overlap."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Token:
    """Match one token of the vocabulary, or with `is_other` any other one."""

    token: int
    is_other: bool


@dataclass(frozen=True)
class Rule:
    """Match what the rule `name` matches."""

    name: str


@dataclass(frozen=True)
class Sequence:
    """Match parts one after the other; without parts, the empty text."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Either:
    """Match one of several parts."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Repeat:
    """Match a part several times; `most` None: any number of times."""

    part: Part
    least: int
    most: int | None


Part = Chars | Token | Rule | Sequence | Either | Repeat
EMPTY = Sequence(())


def read_gbnf(text: str, root: str, token_of: Callable[[str], int | None]) -> dict[str, Part]:
    """Return the rules of a grammar by name; raises SettingsError for text that is no grammar, and
    for a rule that is missing.

    `token_of` returns the token that a text such as <think> is; None if it is not exactly one.
    """
    rules = _Reader(text, token_of).rules()
    if root not in rules:
        raise _refused(f"there is no rule named {root}")
    for name, part in rules.items():
        for other in sorted(named_in(part) - rules.keys()):
            raise _refused(f"the rule {name} names the rule {other}, which is not there")
    return rules


def named_in(part: Part) -> set[str]:
    """Return the names of the rules in a part."""
    if isinstance(part, Rule):
        return {part.name}
    if isinstance(part, Repeat):
        return named_in(part.part)
    if isinstance(part, Sequence | Either):
        return set().union(*map(named_in, part.parts))
    return set()


def _refused(reason: str) -> SettingsError:
    return SettingsError(f"the grammar cannot be used: {reason}")


class _Reader:
    """Read a grammar from its first character to its last."""

    def __init__(self, text: str, token_of: Callable[[str], int | None]) -> None:
        self._text = text
        self._at = 0
        self._n_parts = 0
        self._token_of = token_of

    def rules(self) -> dict[str, Part]:
        found: dict[str, Part] = {}
        self._skip(lines=True)
        while self._at < len(self._text):
            name = self._name()
            if not name:
                raise self._error("the name of a rule is expected")
            self._skip(lines=False)
            if not self._take("::="):
                raise self._error("::= is expected after the name of a rule")
            self._skip(lines=True)
            found[name] = self._alternatives(0)
            if self._at < len(self._text) and self._peek() not in "\r\n":
                raise self._error("the end of the line is expected")
            self._skip(lines=True)
        return found

    def _alternatives(self, depth: int) -> Part:
        if depth > MOST_NESTED:
            raise self._error(f"more than {MOST_NESTED} groups are within each other")
        found = [self._sequence(depth)]
        while self._take("|"):
            self._skip(lines=True)
            found.append(self._sequence(depth))
        return found[0] if len(found) == 1 else Either(tuple(found))

    def _sequence(self, depth: int) -> Part:
        parts: list[Part] = []
        while (part := self._item(depth)) is not None:
            self._skip(lines=depth > 0)
            while self._peek() in ("*", "+", "?", "{"):
                part = self._repeated(part, depth)
                self._skip(lines=depth > 0)
            parts.append(part)
        if self._peek() in ("*", "+", "?", "{"):
            raise self._error("there is nothing before a repetition")
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _count(self) -> None:
        self._n_parts += 1
        if self._n_parts > MOST_PARTS:
            raise self._error(f"there are more than {MOST_PARTS:,} characters, sets and names")

    def _item(self, depth: int) -> Part | None:
        self._count()
        if self._take('"'):
            return self._literal()
        if self._take("["):
            return self._set()
        if self._take("."):
            return Chars(_inverted([]))
        return self._token() if self._peek() in ("<", "!") else self._inner(depth)

    def _inner(self, depth: int) -> Part | None:
        if name := self._name():
            return Rule(name)
        return self._group(depth) if self._take("(") else None

    def _group(self, depth: int) -> Part:
        self._skip(lines=True)
        group = self._alternatives(depth + 1)
        if not self._take(")"):
            raise self._error("a group is not closed")
        return group

    def _literal(self) -> Part:
        parts = []
        while not self._take('"'):
            code = self._character()
            self._count()
            parts.append(Chars(_in_order([(code, code)])))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _set(self) -> Part:
        is_inverted = self._take("^")
        ranges = []
        while not self._take("]"):
            first = last = self._character()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._character()
            ranges.append((first, last))
        found = _inverted(ranges) if is_inverted else _in_order(ranges)
        if not found:
            raise self._error("[] has no characters")
        return Chars(found)

    def _token(self) -> Part:
        is_other = self._take("!")
        end = self._text.find(">", self._at)
        if self._peek() != "<" or end < 0:
            raise self._error("a token such as <think> or <[13]> is expected")
        name = self._text[self._at : end + 1]
        self._at = end + 1
        if name.startswith("<["):
            digits = name[2:-2]
            if not (name.endswith("]>") and digits.isascii() and digits.isdigit()):
                raise self._error("a token is written as <[13]>")
            if len(digits) > 9:
                raise self._error(f"there is no token {digits[:20]}")
            return Token(int(digits), is_other)
        token = self._token_of(name)
        if token is None:
            raise self._error(f"{name} is not one token of the vocabulary")
        return Token(token, is_other)

    def _repeated(self, part: Part, depth: int) -> Part:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if (kind := self._peek()) in simple:
            self._at += 1
            return Repeat(part, *simple[kind])
        self._at += 1
        self._skip(lines=depth > 0)
        least = self._number()
        most: int | None = least
        self._skip(lines=depth > 0)
        if self._take(","):
            self._skip(lines=depth > 0)
            most = self._number() if self._peek().isdigit() else None
            self._skip(lines=depth > 0)
        if not self._take("}"):
            raise self._error("a repetition is written as {2}, {2,} or {2,5}")
        if most is not None and most < least:
            raise self._error("a repetition's second number is below its first")
        return Repeat(part, least, most) if most != 0 else EMPTY

    def _number(self) -> int:
        begin = self._at
        while self._peek() in "0123456789" and self._at < len(self._text):
            self._at += 1
        digits = self._text[begin : self._at]
        if not digits:
            raise self._error("a number is expected")
        if len(digits) > 9 or int(digits) > MOST_COUNT:
            raise self._error(f"something repeats more than {MOST_COUNT:,} times")
        return int(digits)

    def _character(self) -> int:
        if self._at >= len(self._text):
            raise self._error("a quote or a bracket is not closed")
        c = self._text[self._at]
        self._at += 1
        if c != "\\":
            return ord(c)
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if kind not in _HEXADECIMAL:
            raise self._error('a backslash stands before one of x u U t r n \\ " [ ] -')
        digits = self._text[self._at : self._at + _HEXADECIMAL[kind]]
        self._at += len(digits)
        if len(digits) < _HEXADECIMAL[kind] or not all(
            d in "0123456789abcdefABCDEF" for d in digits
        ):
            raise self._error(
                f"{_HEXADECIMAL[kind]} hexadecimal digits are expected after \\{kind}"
            )
        code = int(digits, 16)
        if code > _LAST:
            raise self._error("there are no characters above U+10FFFF")
        return code

    def _name(self) -> str:
        begin = self._at
        while (c := self._peek()).isascii() and (c.isalnum() or c in ("-", "_")):
            self._at += 1
        return self._text[begin : self._at]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, expected: str) -> bool:
        if not self._text.startswith(expected, self._at):
            return False
        self._at += len(expected)
        return True

    def _skip(self, *, lines: bool) -> None:
        while (c := self._peek()) and (c in " \t#" or (lines and c in "\r\n")):
            if c == "#":
                while self._peek() not in ("", "\r", "\n"):
                    self._at += 1
            else:
                self._at += 1

    def _error(self, reason: str) -> SettingsError:
        line = self._text.count("\n", 0, self._at) + 1
        return _refused(f"line {line}: {reason}")


def _in_order(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges in order, joined where they overlap, without surrogates, which no text
    has.
    """
    found: list[tuple[int, int]] = []
    for first, last in sorted(_without_surrogates(ranges)):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def _without_surrogates(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    low, high = _SURROGATES
    cut = [(max(a, x), min(b, y)) for a, b in ranges for x, y in ((0, low - 1), (high + 1, _LAST))]
    return [(first, last) for first, last in cut if first <= last]


def _inverted(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found, begin = [], 0
    for first, last in _in_order(ranges):
        found.append((begin, first - 1))
        begin = last + 1
    return _in_order([(a, b) for a, b in [*found, (begin, _LAST)] if a <= b])
