"""Extend a grammar of an answer by a thought before the answer."""

from __future__ import annotations

import json
from collections.abc import Callable

from entropykv.thinking.tags import ThoughtTags

ROOT = "answer-behind-thought"
"""The rule of a text with its thought; the rule `root` is only the answer."""
_BLANKS = r"[ \n]{0,2}"


def with_thought(
    grammar: str, tags: ThoughtTags, is_token: Callable[[str], bool], *, opened: bool
) -> str:
    """Return a grammar whose rule ROOT allows a thought before the text that `root` allows.

    `is_token` tells whether a text is one token of the vocabulary. `opened`: the prompt ends within
    the thought, which must then be closed; otherwise a thought is optional.
    """

    def written(text: str) -> str:
        return text if is_token(text) else json.dumps(text, ensure_ascii=False)

    if tags.channels:
        within = f"{_without(tags.end, is_token)} {written(tags.end)}"
        header = '<|channel|> "analysis" <|message|>'
        next_one = '<|start|> "assistant" '
        thought = f"({header} {within} {next_one})?"
        return f'{grammar}\n{ROOT} ::= {thought} <|channel|> "final" <|message|> root\n'
    within = f"{_without(tags.end, is_token)} {written(tags.end)} {_BLANKS}"
    first = f"{_BLANKS} {written(tags.begin)}"
    thought = f"({first})? {within}" if opened else f"({first} {within})?"
    return f"{grammar}\n{ROOT} ::= {thought} root\n"


def _without(end: str, is_token: Callable[[str], bool]) -> str:
    """Return a rule for any text without the tag `end`, which it recognises by its first two
    characters.
    """
    if is_token(end):
        return f"!{end}*"
    first, second = (_in_brackets(character) for character in end[:2])
    return f"([^{first}] | {json.dumps(end[0])} [^{first}{second}])*"


def _in_brackets(character: str) -> str:
    return f"\\{character}" if character in "[]\\^-" else character
