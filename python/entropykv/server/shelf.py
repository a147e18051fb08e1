"""Conversations of a pool that nobody is writing in, found by how their texts begin."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from entropykv.errors import PoolError
from entropykv.llama.prefix import common_prefix
from entropykv.session.pool import Pool
from entropykv.session.pool_session import PoolSession
from entropykv.session.stats import SessionStats

_GOES_ON = 0.5
"""A prompt that has so much of a conversation's text goes on with it, and not with a copy."""
_WORTH_A_FORK = 32
"""Tokens in common from which copying entries is quicker than reading."""


@dataclass
class _Conversation:
    session: PoolSession
    name: str | None
    tokens: list[int]
    last_use: float


class Shelf:
    """Conversations between two requests; the least recently used are forgotten first.

    What is forgotten is read again when somebody goes on with it: requests have the whole text.
    """

    def __init__(self, pool: Pool, most: int) -> None:
        """`most`: conversations that are kept."""
        self._pool = pool
        self._most = most
        self._lock = threading.Lock()
        self._free: list[_Conversation] = []
        self.forgotten = 0
        """How many were, so far."""
        self.forked = 0
        """Requests that went on from a copy of another conversation."""
        self.resumed = 0
        """Requests that went on with one."""

    def take(self, tokens: list[int], name: str | None) -> PoolSession:
        """Return the session that a prompt goes on with, or a new one; put() brings it back.

        A conversation with a name goes on under this name alone.
        """
        session = self._take(tokens, name)
        session.name = name
        return session

    def _take(self, tokens: list[int], name: str | None) -> PoolSession:
        with self._lock:
            best = self._best(tokens, name)
            if best is not None and self._goes_on(best, tokens):
                self._free.remove(best)
                self.resumed += 1
                return best.session
            near = max(
                self._free, key=lambda each: common_prefix(each.tokens, tokens), default=None
            )
            if near is not None and self._worth_a_fork(near, tokens):
                try:
                    session = near.session.fork()
                except PoolError:
                    pass  # there is no room for a copy: the text is read
                else:
                    near.last_use = time.monotonic()
                    self.forked += 1
                    return session
        return self._pool.session()

    def _best(self, tokens: list[int], name: str | None) -> _Conversation | None:
        """Return the one of this name, or the one without a name that has most in common."""
        own = [each for each in self._free if each.name == name]
        return max(own, key=lambda each: common_prefix(each.tokens, tokens), default=None)

    @staticmethod
    def _goes_on(conversation: _Conversation, tokens: list[int]) -> bool:
        shared = common_prefix(conversation.tokens, tokens)
        return shared > 0 and shared >= _GOES_ON * len(conversation.tokens)

    @staticmethod
    def _worth_a_fork(conversation: _Conversation, tokens: list[int]) -> bool:
        shared = common_prefix(conversation.tokens, tokens)
        return shared >= _WORTH_A_FORK and conversation.session.can_return_to(shared)

    def put(self, session: PoolSession, name: str | None) -> None:
        """Keep a conversation for its next turn."""
        if session.position == 0:
            session.close()
            return
        session.rest()
        kept = _Conversation(session, name, session.tokens, time.monotonic())
        with self._lock:
            self._free.append(kept)
        while len(self._free) > self._most and self.forget_one():
            pass

    def forget_one(self) -> bool:
        """Close the least recently used conversation; False where there is none."""
        with self._lock:
            if not self._free:
                return False
            oldest = min(self._free, key=lambda each: each.last_use)
            self._free.remove(oldest)
            self.forgotten += 1
        oldest.session.close()
        return True

    def conversations(self) -> list[tuple[str | None, SessionStats, bool]]:
        """Return the name of every one that is kept, its figures, and whether it is in the pool."""
        with self._lock:
            kept = list(self._free)
        return [(each.name, each.session.stats(), each.session.is_live) for each in kept]

    def close(self) -> None:
        """Forget all."""
        while self.forget_one():
            self.forgotten -= 1
