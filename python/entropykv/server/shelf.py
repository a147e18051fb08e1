"""Keep conversations of a pool that nobody is writing in, found by how their texts begin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from entropykv.errors import PoolError
from entropykv.llama.reading import LEAST_SPARED
from entropykv.session.pool import Pool
from entropykv.session.pool_session import PoolSession
from entropykv.session.read_parts import common_prefix
from entropykv.session.session import Session
from entropykv.session.stats import SessionStats

_GOES_ON = 0.5
"""A prompt with so much of a conversation's text goes on with it, and not with a copy."""
_WORTH_WAITING = 64
"""Tokens in common with a prompt that is being read, from which waiting for it is worth it."""
_LOOK_AGAIN = 0.05
"""Seconds after which one who waits checks whether it still has to."""


@dataclass
class _Conversation:
    session: PoolSession
    name: str | None
    tokens: list[int]
    last_use: float


class Shelf:
    """Keep conversations between two requests; the least recently used are forgotten first.

    What is forgotten is read again when somebody goes on with it: requests have the whole text.
    """

    def __init__(self, pool: Pool, most: int) -> None:
        """Take a pool; `most` conversations of it are kept."""
        self._pool = pool
        self._most = most
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._reading: dict[Session, list[int]] = {}
        """The prompts that are being read, by their sessions."""
        self._free: list[_Conversation] = []
        self.forgotten = 0
        """How many conversations were forgotten so far."""
        self.forked = 0
        """How many requests went on from a copy of another conversation."""
        self.resumed = 0
        """How many requests went on with a conversation itself."""

    def take(
        self, tokens: list[int], name: str | None, check: Callable[[], object] | None = None
    ) -> PoolSession:
        """Return the session that a prompt goes on with, or a new one; put() brings it back.

        A conversation with a name goes on under this name alone. Where another prompt that begins
        the same is just being read, it waits for what both have in common, and asks `check`
        meanwhile whether it still should. has_read() tells when the prompt was read.
        """
        with self._changed:
            while self._is_being_read(tokens, name):
                self._changed.wait(_LOOK_AGAIN)
                if check is not None:
                    check()
            session = self._taken(tokens, name)
            self._reading[session] = tokens
        session.name = name
        return session

    def _taken(self, tokens: list[int], name: str | None) -> PoolSession:
        best = self._best(tokens, name)
        if best is not None and self._goes_on(best, tokens):
            self._free.remove(best)
            self.resumed += 1
            return best.session
        near = max(self._free, key=lambda each: common_prefix(each.tokens, tokens), default=None)
        spared = 0 if near is None else self._spared_by_fork(near, tokens)
        session = self._pool.session()
        beyond = max(spared, LEAST_SPARED) - 1
        if session.return_to_checkpoint(tokens, beyond, repeatable=True):
            self.forked += 1
        elif near is not None and spared >= LEAST_SPARED:
            try:
                fork = near.session.fork()
            except PoolError:
                return session  # there is no room for a copy: the text is read
            session.close()
            near.last_use = time.monotonic()
            self.forked += 1
            return fork
        return session

    def _is_being_read(self, tokens: list[int], name: str | None) -> bool:
        """Tell whether somebody reads more of a prompt now than anybody has read."""
        most = max(self._shared_by_those_who_read(tokens), default=0)
        if most < _WORTH_WAITING:
            return False
        best = self._best(tokens, name)
        known = 0 if best is None else common_prefix(best.tokens, tokens)
        with self._pool.host.scheduler.between_steps():
            _, spared = self._pool.host.checkpoints.nearest(tokens, repeatable=True)
        piece = self._pool.host.recipe.n_ubatch  # up to so many tokens of it are read again
        return most >= max(known, spared) + max(_WORTH_WAITING, piece)

    def _shared_by_those_who_read(self, tokens: list[int]) -> Iterator[int]:
        """Yield how much of a prompt each of those who read now will have read, for others, too.

        In the end there is a checkpoint of all of it, where any are kept. Less is cut off it, which
        is possible where nothing was evicted and no layer is recurrent.
        """
        host = self._pool.host
        keeps = host.checkpoints.limit_bytes > 0 and host.recipe.freezing is None
        for session, read in self._reading.items():
            shared = common_prefix(read, tokens)
            whole = shared == len(read)
            if (keeps and whole) or not (host.recurrent or session.evicted):
                yield shared

    def has_read(self, session: Session) -> None:
        """Note that the prompt that a session was taken for was read, or will not be."""
        with self._changed:
            if self._reading.pop(session, None) is not None:
                self._changed.notify_all()

    def _best(self, tokens: list[int], name: str | None) -> _Conversation | None:
        """Return the one of this name, or the one without a name that has most in common."""
        own = self._of(name)
        return max(own, key=lambda each: common_prefix(each.tokens, tokens), default=None)

    def _of(self, name: str | None) -> list[_Conversation]:
        return [each for each in self._free if each.name == name]

    @staticmethod
    def _goes_on(conversation: _Conversation, tokens: list[int]) -> bool:
        shared = common_prefix(conversation.tokens, tokens)
        return shared > 0 and shared >= _GOES_ON * len(conversation.tokens)

    @staticmethod
    def _spared_by_fork(conversation: _Conversation, tokens: list[int]) -> int:
        shared = common_prefix(conversation.tokens, tokens)
        return shared if conversation.session.can_return_to(shared) else 0

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

    def length_of(self, name: str) -> int:
        """Return how many tokens the conversation of a name has; 0 where it is not here."""
        with self._lock:
            last = self._last(name)
            return 0 if last is None else len(last.tokens)

    def save(self, name: str, path: Path) -> None:
        """Write the conversation of a name to a file; nobody takes it meanwhile.

        Raises SessionFileError, or PoolError where it is not here any more.
        """
        with self._named(name) as session:
            session.save(path)

    def load(self, name: str, path: Path) -> None:
        """Put what a file has in the place of the conversation of a name.

        Raises SessionFileError, or PoolError where there is no room for it.
        """
        session = self._pool.session()
        try:
            session.load(path)
        except BaseException:
            session.close()
            raise
        with self._lock:
            former = self._of(name)
            self._free = [each for each in self._free if each.name != name]
        for each in former:
            each.session.close()
        self.put(session, name)

    def _last(self, name: str) -> _Conversation | None:
        """Return the last one of a name: an edited text leaves the former one here."""
        return max(self._of(name), key=lambda each: each.last_use, default=None)

    @contextmanager
    def _named(self, name: str) -> Iterator[PoolSession]:
        with self._lock:
            kept = self._last(name)
            if kept is None:
                raise PoolError(
                    f"the conversation {name!r} was forgotten for others; read it again"
                )
            self._free.remove(kept)
        try:
            yield kept.session
        finally:
            with self._lock:
                self._free.append(kept)

    def forget_one(self) -> bool:
        """Close the least recently used conversation; returns False where there is none."""
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
        """Forget all conversations."""
        while self.forget_one():
            self.forgotten -= 1
