"""Write a grammar of characters in llguidance's Lark, whose lexer takes the longest lexeme.

GBNF has no lexer: any character may be the next one of several parts. llguidance reads a text
lexeme by lexeme, which is fast where a lexeme is a whole word, and takes the longest that fits. So
a part of the grammar becomes a lexeme only where the longest one is always the right one; elsewhere
its parts become lexemes, in the end single characters, of which none is longer than another.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from entropykv.constraint.gbnf import (
    EMPTY,
    MOST_NESTED,
    Chars,
    Either,
    Part,
    Repeat,
    Rule,
    Sequence,
    Token,
    named_in,
    read_gbnf,
)
from entropykv.errors import SettingsError

_MOST_PLACES = 2_000
"""The most characters of a lexeme's expression; a longer one is cut into its parts."""
_MOST_WHOLE = 200_000
"""The most characters of an expression that is the whole grammar."""
_MOST_LEXEMES = 400
"""The most lexemes that are compared with each other; in a grammar with more, every character
becomes a lexeme.
"""
_MOST_DEPTH = 200
"""The most rules that lead to one another: llguidance follows them by recursion."""
_MOST_STEPS = 300_000
"""The most steps of all comparisons; what is not known after them counts as a conflict."""


def lark_of(
    text: str, root: str, token_of: Callable[[str], int | None], ends: Iterable[int] = ()
) -> str:
    """Return a GBNF grammar in llguidance's Lark; raises SettingsError for text that is not a
    grammar, and for rules that are too deep within each other.

    `ends`: the tokens that end a text; where the grammar allows every token but one (!<token>), it
    does not allow these.
    """
    try:
        return _Grammar(read_gbnf(text, root, token_of), root, ends).lark()
    except RecursionError:
        raise SettingsError(
            "the grammar cannot be used: its rules are too far within each other; give simpler ones"
        ) from None


@dataclass(frozen=True)
class _Lexeme:
    """Hold a part of the grammar that is one lexeme; if the part may be empty, the lexeme is
    optional.
    """

    part: Part


