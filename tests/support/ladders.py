"""Provide logits that make the recovery ladder climb, and a fake session that returns them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entropykv.errors import ContextError, EntropyKVError
from entropykv.session.generate import generate_tokens
from entropykv.session.recovery import Climb, Ladder
from entropykv.session.stats import SessionCounts
from entropykv.settings.freezing import Recovery, Rung
from entropykv.settings.sampling import Sampling
from tests.support.climbs import ClimbCounts

N_VOCAB = 64
WARM_UP = 8
GREEDY = Sampling()
LADDER = [Rung.SOFT, Rung.WINDOW, Rung.FULL, Rung.REWALK]
SILENT = 10**6
"""A warm-up in tokens, so long that no spike counts."""


def peaked(token: int, logit: float = 12.0) -> np.ndarray:
    """Return logits (n_vocab,) with one token of the given logit, and 0 for all others: 12 makes it
    almost certain, 0.01 hardly more likely than others.
    """
    logits = np.zeros(N_VOCAB, np.float32)
    logits[token] = logit
    return logits


def logits_of(probabilities: Sequence[float]) -> np.ndarray:
    """Return logits (n_vocab,) for the probabilities of the first tokens; the rest is spread evenly
    over the other tokens.
    """
    rest = (1.0 - sum(probabilities)) / (N_VOCAB - len(probabilities))
    full = np.full(N_VOCAB, max(rest, 1e-12))
    full[: len(probabilities)] = probabilities
    return np.log(full).astype(np.float32)


CALM, SPIKE = peaked(0), peaked(0, 0.01)


def climbs(ladder: Ladder, spikes: set[int], end: int, calm: Any = CALM) -> dict[int, Rung]:
    """Return the rungs that were climbed up to position `end`, by position; uncertainty is high at
    those in `spikes`.
    """
    seen = {}
    for position in range(1, end + 1):
        climb = ladder.observe(SPIKE if position in spikes else calm, position)
        if climb is not None:
            assert climb.position == position
            seen[position] = climb.rung
    return seen


@dataclass
class FakeSession:
    """Stand in for a session: its logits are a function of what it has read and what was thawed."""

    function: Callable[[FakeSession], np.ndarray]
    recovery: Recovery | None = None
    n_ctx: int = 1000
    end: int = -1
    """The token that ends the generation."""
    fails_at: int = -1
    """The position at which reading a token fails."""
    breaks: bool = False
    """Whether truncate() fails, too, after reading has failed at `fails_at`."""
    tokens: list[int] = field(default_factory=list)
    logits: np.ndarray | None = None
    broken: bool = False
    thaws: list[tuple[Rung, int]] = field(default_factory=list)
    climbs: list[Climb] = field(default_factory=list)
    climb_counts: ClimbCounts = field(default_factory=ClimbCounts)
    counts: SessionCounts = field(default_factory=SessionCounts)
    drafting: None = None
    decoded: list[tuple[int, int]] = field(default_factory=list)
    """Position and token of everything that was ever read."""
    n_vocab: int = N_VOCAB

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> int:
        assert self.counts.decode_seconds >= 0
        return self.counts.generated_tokens

    @property
    def n_full(self) -> int:
        return sum(rung is Rung.FULL for rung, _ in self.thaws)

    @property
    def itself(self) -> FakeSession:
        """Return the session itself, as the part of a session that a caller asks for."""
        return self

    model = config = text = reader = cache = itself

    def read(self, tokens: Sequence[int], all_logits: bool, **_: object) -> Iterator[None]:
        assert not all_logits
        for token in tokens:
            if self.position == self.fails_at:
                self.broken = self.breaks
                raise ContextError("no room here")
            assert self.position < self.n_ctx
            self.decoded.append((self.position, token))
            self.tokens.append(token)
            self.logits = self.function(self)
        yield

    def truncate(self, position: int) -> None:
        if self.broken:
            raise EntropyKVError("reset it first")
        assert 0 <= position <= self.position
        if position < self.position:
            del self.tokens[position:]
            self.logits = None

    def is_end(self, token: int) -> bool:
        return token == self.end

    def token_bytes(self, token: int) -> bytes:
        return b"%d " % token

    def checkpoint_at_turn(self, *, writes: bool) -> None:
        pass

    def rest(self) -> None:
        pass

    def thaw(self, rung: Rung, window: int) -> int:
        self.thaws.append((rung, window))
        return 10 * rung

    def note_climb(self, climb: Climb) -> None:
        self.climbs.append(climb)
        self.climb_counts.note(climb)


def token_at(position: int, n_full: int = 0) -> int:
    """Return the most probable token at a position, after n_full full resets."""
    return (7 * position + n_full) % N_VOCAB


def planned(spikes: set[int]) -> Callable[[FakeSession], np.ndarray]:
    """Return a function that gives the logits of token_at() for a session.

    A token is uncertain if its number among all tokens that were read is in `spikes`.
    """

    def function(session: FakeSession) -> np.ndarray:
        token = token_at(session.position, session.n_full)
        return peaked(token, 0.01 if len(session.decoded) in spikes else 12.0)

    return function


def stopped_after(session: FakeSession, n: int | None, *arguments: Any) -> list[int]:
    """Return the tokens of a generation that its consumer closes after `n` tokens, or lets end if
    `n` is None.
    """
    yielded: list[int] = []
    start = session.position + len(arguments[0])
    with closing(generate_tokens(session, *arguments)) as stream:
        for token in itertools.islice(stream, n):
            yielded.append(token)
            # Tokens that were yielded must not change any more.
            assert session.tokens[start : start + len(yielded) - 1] == yielded[:-1]
    return yielded
