"""Check what must hold after every operation of a session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv import EntropyKVError, Session
from tests.fuzz.operations import Operation

Positions = npt.NDArray[np.int32]
Heads = list[tuple[int, int]]


class Broken(AssertionError):  # noqa: N818
    """Raised if a session or a server breaks a promise; its text is the promise."""


def require(holds: object, promise: str) -> None:
    """Raise Broken unless `holds` is true."""
    if not holds:
        raise Broken(promise)


def check_refusal(error: BaseException) -> None:
    """Check that a refusal is a typed error of the package with one readable sentence."""
    if not isinstance(error, EntropyKVError):
        raise error
    text = str(error)
    require(len(text) > 20 and "\n" not in text, f"a refusal is one sentence, not {text!r}")
    for internal in ("vector", "std::", "0x", "Traceback", "bad_alloc", "None"):
        require(internal not in text, f"a refusal does not show {internal!r}: {text}")


def heads_of(session: Session) -> Heads:
    """Return layer and number of every KV head."""
    return [(i, h) for i, layer in enumerate(session.cache.budgets()) for h in range(len(layer))]


def frozen_positions(session: Session, layer: int, head: int) -> Positions:
    """Return the frozen positions of one KV head, ascending; empty without freezing and in the flat
    store.
    """
    if session.cache.store == "flat" or not session.config.freezing:
        return np.empty(0, np.int32)
    core = session._slot.store.core  # type: ignore[attr-defined]
    positions: Positions = core.frozen_positions(layer, head)
    return positions


def snapshot(session: Session) -> list[list[int]]:
    """Return the positions that each KV head keeps or has frozen, ascending."""
    return [
        sorted({*session.cache.entries(*head).tolist(), *frozen_positions(session, *head).tolist()})
        for head in heads_of(session)
    ]


def observable(session: Session) -> tuple[Any, ...]:
    """Return everything that a refused operation must not change."""
    logits = None if session.logits is None else session.logits.tobytes()
    active = [session.cache.entries(*head).tolist() for head in heads_of(session)]
    frozen = [frozen_positions(session, *head).tolist() for head in heads_of(session)]
    counts = session.stats()
    numbers = (counts.kv_bytes_budget, counts.kv_bytes_now, counts.evictions, counts.kv_budget)
    return (
        session.position,
        session.tokens,
        logits,
        session.cache.budgets(),
        active,
        frozen,
        numbers,
    )


@dataclass
class Watch:
    """Hold what was promised so far, and compare a session with it after each operation."""

    session: Session
    certain_from: dict[tuple[int, int], int] = field(default_factory=dict)
    """For each KV head, the position from which on all entries were always within its recent
    window.
    """
    largest_budget: int = 0
    tells_all: bool = True
    """True while the session counts every entry that is gone as evicted; truncate() removes some
    uncounted.
    """
    pure: bool = True
    """True while the session never rolled back to a position that it cannot return to."""
    seen: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)
    """Snapshots of a session that only read on, by the tokens that it had read."""

    def __post_init__(self) -> None:
        """Record the promises of a session that has read nothing."""
        self.heads = heads_of(self.session)
        self.certain_from = dict.fromkeys(self.heads, 0)
        self.windows = _windows(self.session)
        self.by_layer = self.session.config.policy.rule.by_layer
        self.note_budget()

    def note_budget(self) -> None:
        """Update the promises after a change of the budget."""
        self.largest_budget = max(self.largest_budget, self.session.stats().kv_bytes_budget)

    def before(self, operation: Operation) -> None:
        """Record what the session promises about an operation."""
        session = self.session
        self._position_before = session.position
        flat = session.cache.store == "flat"
        self._longest_whole = 0 if flat else session._slot.store.sharing.longest_whole  # type: ignore[attr-defined]
        self._recent_before = {head: self._recent_window(head) for head in self.heads}
        self._may_return = operation.name == "truncate" and session.text.held().can_return_to(
            operation.values[0]
        )

    def after(self, operation: Operation) -> None:
        """Check everything after a successful operation."""
        session = self.session
        if operation.name == "truncate":
            self._check_return(operation.values[0])
        if operation.name in ("truncate", "reset"):
            self.tells_all = False
            for head in self.heads:
                self.certain_from[head] = min(self.certain_from[head], session.position)
        if operation.name == "resize":
            self.seen.clear()
        self.note_budget()
        self.check(operation)
        if self.pure and session.position < 3000:
            self.seen[tuple(session.tokens)] = snapshot(session)

    def refused(self, operation: Operation, error: BaseException) -> None:
        """Check the message of a refusal, and that a promised rollback is not refused."""
        check_refusal(error)
        require(
            not self._may_return, f"can_return_to() promised {operation}, which is refused: {error}"
        )

    def _check_return(self, position: int) -> None:
        if position == 0:
            self.pure = True
            self.seen.clear()
        elif not self._may_return:
            self.pure = False
        expected = self.seen.get(tuple(self.session.tokens))
        if self._may_return and expected is not None:
            for (layer, _), ours, then in zip(
                self.heads, snapshot(self.session), expected, strict=True
            ):
                require(
                    self.windows[layer][0]
                    or ours == then,  # Entries that had left a window may be there or not.
                    f"can_return_to({position}) promised the entries of a session that never read "
                    "on",
                )

    def check(self, operation: Operation) -> None:
        """Check everything that does not depend on earlier states."""
        session = self.session
        logits = session.logits
        require(logits is None or np.isfinite(logits).all(), "logits are finite")
        require(len(session.tokens) == session.position, "every token has a position")
        n_kept = sum(self._check_head(operation, *head) for head in self.heads)
        self._check_stats(n_kept)

    def _check_head(self, operation: Operation, layer: int, head: int) -> int:
        session = self.session
        where = f"KV head {head} of layer {layer}"
        entries = session.cache.entries(layer, head)
        frozen = frozen_positions(session, layer, head)
        budget = session.cache.budgets()[layer][head]
        require(len(entries) <= budget, f"{where} holds {len(entries)} of {budget} entries")
        for positions, kind in ((entries, "entries"), (frozen, "frozen entries")):
            require(np.all(np.diff(positions) > 0), f"{kind} of {where} ascend and are distinct")
            inside = not len(positions) or (positions[0] >= 0 and positions[-1] < session.position)
            require(inside, f"{kind} of {where} lie below position {session.position}")
        require(not np.intersect1d(entries, frozen).size, f"{where} has entries in two places")
        self._check_protected(operation, (layer, head), entries)
        return len(entries)

    def _check_protected(
        self, operation: Operation, head: tuple[int, int], entries: Positions
    ) -> None:
        session = self.session
        position = session.position
        recent = min(self._recent_before[head], self._recent_window(head))
        ahead = 2 * session.recovery.held_back if session.recovery else 0
        if self.by_layer and (operation.name == "generate" or self._outgrew_bytes()):
            recent = 0  # The budget changed in between.
        first = max(self.certain_from[head], position - recent + ahead)
        self.certain_from[head] = min(first, position)
        oldest = self._oldest_seen(head)
        wanted = [*range(min(session.config.options.n_sinks, position)), *range(first, position)]
        missing = sorted({p for p in wanted if p >= oldest} - set(entries.tolist()))
        require(
            not missing,
            f"KV head {head[1]} of layer {head[0]} keeps sinks and its recent window of {recent}, "
            f"but lacks {missing[:9]} at position {position}",
        )

    def _outgrew_bytes(self) -> bool:
        """Tell whether the text was kept whole before, and is now longer than the bytes hold."""
        return self._position_before <= self._longest_whole < self.session.position

    def _recent_window(self, head: tuple[int, int]) -> int:
        """Return how many newest entries the head must keep."""
        session, options = self.session, self.session.config.options
        budget = session.cache.budgets()[head[0]][head[1]]
        if self.by_layer and options.recent_window is None:
            half = budget // 2
            return half - options.n_sinks if half > options.n_sinks else 1
        recent = session._slot.store.reach().recent_window
        if session.config.policy.schedule and session.config.freezing:
            recent = min(recent, session.config.freezing.window)
        return recent

    def _oldest_seen(self, head: tuple[int, int]) -> int:
        """Return the oldest position that the next token sees, or llama.cpp's cache can hold."""
        session = self.session
        if session.cache.store == "flat":
            shift = session._slot.store.shift
            return shift + session.config.options.n_sinks if shift else 0
        window, chunked = self.windows[head[0]]
        if window == 0:
            return 0
        return session.position // window * window if chunked else session.position - window + 1

    def _check_stats(self, n_kept: int) -> None:
        session, stats = self.session, self.session.stats()
        require(stats.entries_kept == n_kept, f"stats: {stats.entries_kept} of {n_kept} entries")
        require(
            0 <= stats.kv_bytes_now <= stats.kv_bytes_budget,
            f"{stats.kv_bytes_now} bytes are in a budget of {stats.kv_bytes_budget}",
        )
        require(
            stats.kv_bytes_now <= stats.kv_bytes_peak <= self.largest_budget,
            f"a peak of {stats.kv_bytes_peak} bytes beside {stats.kv_bytes_now} now, and budgets "
            f"of {self.largest_budget} at most",
        )
        n_frozen = sum(len(frozen_positions(session, *head)) for head in self.heads)
        require(stats.frozen_entries == n_frozen, f"stats: {stats.frozen_entries} frozen")
        full = session.position * len(self.heads)
        require(stats.entries_full == full, f"stats: {stats.entries_full} of {full} entries in all")
        gone = full - n_kept - n_frozen
        require(gone >= 0, f"{-gone} entries more than were read")
        windowed = any(window for window, _ in self.windows)
        if self.tells_all and not windowed:
            require(stats.evictions == gone, f"{gone} entries are gone, {stats.evictions} counted")
        limit = session.config.freezing.limit_bytes if session.config.freezing else None
        require(limit is None or stats.frozen_bytes <= limit, f"{stats.frozen_bytes} bytes frozen")


def _windows(session: Session) -> list[tuple[int, bool]]:
    if session.cache.store == "flat":
        return [(0, False)] * len(session.cache.budgets())
    layers = session._slot.store.layers  # type: ignore[attr-defined]
    return [(shape.window, shape.chunked) for shape in layers]


def same_bits(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    """Tell whether two rows are equal, or both None."""
    if one is None or other is None:
        return one is other
    return one.tobytes() == other.tobytes()
