"""Keep control tokens out of what others say: users, tools and documents.

A chat template writes control tokens around what was said. In a text that names some of them, such
as <|im_end|>, they would end the turn of whoever said it. Therefore each such name gets a mark
before the template is rendered, which templates keep while they trim texts or write them as JSON.
Afterwards, the runs of text between the template's own control tokens are tokenised one by one:
those with a mark as plain text. Texts that name no control token are tokenised as before.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp

MARK = f"{secrets.randbelow(10**40):040}"
"""Digits that no text has, because every process draws new ones. They are digits because templates
change letters to capitals, and escape characters other than ASCII where they write JSON or objects
of Python.
"""
PARSE_SPECIAL = (
    "names of control tokens in messages and documents, such as <|im_end|>, become control tokens, "
    "with which whoever wrote them can end a turn and begin another one"
)
"""The help of `parse_special`, for the command line and the server's settings."""
_JOINER = "\u2060"
"""A character without width, the word joiner of Unicode."""
_NAMED = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
"""The kinds of tokens that plain text never becomes, whatever it says."""
_SPACES = " \t\n\v\f\r"


@dataclass(frozen=True)
class Run:
    """Hold a part of a prompt, and whether names of control tokens in it become such tokens."""

    text: str
    special: bool


class ControlNames:
    """Hold the names of a vocabulary's control tokens, and find them in texts."""

    def __init__(self, attributes: Iterable[tuple[str, int]]) -> None:
        """Use the control tokens among `attributes`: pairs of a token's text and llama.cpp's
        attributes of it.
        """
        # A name of one character has no place for a mark.
        self._kinds = {name: kind for name, kind in attributes if kind & _NAMED and len(name) > 1}
        self._pattern = re.compile(_any_of(sorted(self._kinds)) if self._kinds else r"(?!)")

    @classmethod
    def of_vocabulary(cls, vocabulary: Any) -> ControlNames:
        """Find the control tokens of a llama_vocab."""
        attribute = llama_cpp.llama_vocab_get_attr
        kinds = ((i, attribute(vocabulary, i)) for i in range(_size_of(vocabulary)))
        named = [(token, kind) for token, kind in kinds if kind & _NAMED]
        return cls(
            (llama_cpp.llama_vocab_get_text(vocabulary, token).decode("utf-8", "replace"), kind)
            for token, kind in named
        )

    def marked(self, value: Any, kept: Collection[str] = ()) -> Any:
        """Return texts, also within lists and objects, with marks in all names but those `kept`."""
        if isinstance(value, str):
            return self._marked(value, kept)
        if isinstance(value, list | tuple):
            return [self.marked(each, kept) for each in value]
        if isinstance(value, dict):
            return {
                self.marked(name, kept): self.marked(each, kept) for name, each in value.items()
            }
        return value

    def _marked(self, text: str, kept: Collection[str]) -> str:
        pieces, end = [], 0
        found = self._pattern.search(text)
        while found is not None:
            first = found.start() + 1  # Another name may begin within this one.
            if found[0] not in kept:
                pieces += [text[end:first], MARK]
                end = first
            found = self._pattern.search(text, first)
        return "".join([*pieces, text[end:]])

    def runs(self, prompt: str) -> list[Run]:
        """Split a prompt at the control tokens around its marked texts."""
        runs: list[Run] = []
        special, end, before = "", 0, 0
        names = [(found.start(), found.end(), found[0]) for found in self._pattern.finditer(prompt)]
        for start, following, name in [*names, (len(prompt), len(prompt), "")]:
            text, kind = prompt[end:start], self._kinds.get(name, 0)
            if MARK in text:
                # llama.cpp strips spaces beside a token of this kind.
                if before & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP:
                    text = text.lstrip(_SPACES)
                if kind & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP:
                    text = text.rstrip(_SPACES)
                runs += [Run(special, True), Run(text.replace(MARK, ""), False)]
                special = name
            else:
                special += text + name
            end, before = following, kind
        return [run for run in (*runs, Run(special, True)) if run.text]


def _any_of(names: Sequence[str]) -> str:
    """Return a regular expression that matches the longest of these names, which must be sorted.

    Beginnings that names share are tried once: Gemma has 6,250 names that begin with "<", which
    would all be tried wherever a text has that character.
    """
    first, last = names[0], names[-1]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    size = sum(1 for _ in same)
    rest = [name[size:] for name in names if len(name) > size]
    branches = [
        _any_of(list(group)) for _, group in itertools.groupby(rest, key=lambda name: name[0])
    ]
    if not branches:
        return re.escape(first)
    optional = "?" if len(rest) < len(names) else ""
    return f"{re.escape(first[:size])}(?:{'|'.join(branches)}){optional}"


def without_names(prompt: str) -> str:
    """Return a prompt in which no name of a control token stands in a foreign text, for libraries
    that tokenise all of it: a character without width takes the place of each mark.
    """
    return prompt.replace(MARK, _JOINER)


def without_marks(prompt: str) -> str:
    """Return a prompt as people read it."""
    return prompt.replace(MARK, "")


def _size_of(vocabulary: Any) -> int:
    return int(llama_cpp.llama_vocab_n_tokens(vocabulary))