class _Grammar:
    """Hold the rules of a grammar, and which of their parts are no lexemes."""

    def __init__(self, rules: dict[str, Part], root: str, ends: Iterable[int]) -> None:
        self._rules = rules
        self._ends = [*ends]
        self._root = root
        self._cut: set[Part] = set()
        """Parts that are no lexemes, because a longer lexeme may be the wrong one."""
        self._steps = 0
        self._sizes: dict[str, float] = {}

    def lark(self) -> str:
        if self._size(Rule(self._root), 0) <= _MOST_WHOLE:
            return f"start: {_shown_lexeme(self._flat(Rule(self._root)), 'TEXT')}\n"
        self._check_depth()
        while True:
            rules = self._with_lexemes()
            wrong = self._conflicts(rules)
            if not wrong:
                return self._written(rules)
            self._cut |= wrong

    def _check_depth(self) -> None:
        """Raise SettingsError if a search from the root, depth first, goes too deep."""
        seen = {self._root}
        path = [iter(sorted(named_in(self._rules[self._root])))]
        while path:
            name = next(path[-1], None)
            if name is None:
                path.pop()
            elif name not in seen:
                seen.add(name)
                path.append(iter(sorted(named_in(self._rules[name]))))
            if len(path) > _MOST_DEPTH:
                raise SettingsError(
                    f"the grammar cannot be used: more than {_MOST_DEPTH} rules lead to one "
                    "another; give fewer"
                )

    def _size(self, part: Part, depth: int) -> float:
        """Return how many sets of characters a regular expression of the part has, with those of
        its rules; infinite if there is no such expression.
        """
        if depth > MOST_NESTED:
            return float("inf")
        match part:
            case Chars():
                return 1.0
            case Token():
                return float("inf")
            case Rule(name):
                if name not in self._sizes:
                    self._sizes[name] = float("inf")  # A rule that contains itself has no size.
                    self._sizes[name] = self._size(self._rules[name], depth + 1)
                return self._sizes[name]
            case Repeat():
                return self._size(part.part, depth + 1)
            case _:
                return sum((self._size(each, depth + 1) for each in part.parts), 0.0)

    def _flat(self, part: Part) -> Part:
        """Return a regular part with its rules written out."""
        match part:
            case Rule(name):
                return self._flat(self._rules[name])
            case Repeat():
                return Repeat(self._flat(part.part), part.least, part.most)
            case Sequence():
                return Sequence(tuple(map(self._flat, part.parts)))
            case Either():
                return Either(tuple(map(self._flat, part.parts)))
        return part

    def _with_lexemes(self) -> dict[str, object]:
        """Return the rules that are reached from the root, with lexemes instead of parts."""
        found: dict[str, object] = {}
        waiting = [self._root]
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found[name] = self._lexemes_of(self._rules[name])
            waiting += [each for each in _rules_in(found[name]) if each not in found]
        return found

    def _lexemes_of(self, part: Part) -> object:
        if part == EMPTY:
            return part
        if self._is_lexeme(part):
            return _Lexeme(self._flat(part))
        match part:
            case Repeat():
                return _Node("repeat", [self._lexemes_of(part.part)], part.least, part.most)
            case Either():
                return _Node("either", [self._lexemes_of(each) for each in part.parts])
            case Sequence():
                return _Node("sequence", [*self._runs(part)])
        return part

    def _runs(self, part: Sequence) -> Iterator[object]:
        """Yield the lexemes of a sequence; neighbours that may be one lexeme become one."""
        run: list[Part] = []
        for each in (*part.parts, None):
            if each is not None and self._is_lexeme(each):
                run.append(each)
                continue
            whole = Sequence(tuple(run))
            if len(run) > 1 and len(run) < len(part.parts) and self._is_lexeme(whole):
                yield _Lexeme(self._flat(whole))
            else:
                yield from (_Lexeme(self._flat(one)) for one in run)
            run = []
            if each is not None:
                yield self._lexemes_of(each)

    def _is_lexeme(self, part: Part) -> bool:
        size = self._size(part, 0)
        return size <= _MOST_PLACES and (size > 0) and self._flat(part) not in self._cut

    def _conflicts(self, rules: dict[str, object]) -> set[Part]:
        """Return the lexemes that may take characters of what follows another one."""
        follows = _Follows(rules, self._root)
        lexemes = follows.lexemes
        if len(lexemes) > _MOST_LEXEMES:
            return {each.part for each in lexemes if not isinstance(each.part, Chars)}
        alphabet = _Alphabet(each.part for each in lexemes)
        machines = [_Machine(each.part, alphabet) for each in lexemes]
        after = [
            functools.reduce(int.__or__, (machines[i].first for i in following), 0)
            for following in map(follows.lexemes_in, follows.after)
        ]
        found = {
            lexemes[i].part for i, each in enumerate(machines) if self._takes(each, each, after[i])
        }
        # Parts that conflict with themselves come first: once they are no lexemes any more, fewer
        # pairs are left to compare.
        if found:
            return found
        before = follows.before()
        for (i, shorter), (j, longer) in itertools.permutations(enumerate(machines), 2):
            if not shorter.first & longer.first or lexemes[j].part in found:
                continue
            takes = self._takes(shorter, longer, after[i])
            if takes and self._meet(before[i], before[j], machines):
                found.add(lexemes[j].part)
        return found

    def _meet(self, these: set[int], those: set[int], machines: list[_Machine]) -> bool:
        """Tell whether two lexemes can both come next in a text; what may stand before one of them
        is in `these`, and before the other in `those`.
        """
        if these & those:
            return True
        return any(
            x >= 0 and y >= 0 and self._takes(machines[x], machines[y], None)
            for x in these
            for y in those
        )

    def _takes(self, shorter: _Machine, longer: _Machine, after: int | None) -> bool:
        """Tell whether `longer` can go on by a character of `after` where `shorter` may end; with
        None, whether both can be the same text.
        """
        if after == 0:
            return False
        start = (-1, -1)
        seen, waiting = {start}, [start]
        while waiting:
            one, two = waiting.pop()
            self._steps += 1
            if self._steps > _MOST_STEPS:
                return True
            if one != -1 and shorter.may_end(one):
                if after is None and longer.may_end(two):
                    return True
                if after is not None and longer.next_characters(two) & after:
                    return True
            for character in _bits(shorter.next_characters(one) & longer.next_characters(two)):
                pair = (shorter.after(one, character), longer.after(two, character))
                if pair not in seen:
                    seen.add(pair)
                    waiting.append(pair)
        return False

    def _written(self, rules: dict[str, object]) -> str:
        names = {name: f"r{number}" for number, name in enumerate(rules)}
        lexemes: dict[Part, str] = {}
        lines = [f"start: {names[self._root]}"]
        lines += [
            f"{names[name]}: {self._shown(part, names, lexemes)}" for name, part in rules.items()
        ]
        lines += [f"{name}: /{_regex(_not_empty(part))}/" for part, name in lexemes.items()]
        return "\n".join(lines) + "\n"

    def _shown(self, each: object, names: dict[str, str], lexemes: dict[Part, str]) -> str:
        """Return a part in Lark, and add the names of its lexemes to `lexemes`."""
        shown = '""'
        match each:
            case _Lexeme(part):
                shown = lexemes.setdefault(part, f"T{len(lexemes)}")
                shown += "?" if _may_be_empty(part) else ""
            case Token(token, is_other):
                others = ",".join(map(str, sorted({token, *self._ends})))
                shown = f"<[^{others}]>" if is_other else f"<[{token}]>"
            case Rule(name):
                shown = names[name]
            case _Node(kind, parts):
                inner = [self._shown(part, names, lexemes) for part in parts]
                shown = f"({(' ' if kind == 'sequence' else ' | ').join(inner)})"
                if kind == "repeat":
                    shown += f"{{{each.least},{'' if each.most is None else each.most}}}"
        return shown


