"""Refuse texts full of control tokens, because tokenising them in llama.cpp cannot be stopped.

llama.cpp searches for control tokens in the order of their lengths, and splits the text at each
occurrence. For every piece, it searches for all shorter ones in all of the following text. With 17
such tokens (SmolLM2), a megabyte of <|im_start|> takes a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

import llama_cpp

from entropykv.llamacpp.model import Model
from entropykv.server.http.errors import RequestError

MOST_SEARCHED = 300_000_000_000
"""The most bytes that may be searched to tokenise a text, times two: about ten seconds."""
_SPECIAL = (
    llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
    | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
    | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
)


@dataclass(frozen=True)
class ControlTokens:
    """Hold the control tokens of a vocabulary."""

    texts: list[tuple[bytes, int]]
    """The text of each control token, and for how many others llama.cpp searches after it."""

    @classmethod
    def of(cls, model: Model) -> ControlTokens:
        """Find the control tokens in a model's vocabulary."""
        vocabulary = model.vocabulary
        kinds = [llama_cpp.llama_vocab_get_attr(vocabulary, i) for i in range(model.n_vocab)]
        special = [
            (llama_cpp.llama_vocab_get_text(vocabulary, i), kind & _SPECIAL)
            for i, kind in enumerate(kinds)
            if kind & _SPECIAL
        ]
        special.sort(key=lambda each: -len(each[0]))
        control = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        return cls(
            [
                (text, len(special) - place)
                for place, (text, kind) in enumerate(special)
                if kind & control and text
            ]
        )

    def check(self, text: bytes) -> None:
        """Raise RequestError (400) for a text that would take too long to tokenise."""
        shortest = min((len(control) for control, _ in self.texts), default=1)
        most_after = max((after for _, after in self.texts), default=0)
        if len(text) * (len(text) // shortest) * most_after <= MOST_SEARCHED:
            return
        counts = [(text.count(control), after) for control, after in self.texts]
        if sum(count * after for count, after in counts) * len(text) > MOST_SEARCHED:
            raise RequestError(
                400,
                f"the text has {sum(count for count, _ in counts):,} control tokens such as "
                f"{self.texts[0][0].decode(errors='replace')}, too many for its length; send less "
                "of them at a time",
            )
