"""Say what stands before a constrained answer of a model that thinks: its thought."""

from __future__ import annotations

import json
from collections.abc import Callable

from entropykv.thinking.tags import ThoughtTags

_BLANKS = r"/[ \n]{1,2}/"
_ANY = "/(?s:.+)/"


def before_answer(
    tags: ThoughtTags, *, opened: bool
) -> Callable[[Callable[[str], int | None]], str]:
    """Return a function for Constraint.behind(): a thought, followed by the answer.

    The function gets what returns the token of the vocabulary that a text is; None if it is not
    exactly one. `opened`: the prompt ends within the thought, which must then be closed; otherwise
    a thought is optional.
    """

    def rules(token_of: Callable[[str], int | None]) -> str:
        def written(text: str) -> str:
            token = token_of(text)
            return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

        if tags.channels:
            channel, message = written("<|channel|>"), written("<|message|>")
            begin = f'{channel} "analysis" {message}'
            thought = f'({begin} within {written("<|start|>")} "assistant")?'
            start = f'{thought} {channel} "final" {message} @answer'
        else:
            first = f"blanks? {written(tags.begin)}"
            thought = f"({first})? within" if opened else f"({first} within)?"
            start = f"{thought} blanks? @answer"
        return f"start: {start}\nblanks: {_BLANKS}\n{_up_to(tags.end, token_of(tags.end))}\n"

    return rules


def _up_to(end: str, token: int | None) -> str:
    """Return the rule `within`: any text, and the tag `end`, at its first place in the text."""
    if token is not None:
        return f"within: ANY? <[{token}]>\nANY: {_ANY}"
    return f"within[lazy]: ANY {json.dumps(end, ensure_ascii=False)}\nANY: /(?s:.*)/"
