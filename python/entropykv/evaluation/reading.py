"""Read and write greedily with a budgeted session or stock llama.cpp, in the same way; define the
items that an evaluation measures.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from entropykv.evaluation.stock import StockSession
from entropykv.llamacpp.distributions import Logits
from entropykv.session.recovery import Watch
from entropykv.session.session import Session
from entropykv.settings.options import Budget

Tick = Callable[[int], None]
"""Called between steps with the number of tokens done since the last call; may raise to stop."""


AnySession = Session | StockSession
"""A session that reads inside a budget, or stock llama.cpp."""


@dataclass(frozen=True)
class Written:
    """Hold the tokens that were written, and the time of their decodes.

    The first token costs no decode, since its logits are given; the last one of the wanted number
    is not decoded. `n_decoded` tokens took `seconds`.
    """

    tokens: list[int]
    n_decoded: int
    seconds: float


def rows_of(
    session: AnySession, tokens: Sequence[int], tick: Tick, *, all_logits: bool = True
) -> Iterator[Logits]:
    """Read tokens; yields the logits of each micro-batch, (tokens, n_vocab). Without all_logits,
    yields only those of the last token, (1, n_vocab).
    """
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
    """Write n_tokens greedily, the first by `logits`, (n_vocab,); fewer if `stops` is set and the
    text ends.

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


class EvalPart(ABC):
    """Measure items of one kind; every figure belongs to one item, so that single items can be
    skipped.
    """

    name: str
    n_ctx: int
    """The context length of the sessions, in tokens."""
    items: Sequence[Any]
    """The items in order, all of one subclass of Item."""

    def with_only(self, item: Item) -> EvalPart:
        """Return a part that measures only one of the items, as the whole part would."""
        part = copy(self)
        part.items = (item,)
        return part

    def needs_reference(self, item: Any) -> bool:  # noqa: ARG002
        """Tell whether stock llama.cpp must measure an item in this run before a session can."""
        return False

    @abstractmethod
    def reference(self, stock: StockSession, item: Any, tick: Tick) -> Values:
        """Measure an item with stock llama.cpp, which may still hold the text of another item."""

    @abstractmethod
    def measure(self, session: Session, item: Any, tick: Tick) -> Values:
        """Measure an item with a session whose budget is set and that has read nothing yet."""


class AnswersPart(EvalPart):
    """Measure answers behind texts that are read with the full cache, or inside a budget."""

    def reference(self, stock: StockSession, item: Any, tick: Tick) -> Values:
        """Answer with the full cache of stock llama.cpp."""
        stock.reset()
        last, _ = read(stock, item.tokens, tick)
        return self.answer(stock, last, item, tick)

    def measure(self, session: Session, item: Any, tick: Tick) -> Values:
        """Answer after the text was read inside the budget, which then grows by growth()."""
        last, _ = read(session, item.tokens, tick)
        kept = kept_values(session)
        if growth := self.growth(item):
            grow(session, growth)
        return {**self.answer(session, last, item, tick), **kept}

    def growth(self, item: Any) -> int:  # noqa: ARG002
        """Return by how many tokens the budget grows for the answer to an item."""
        return 0

    @abstractmethod
    def answer(self, session: AnySession, last: Logits, item: Any, tick: Tick) -> Values:
        """Answer behind the text of an item, whose last logits are `last`, (n_vocab,); returns the
        figures.
        """


def grow(session: Session, n_tokens: int) -> None:
    """Increase a session's budget by n_tokens entries per KV head."""
    heads = [entries for layer in session.cache.budgets() for entries in layer]
    session.cache.resize(Budget("tokens", round(sum(heads) / len(heads)) + n_tokens))


def kept_values(session: Session) -> Values:
    """Return the policy and store of a session, the bytes of its budget and of a full cache, and
    how many entries it keeps and a full cache would keep.
    """
    stats = session.stats()
    return {
        "policy": stats.policy,
        "store": stats.store,
        "kv_bytes_budget": stats.kv_bytes_budget,
        "kv_bytes_full": stats.kv_bytes_full,
        "entries_kept": stats.entries_kept,
        "entries_full": stats.entries_full,
    }
