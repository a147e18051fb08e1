"""Pictures of the KV cache: what every KV head holds over the positions of a text."""

from __future__ import annotations

import base64
import codecs
import dataclasses
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from entropykv.llama.entropy_llama import EntropyLlama
from entropykv.server.errors import RequestError
from entropykv.session.session import Session
from entropykv.session.stats import SessionStats
from entropykv.store.protocol import Shares

_COUNTERS = (
    "prompt_tokens",
    "generated_tokens",
    "prompt_seconds",
    "decode_seconds",
    "evictions",
    "entries_frozen",
    "entries_restored",
    "entries_recalled",
)


def conversations(llama: EntropyLlama) -> dict[str, Session]:
    """Return the sessions that the model holds, by the id that routes know them by.

    RequestError where they are several, whose steps are taken together.
    """
    if llama.pool is not None:
        raise RequestError(501, "the cache is not shown with --parallel; leave it out to see it")
    return {"0": llama._session}


def about(llama: EntropyLlama) -> dict[str, Any]:
    """Return what does not change: the model, and how many KV heads each layer has."""
    (session,) = conversations(llama).values()
    stats = session.stats()
    return {
        "model": getattr(llama, "served_name", stats.model),
        "store": stats.store,
        "policy": stats.policy,
        "kv_type": stats.kv_type,
        "kv_budget": stats.kv_budget,
        "freeze": stats.freeze is not None,
        "n_ctx": stats.n_ctx,
        "layers": [len(heads) for heads in session.budgets()],
    }


@dataclasses.dataclass(frozen=True)
class Window:
    """Positions that a viewer wants to see, and in how many columns at most."""

    first: int = 0
    last: int | None = None
    """Not included; None: as far as the text goes."""
    columns: int = 512

    def fit(self, position: int) -> tuple[int, int, int]:
        """Return first position, positions per column (a power of two) and number of columns."""
        last = position if self.last is None else min(self.last, position)
        first = min(self.first, last)
        per_column = 1
        while per_column * self.columns < last - first:
            per_column *= 2
        return first, per_column, max(1, -(-(last - first) // per_column))


@dataclasses.dataclass(frozen=True)
class Map:
    """The picture of one conversation, as the model's thread takes it."""

    id: str
    position: int
    first: int
    per_column: int
    planes: Sequence[Shares]
    """What is held, frozen, and came back since the picture before: (rows, columns)."""
    stats: SessionStats

    def to_json(self) -> dict[str, Any]:
        """Return JSON, in which the planes are deflated bytes in base64, one after the other."""
        packed = zlib.compress(b"".join(plane.tobytes() for plane in self.planes), 1)
        rows, columns = self.planes[0].shape
        return {
            "id": self.id,
            "position": self.position,
            "first": self.first,
            "per_column": self.per_column,
            "rows": rows,
            "columns": columns,
            "planes": base64.b64encode(packed).decode("ascii"),
            "entries": self.stats.entries_kept,
            "entries_full": self.stats.entries_full,
            "frozen_entries": self.stats.frozen_entries,
            "bytes": self.stats.kv_bytes_now,
            "bytes_full": self.stats.kv_bytes_full,
            "frozen_bytes": self.stats.frozen_bytes,
            **dict(zip(_COUNTERS, _counts(self.stats), strict=True)),
        }


@dataclasses.dataclass(frozen=True)
class Picture:
    """All that is shown at one moment."""

    maps: Sequence[Map]
    seconds: float
    """CPU time that the thread of the model spent on it."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the page."""
        stats = self.maps[0].stats
        return {
            "time": time.time(),
            "pool": {
                "budget": stats.kv_bytes_budget,
                "used": stats.kv_bytes_now,
                "peak": stats.kv_bytes_peak,
            },
            "conversations": [each.to_json() for each in self.maps],
        }


class Camera:
    """Takes pictures for one viewer, who is shown nothing twice."""

    def __init__(self, window: Window) -> None:
        """`window`: what the viewer sees of every conversation."""
        self._window = window
        self._looks: dict[Session, Any] = {}
        self._seen: object = None

    def take(self, llama: EntropyLlama) -> Picture | None:
        """Return a picture, or None where nothing has changed since the one before."""
        start = time.thread_time()
        sessions = conversations(llama)
        stats = {name: session.stats() for name, session in sessions.items()}
        seen = [
            (name, sessions[name].position, each.kv_bytes_budget, each.entries_kept, *_counts(each))
            for name, each in stats.items()
        ]
        if seen == self._seen:
            return None
        self._seen = seen
        maps = [self._map(name, sessions[name], each) for name, each in stats.items()]
        return Picture(maps, time.thread_time() - start)

    def _map(self, name: str, session: Session, stats: SessionStats) -> Map:
        first, per_column, n_columns = self._window.fit(session.position)
        look = self._looks.setdefault(session, session.cache_map())
        planes = look(first, per_column, n_columns)
        return Map(name, session.position, first, per_column, planes, stats)


def _counts(stats: SessionStats) -> list[float]:
    return [getattr(stats, name) for name in _COUNTERS]


@dataclasses.dataclass(frozen=True)
class HeldTokens:
    """Tokens of a range of positions, and how many KV heads hold each of them."""

    session: Session
    position: int
    first: int
    tokens: list[int]
    heads: int
    held: list[int]
    frozen: list[int]

    def to_json(self) -> dict[str, Any]:
        """Return JSON; a character of several tokens is in the text of the last one."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = (self.session.token_bytes(token, special=True) for token in self.tokens)
        return {
            "position": self.position,
            "first": self.first,
            "heads": self.heads,
            "texts": [decoder.decode(text) for text in texts],
            "held": self.held,
            "frozen": self.frozen,
        }


def held_tokens(llama: EntropyLlama, name: str, first: int, count: int) -> HeldTokens:
    """Look at a range of positions. RequestError where there is no such conversation."""
    session = conversations(llama).get(name)
    if session is None:
        raise RequestError(404, f"there is no conversation {name!r}; see /v1/kv/stream")
    tokens = session.tokens[first : first + count]
    heads = sum(len(layer) for layer in session.budgets())
    held, frozen, _ = session.cache_map()(first, 1, max(len(tokens), 1))
    scale = heads if len(held) == 1 else 1
    counts = [
        (scale * np.count_nonzero(plane, axis=0))[: len(tokens)].tolist()
        for plane in (held, frozen)
    ]
    return HeldTokens(session, session.position, first, tokens, heads, *counts)