@dataclass(frozen=True)
class _Node:
    """Hold a part that has lexemes, rules or tokens in it."""

    kind: str
    parts: list[object]
    least: int = 1
    most: int | None = 1


def _rules_in(part: object) -> list[str]:
    if isinstance(part, Rule):
        return [part.name]
    return (
        [name for each in part.parts for name in _rules_in(each)] if isinstance(part, _Node) else []
    )


class _Follows:
    """Find which lexemes may come first, and which ones after another one or after a token.

    Sets of lexemes are bits of a number. Tokens come after the lexemes, one bit for each.
    """

    def __init__(self, rules: dict[str, object], root: str) -> None:
        self.lexemes: list[_Lexeme] = []
        self._numbers: dict[object, int] = {}
        self._tokens: list[Token] = []
        for part in rules.values():
            self._collect(part)
        for token in self._tokens:
            self._numbers[token] = len(self.lexemes) + self._tokens.index(token)
        n_all = len(self.lexemes) + len(self._tokens)
        self._rules = rules
        self._first: dict[str, tuple[int, bool]] = dict.fromkeys(rules, (0, False))
        self._after_rule: dict[str, int] = dict.fromkeys(rules, 0)
        self._after = [0] * n_all
        self._changed = True
        while self._changed:
            self._changed = False
            for name, part in rules.items():
                found = self._first_of(part)
                self._changed |= found != self._first[name]
                self._first[name] = found
        self._changed = True
        while self._changed:
            self._changed = False
            for name, part in rules.items():
                self._spread(part, self._after_rule[name])
        self.first = self._first[root][0]
        """The lexemes that a text may begin with."""
        self.after = self._after[: len(self.lexemes)]
        """For every lexeme, the set of what may follow it."""

    def lexemes_in(self, found: int) -> list[int]:
        """Return the numbers of the lexemes in a set."""
        return [number for number in _bits(found) if number < len(self.lexemes)]

    def before(self) -> list[set[int]]:
        """Return for every lexeme what may stand before it: lexemes, -1 for the beginning, and
        smaller numbers for tokens.
        """
        found: list[set[int]] = [set() for _ in self.lexemes]
        for number in self.lexemes_in(self.first):
            found[number].add(-1)
        for index, following in enumerate(self._after):
            own = index if index < len(self.lexemes) else -2 - index
            for number in self.lexemes_in(following):
                found[number].add(own)
        return found

    def _collect(self, part: object) -> None:
        if isinstance(part, _Lexeme) and part not in self._numbers:
            self._numbers[part] = len(self.lexemes)
            self.lexemes.append(part)
        elif isinstance(part, Token) and part not in self._numbers:
            self._numbers[part] = -1
            self._tokens.append(part)
        elif isinstance(part, _Node):
            for each in part.parts:
                self._collect(each)

    def _first_of(self, part: object) -> tuple[int, bool]:
        """Return the set of what a part may begin with, and whether the part may be empty."""
        match part:
            case _Lexeme(inner):
                return 1 << self._numbers[part], _may_be_empty(inner)
            case Token():
                return 1 << self._numbers[part], False
            case Rule(name):
                return self._first[name]
            case _Node("either", parts):
                found = [self._first_of(each) for each in parts]
                first = functools.reduce(int.__or__, (each for each, _ in found), 0)
                return first, any(is_empty for _, is_empty in found)
            case _Node(kind, parts):
                first, is_empty = 0, True
                for each in parts:
                    more, may_be = self._first_of(each)
                    first, is_empty = first | (more if is_empty else 0), is_empty and may_be
                return first, is_empty or (kind == "repeat" and part.least == 0)
        return 0, True

    def _spread(self, part: object, after: int) -> None:
        """Note that `after` may follow a part."""
        if isinstance(part, _Lexeme | Token):
            number = self._numbers[part]
            if self._after[number] | after != self._after[number]:
                self._after[number] |= after
                self._changed = True
        elif isinstance(part, Rule):
            if self._after_rule[part.name] | after != self._after_rule[part.name]:
                self._after_rule[part.name] |= after
                self._changed = True
        elif isinstance(part, _Node):
            if part.kind == "repeat" and part.most != 1:
                after |= self._first_of(part.parts[0])[0]
            for each in reversed(part.parts):
                self._spread(each, after)
                if part.kind == "sequence":
                    first, is_empty = self._first_of(each)
                    after = first | after if is_empty else first


