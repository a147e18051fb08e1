"""Read and write greedily with a budgeted session or stock llama.cpp, in the same way, and define
the items that an evaluation measures so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from entropykv.llamacpp.distributions import Logits
from entropykv.llamacpp.stock import StockSession
from entropykv.session.recovery import Watch
from entropykv.session.session import Session

Tick = Callable[[int], None]
"""Called between two steps with the number of tokens done since the last call; may raise
to stop.
"""


AnySession = Session | StockSession
"""Reads in a budget, or without one."""


@dataclass(frozen=True)
class Written:
    """Hold the tokens that were written, and the time of their decodes.

    The first token costs no decode, since its logits are given; the last one is not decoded.
    """

    tokens: list[int]
    n_decoded: int
    seconds: float


def rows_of(
    session: AnySession, tokens: Sequence[int], tick: Tick, *, all_logits: bool = True
) -> Iterator[Logits]:
    """Read tokens; yields the logits of each micro-batch that has some, (tokens, n_vocab)."""
    before = session.position
    for logits in session.reader.read(tokens, all_logits):
        if logits is not None:
            yield logits
        tick(session.position - before)
        before = session.position


def read(session: AnySession, tokens: Sequence[int], tick: Tick) -> tuple[Logits, float]:
    """Read tokens; returns the logits of the last one, (n_vocab,), and the seconds it took."""
    start = time.perf_counter()
    last = [rows[-1] for rows in rows_of(session, tokens, tick, all_logits=False)]
    return last[0], time.perf_counter() - start


def write(
    session: AnySession, logits: Logits, n_tokens: int, tick: Tick, *, stops: bool = False
) -> Written:
    """Write n_tokens greedily, the first by `logits`; fewer if `stops` is set and the text ends.

    If the session has a recovery ladder, it is used, except for its last rung, which would write
    tokens again.
    """
    watch = _watch_of(session, len(logits))
    tokens: list[int] = []
    start = time.perf_counter()
    while not (stops and session.model.is_end(int(logits.argmax()))):
        tokens.append(int(logits.argmax()))
        if len(tokens) == n_tokens:
            break
        logits, _ = read(session, tokens[-1:], tick)
        if watch is not None:
            watch.wants_rewalk(logits, session.position)
    n_decoded = min(len(tokens), n_tokens - 1)
    return Written(tokens, n_decoded, time.perf_counter() - start)


def _watch_of(session: AnySession, n_vocab: int) -> Watch | None:
    """Return the recovery ladder for a text that a session writes; None if the session has none."""
    if isinstance(session, Session) and session.recovery is not None:
        return Watch(session, session.recovery, n_vocab)
    return None


Values = dict[str, Any]
"""The figures of one item, as JSON values."""


@dataclass(frozen=True)
class Item:
    """Hold one text to be read; a subclass says what is measured after it."""

    name: str
    digest: str
    """A hash of everything that the item's figures depend on, except the settings of the
    evaluation.
    """
    tokens: tuple[int, ...]
    """The tokens that are read inside the budget."""
    n_steps: int
    """How many tokens are read and written in total, for the progress bar."""


class EvalPart(Protocol):
    """Measure items of one kind; every figure belongs to one item, so that single items can be
    skipped.
    """

    name: str
    n_ctx: int
    """The context length of the sessions, in tokens."""

    @property
    def items(self) -> Sequence[Item]:
        """Return the items in order."""

    def needs_reference(self, item: Any) -> bool:
        """Tell whether stock llama.cpp must measure an item in this run before a session can."""

    def reference(self, stock: StockSession, item: Any, tick: Tick) -> Values:
        """Measure an item with stock llama.cpp."""

    def measure(self, session: Session, item: Any, tick: Tick) -> Values:
        """Measure an item with a session whose budget is set and that has read nothing yet."""


def kept_values(session: Session) -> Values:
    """Return the number of entries and bytes that a session keeps of what it has read."""
    stats = session.stats()
    return {
        "policy": stats.policy,
        "store": stats.store,
        "kv_bytes_budget": stats.kv_bytes_budget,
        "kv_bytes_full": stats.kv_bytes_full,
        "entries_kept": stats.entries_kept,
        "entries_full": stats.entries_full,
    }
