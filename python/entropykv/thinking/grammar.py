"""Extend a grammar of an answer by a thought before the answer."""

from __future__ import annotations

import json
from collections.abc import Callable

from entropykv.thinking.tags import ThoughtTags

ROOT = "answer-behind-thought"
"""The rule of a text with its thought; the rule `root` is only the answer."""
_BLANKS = r"[ \n]{0,2}"


def with_thought(
    grammar: str, tags: ThoughtTags, token_of: Callable[[str], int | None], *, opened: bool
) -> str:
    """Return a grammar whose rule ROOT allows a thought before the text that `root` allows.

    `token_of` returns the token of the vocabulary that a text is; None if it is not exactly one.
    `opened`: the prompt ends within the thought, which must then be closed; otherwise a thought is
    optional.
    """

    def written(text: str) -> str:
        token = token_of(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    within = f"{_without(tags.end, token_of(tags.end))} {written(tags.end)}"
    if tags.channels:
        channel, message = written("<|channel|>"), written("<|message|>")
        begin = f'{channel} "analysis" {message}'
        thought = f'({begin} {within} {written("<|start|>")} "assistant")?'
        return f'{grammar}\n{ROOT} ::= {thought} {channel} "final" {message} root\n'
    first = f"{_BLANKS} {written(tags.begin)}"
    thought = f"({first})? {within}" if opened else f"({first} {within})?"
    return f"{grammar}\n{ROOT} ::= {thought} {_BLANKS} root\n"


def _without(end: str, token: int | None) -> str:
    """Return a rule for any text without the tag `end`, which it recognises by its first two
    characters, or by its token.
    """
    if token is not None:
        return f"!<[{token}]>*"
    first, second = (_in_brackets(character) for character in end[:2])
    return f"([^{first}] | {json.dumps(end[0])} [^{first}{second}])*"


def _in_brackets(character: str) -> str:
    return f"\\{character}" if character in "[]\\^-" else character
