"""Show the text in the KV cache: its tokens, and how many KV heads hold each of them."""

from __future__ import annotations

import codecs
import dataclasses
from typing import Any

import numpy as np

from entropykv.server.engine.kv_holders import between_steps, conversations
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.session.session import Session


@dataclasses.dataclass(frozen=True)
class HeldTokens:
    """Hold the tokens of a range of positions, and how many KV heads hold each of them."""

    session: Session
    position: int
    first: int
    tokens: list[int]
    heads: int
    held: list[int]
    frozen: list[int]
    swapped: bool
    """True if its conversation is swapped out, so that no KV head is counted."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON; the text of a character that has several tokens is at the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = (self.session.token_bytes(token, special=True) for token in self.tokens)
        return {
            "position": self.position,
            "first": self.first,
            "heads": self.heads,
            "texts": [decoder.decode(text) for text in texts],
            "held": self.held,
            "frozen": self.frozen,
            "swapped_out": self.swapped,
        }


def held_tokens(
    model: LoadedModel, user: str, name: str | None, first: int, count: int
) -> HeldTokens:
    """Return the tokens of a range of positions; raises RequestError for an unknown conversation.

    `name` is the conversation's id; None means the user's first one.
    """
    with between_steps(model):
        sessions = conversations(model, user)
        session = next(iter(sessions.values()), None) if name is None else sessions.get(name)
        if session is None:
            which = "yet" if name is None else f"{name!r}"
            raise RequestError(404, f"there is no conversation {which}; see /v1/kv/stream")
        return _held_tokens(session, first, count)


def _held_tokens(session: Session, first: int, count: int) -> HeldTokens:
    tokens = session.tokens[first : first + count]
    heads = sum(len(layer) for layer in session.cache.budgets())
    held, frozen, _ = session.cache.map()(first, 1, max(len(tokens), 1))
    scale = heads if len(held) == 1 else 1
    n_held, n_frozen = (
        (scale * np.count_nonzero(plane, axis=0))[: len(tokens)].tolist()
        for plane in (held, frozen)
    )
    swapped = session.cache.pool_status().is_swapped_out
    position = session.position
    return HeldTokens(session, position, first, tokens, heads, n_held, n_frozen, swapped)