class _Alphabet:
    """Number the sets of characters that the expressions of lexemes do not tell apart."""

    def __init__(self, parts: Iterator[Part]) -> None:
        self._classes: dict[Chars, int] = {}
        found = {each for part in parts for each in _chars_of(part)}
        bounds = sorted({b for each in found for a, z in each.ranges for b in (a, z + 1)})
        numbers = {bound: number for number, bound in enumerate(bounds)}
        for each in found:
            self._classes[each] = sum(
                (1 << numbers[last + 1]) - (1 << numbers[first]) for first, last in each.ranges
            )

    def bits(self, chars: Chars) -> int:
        """Return which of the numbered sets `chars` consists of, as bits."""
        return self._classes[chars]


class _Machine:
    """Follow a text in a regular expression (Glushkov's automaton; states are sets of positions in
    the expression).

    Counts are not followed: a part that may be repeated may be repeated without end, so that at
    most too many conflicts are found.
    """

    def __init__(self, part: Part, alphabet: _Alphabet) -> None:
        self._alphabet = alphabet
        self._characters: list[int] = []
        self._next: list[int] = []
        first, self._last, _ = self._add(part)
        self._start = first
        self.first = self._union(first)
        """The characters that a text may begin with."""
        self._known: dict[tuple[int, int], int] = {}
        self._unions: dict[int, int] = {}

    def may_end(self, state: int) -> bool:
        """Tell whether a text may end in a state."""
        return bool(state & self._last)

    def next_characters(self, state: int) -> int:
        """Return the characters that may come next; state -1 is the beginning."""
        if state not in self._unions:
            self._unions[state] = self._union(self._places_after(state))
        return self._unions[state]

    def after(self, state: int, character: int) -> int:
        """Return the state after `character`, the number of a set of characters; 0 if it cannot
        follow.
        """
        key = (state, character)
        if key not in self._known:
            places = self._places_after(state)
            self._known[key] = sum(
                1 << place for place in _bits(places) if self._characters[place] >> character & 1
            )
        return self._known[key]

    def _places_after(self, state: int) -> int:
        if state == -1:
            return self._start
        return functools.reduce(int.__or__, (self._next[place] for place in _bits(state)), 0)

    def _union(self, places: int) -> int:
        return functools.reduce(int.__or__, (self._characters[place] for place in _bits(places)), 0)

    def _add(self, part: Part) -> tuple[int, int, bool]:
        """Add the positions of a part; returns the first and the last ones, and whether the part
        may be empty.
        """
        match part:
            case Chars():
                self._characters.append(self._alphabet.bits(part))
                self._next.append(0)
                place = 1 << (len(self._characters) - 1)
                return place, place, False
            case Repeat():
                first, last, is_empty = self._add(part.part)
                if part.most != 1:
                    self._join(last, first)
                return first, last, is_empty or part.least == 0
            case Either():
                found = [self._add(each) for each in part.parts]
                return (
                    functools.reduce(int.__or__, (each[0] for each in found), 0),
                    functools.reduce(int.__or__, (each[1] for each in found), 0),
                    any(each[2] for each in found),
                )
            case Sequence():
                first, last, is_empty = 0, 0, True
                for each in part.parts:
                    f, n, e = self._add(each)
                    self._join(last, f)
                    first, last = first | (f if is_empty else 0), n | (last if e else 0)
                    is_empty = is_empty and e
                return first, last, is_empty
        raise AssertionError(part)  # Lexemes have no rules and tokens.

    def _join(self, places: int, following: int) -> None:
        for place in _bits(places):
            self._next[place] |= following


