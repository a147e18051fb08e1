"""Hold a model that the server has loaded, with what its operator has set for all requests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import llama_cpp

from entropykv.chat.chat_template import TemplateTraits
from entropykv.llamacpp.model import Model
from entropykv.server.http.errors import RequestError
from entropykv.session.images import Images
from entropykv.session.pool import Pool
from entropykv.session.session import Session
from entropykv.session.stats import SessionStats
from entropykv.thinking.tags import ThinkingOptions

MOST_SEARCHED = 300_000_000_000
"""The most bytes that ControlTokens.check() may count for a text, twice as many as llama.cpp
searches to tokenise it: about ten seconds.
"""
_SPECIAL = (
    llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
    | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
    | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
)


@dataclass(frozen=True)
class ControlTokens:
    """Hold the control tokens of a vocabulary, and refuse texts full of them, because llama.cpp
    takes long to tokenise such texts, and cannot be stopped.

    llama.cpp searches for control tokens in the order of their lengths, and splits the text at each
    occurrence. For every piece, it searches for all shorter ones in all of the following text. With
    17 such tokens (SmolLM2), a megabyte of <|im_start|> takes a minute.
    """

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


@dataclass(eq=False)
class LoadedModel:
    """Hold a model in memory and its pool. Any thread may use it; nothing of a request is here."""

    pool: Pool
    name: str
    """The name that clients use for the model; never a path."""
    request_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The server's defaults for fields that a request leaves out."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """The server's variables for the chat template."""
    thinking: ThinkingOptions = field(default_factory=ThinkingOptions)
    """The server's options of thoughts."""
    shared_prefixes: bool = True
    """Whether texts with the same key may share prefixes: see Caller.tenant()."""

    def __post_init__(self) -> None:
        """Make a session that reads nothing, for figures that all sessions share."""
        self.idle: Session = self.pool.session()
        if self.pool.holds_one:  # The only sequence is for conversations.
            self.idle.close()

    @property
    def model(self) -> Model:
        """Return the model: its vocabulary, and its chat template."""
        return self.pool.runner.model

    @property
    def images(self) -> Images | None:
        """Return the object that reads images; None without a projector."""
        return self.pool.runner.images

    @property
    def n_ctx(self) -> int:
        """Return the most tokens of a conversation."""
        return self.pool.runner.config.n_ctx

    @cached_property
    def traits(self) -> TemplateTraits:
        """Return what the chat template can show, such as tools."""
        template = self.model.chat_template
        return TemplateTraits() if template is None else template.traits

    @property
    def thinks(self) -> bool:
        """Tell whether the chat template has thoughts."""
        return self.model.thought_tags is not None

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Return the control tokens of the vocabulary."""
        return ControlTokens.of(self.model)

    def tokenize(self, text: str, *, add_bos: bool = False, special: bool = True) -> list[int]:
        """Return the tokens of a text; raises RequestError if that would take too long.

        `add_bos`: a BOS token comes first if texts of the model begin with one. `special`: names of
        control tokens become such tokens.
        """
        if special:
            self.control_tokens.check(text.encode("utf-8", "replace"))
        begins = add_bos and self.model.adds_bos
        return self.model.tokenize(text, add_bos=begins, special=special)

    def stats(self) -> SessionStats:
        """Return figures of a session that has read nothing: the settings, and no counts."""
        return self.idle.stats()

    def tell_what_is_learnt(self) -> None:
        """Print once on stderr, when a learnt predictor is complete, how many tokens were read
        twice for it, and whether it is kept.
        """
        fit = self.pool.runner.second_readings.fit
        if fit is not None and (news := fit.news()) is not None:
            say(news)

    def close(self) -> None:
        """Free the model, its pool, and all sessions."""
        self.idle.close()
        self.pool.close()


def say(text: str) -> None:
    """Print a note of the server on stderr."""
    sys.stderr.write(f"entropykv: {text}\n")
    sys.stderr.flush()