def _bits(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def _chars_of(part: Part) -> Iterator[Chars]:
    if isinstance(part, Chars):
        yield part
    elif isinstance(part, Repeat):
        yield from _chars_of(part.part)
    elif isinstance(part, Sequence | Either):
        for each in part.parts:
            yield from _chars_of(each)


def _may_be_empty(part: Part) -> bool:
    match part:
        case Repeat():
            return part.least == 0 or _may_be_empty(part.part)
        case Sequence():
            return all(map(_may_be_empty, part.parts))
        case Either():
            return any(map(_may_be_empty, part.parts))
    return False


def _not_empty(part: Part) -> Part:
    """Return a part that matches the same texts as `part`, except for the empty one."""
    if not _may_be_empty(part):
        return part
    match part:
        case Repeat():
            if part.most == 0:
                return Either(())
            more = None if part.most is None else part.most - 1
            one, least = _not_empty(part.part), max(part.least - 1, 0)
            if _may_be_empty(part.part):  # Missing repetitions may be empty.
                least = 0
            return Sequence((one, Repeat(one, least, more)))
        case Either():
            return Either(tuple(_not_empty(each) for each in part.parts if each != EMPTY))
        case Sequence():
            found = []
            for index, each in enumerate(part.parts):
                if each != EMPTY:
                    found.append(Sequence((_not_empty(each), *part.parts[index + 1 :])))
            return Either(tuple(found))
    return part


def _shown_lexeme(part: Part, name: str) -> str:
    if _may_be_empty(part):
        rest = _not_empty(part)
        return f"{name}?\n{name}: /{_regex(rest)}/" if next(_chars_of(rest), None) else '""'
    return f"{name}\n{name}: /{_regex(part)}/"


def _regex(part: Part) -> str:
    """Return a part as a regular expression of Rust."""
    match part:
        case Chars(ranges):
            return f"[{''.join(map(_range, ranges))}]"
        case Repeat():
            most = "" if part.most is None else part.most
            return f"(?:{_regex(part.part)}){{{part.least},{most}}}"
        case Sequence():
            return "".join(map(_regex, part.parts))
        case Either():
            return f"(?:{'|'.join(map(_regex, part.parts))})"
    raise AssertionError(part)  # Lexemes have no rules and tokens.


def _range(bounds: tuple[int, int]) -> str:
    first, last = (rf"\x{{{code:x}}}" for code in bounds)
    return first if bounds[0] == bounds[1] else f"{first}-{last}"
