"""Keep conversations of a pool that nobody is writing in, found by how their texts begin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from entropykv.errors import ContextError, EntropyKVError, PoolError
from entropykv.server.users import Caller
from entropykv.session.file import SavedContents
from entropykv.session.pool import Pool
from entropykv.session.reuse import LEAST_SPARED, Demand, ReuseSource, common_prefix, reuse_of
from entropykv.session.session import Session
from entropykv.session.stats import SessionStats

_WORTH_WAITING = 64
"""Tokens in common with a prompt that is being read, from which waiting for it is worth it."""
_LOOK_AGAIN = 0.05
"""Seconds after which one who waits checks whether it still has to."""


@dataclass(eq=False)
class _Conversation:
    session: Session
    caller: Caller
    tokens: list[int]
    last_use: float
    answer_place: int = 0
    """The position at which later turns continue, because they lack its thought; 0: it has none."""


@dataclass(eq=False)
class _Newcomer:
    """Hold a prompt that waits for a copy of what another one has read."""

    tokens: list[int]
    shared: int
    """How many tokens both prompts have in common."""
    done: bool = False
    """True once it need not wait any more, whether there is a copy or not."""
    gone: bool = False
    """True once nobody wants the copy any more."""
    copy: Session | None = None
    goes_on_at: int = 0
    """The position up to which the copy is of use."""


@dataclass(eq=False)
class _Reading:
    """Hold a prompt that is being read, and those who wait for a part of it."""

    tokens: list[int]
    newcomers: list[_Newcomer] = field(default_factory=list)


@dataclass(frozen=True)
class _Start:
    """Hold the session that reads a prompt, and what is left to do before it does."""

    session: Session
    is_new: bool = False
    """True where it has read nothing yet."""
    near: _Conversation | None = None
    """The conversation whose copy would spare most, and how many tokens."""
    spared: int = 0
    goes_back_to: int | None = None
    """Where its text parts from the prompt's."""


class PrefixCache:
    """Keep conversations between two requests; the least recently used are forgotten first.

    What is forgotten is read again when somebody goes on with it: requests have the whole text.
    Conversations go on from others of their tenant alone: see Caller.tenant().
    """

    def __init__(self, pool: Pool, most: int, *, shared_prefixes: bool = True) -> None:
        """Take a pool; `most` conversations of it are kept."""
        self._pool = pool
        self._most = most
        self._shared_prefixes = shared_prefixes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._reading: dict[Session, _Reading] = {}
        """The prompts that are being read, by their sessions."""
        self._free: list[_Conversation] = []
        self.forgotten = 0
        """How many conversations were forgotten so far."""
        self.forked = 0
        """How many requests went on from a copy of another conversation."""
        self.resumed = 0
        """How many requests went on with a conversation itself."""

    # --- a prompt comes ---------------------------------------------------------------------------

    def take(
        self,
        tokens: list[int],
        caller: Caller,
        check: Callable[[], object] | None = None,
        continues: Callable[[list[int]], bool] | None = None,
    ) -> Session:
        """Return the session that a prompt goes on with, or a new one; put() brings it back.

        A conversation with a name goes on under this name alone. `continues` tells whether the
        prompt begins with the text of tokens, though it may be spelled with others. Where another
        prompt that begins the same is just being read, it waits for what both have in common, no
        longer, and asks `check` meanwhile whether it still should. reads() and has_read() tell how
        far the prompt was read.
        """
        start = self._started(tokens, caller, check, continues)
        session = start.session
        try:
            if start.goes_back_to is not None:
                _go_back(session, start.goes_back_to)
            elif start.is_new:  # this may take long, and nobody else waits for it
                session = self._going_on_from_others(start, tokens, caller)
        except BaseException:
            self.gives_up(session)
            session.close()
            raise
        session.name = caller.name
        return session

    def _started(
        self,
        tokens: list[int],
        caller: Caller,
        check: Callable[[], object] | None,
        continues: Callable[[list[int]], bool] | None,
    ) -> _Start:
        """Return who reads a prompt, once nobody is waited for; from now on others wait for it."""
        asked: set[Session] = set()
        while True:
            with self._lock:
                reader, newcomer = self._worth_waiting_for(tokens, caller, asked)
                if reader is None:
                    start = self._start(tokens, caller, continues)
                    self._reading[start.session] = _Reading(tokens)
                    return start
                reading = self._reading[reader]
                reading.newcomers.append(newcomer)
            asked.add(reader)
            self._wait(newcomer, reading, check)
            if newcomer.copy is not None:
                with self._lock:
                    self._reading[newcomer.copy] = _Reading(tokens)
                    self.forked += 1
                return _Start(newcomer.copy, goes_back_to=newcomer.goes_on_at)

    def _start(
        self,
        tokens: list[int],
        caller: Caller,
        continues: Callable[[list[int]], bool] | None,
    ) -> _Start:
        own = self._going_on(tokens, caller, continues)
        if own is not None:
            self._free.remove(own)
            self.resumed += 1
            return _Start(own.session)
        near, spared = self._nearest(tokens, caller)
        session = self._pool.session(tenant=self._tenant(caller))
        return _Start(session, is_new=True, near=near, spared=spared)

    def _going_on_from_others(self, start: _Start, tokens: list[int], caller: Caller) -> Session:
        """Return a new session at the checkpoint, or a copy of the conversation, that spares most.

        It is the new session itself where there is neither.
        """
        session, beyond = start.session, max(start.spared, LEAST_SPARED) - 1
        if session.return_to_checkpoint(tokens, beyond, repeatable=True):
            with self._lock:
                self.forked += 1
            return session
        return self._copy_of_kept(start.near, caller, session) or session

    def _tenant(self, caller: Caller) -> Caller:
        return caller.tenant(shared_prefixes=self._shared_prefixes)

    def _going_on(
        self,
        tokens: list[int],
        caller: Caller,
        continues: Callable[[list[int]], bool] | None,
    ) -> _Conversation | None:
        """Return the caller's conversation that a prompt goes on with, if it does with any.

        Others may want to go on with it, too. So the prompt must hold all of the conversation, or
        all but its last answer, which is quickly read again from the checkpoint before it.
        """
        runner = self._pool.runner
        leads_back = runner.checkpoints.limit_bytes > 0 and runner.config.freezing is None
        best, most = None, 0
        for each in self._of(caller):
            held = each.session.held()
            reuse = reuse_of(held, tokens, Demand(is_cut=False, needs_logits=False))
            shared, kept = reuse.shared, 0
            if reuse.source is ReuseSource.WHOLE or (
                shared and continues and continues(each.tokens)
            ):
                kept = len(each.tokens)
            elif leads_back and 0 < each.session.end_of_prompt <= shared:
                kept = shared if held.can_return_to(shared) else 0
            if kept > most:
                best, most = each, kept
        return best

    def _nearest(self, tokens: list[int], caller: Caller) -> tuple[_Conversation | None, int]:
        """Return the tenant's conversation that shares most with a prompt; what a copy spares."""
        tenant = self._tenant(caller)
        those = [each for each in self._free if self._tenant(each.caller) == tenant]
        near = max(those, key=lambda each: common_prefix(each.tokens, tokens), default=None)
        if near is None:
            return None, 0
        spared = _place_in(near.session, tokens)
        return (near, spared) if spared >= LEAST_SPARED else (None, 0)

    def _copy_of_kept(
        self, near: _Conversation | None, caller: Caller, session: Session
    ) -> Session | None:
        """Return a copy of a conversation in the place of a new session; None: there is none.

        Where there is no room for a copy, the caller's own conversation itself.
        """
        with self._lock:
            if near is None or near not in self._free:  # somebody else has taken it meanwhile
                return None
            near.last_use = time.monotonic()
            try:
                found = near.session.fork()
                self.forked += 1
            except PoolError:
                if near.caller != caller:
                    return None
                self._free.remove(near)
                found = near.session
                self.resumed += 1
            self._reading[found] = self._reading.pop(session)
        session.close()
        return found

    # --- while another one is read ----------------------------------------------------------------

    def _worth_waiting_for(
        self, tokens: list[int], caller: Caller, asked: set[Session]
    ) -> tuple[Session | None, _Newcomer]:
        """Return who reads more of a prompt now than anybody has read, and is not `asked` yet."""
        runner = self._pool.runner
        tenant = self._tenant(caller)
        reader, most = None, 0
        for session, reading in self._reading.items():
            if session in asked or session.tenant != tenant:
                continue
            shared = common_prefix(reading.tokens, tokens)
            # What has passed the place where texts part can be cut there only if it is whole.
            can_be = shared >= session.position or not (runner.recurrent or session.evicted)
            if can_be and shared > most:
                reader, most = session, shared
        newcomer = _Newcomer(tokens, most)
        if reader is None or most < _WORTH_WAITING:
            return None, newcomer
        _, known = self._nearest(tokens, caller)
        with runner.scheduler.between_steps():
            _, spared = runner.checkpoints.nearest(tokens, tenant, repeatable=True)
        piece = runner.config.n_ubatch  # up to so many tokens of it are read again
        worth = most >= max(known, spared) + max(_WORTH_WAITING, piece)
        return (reader if worth else None), newcomer

    def _wait(
        self, newcomer: _Newcomer, reading: _Reading, check: Callable[[], object] | None
    ) -> None:
        try:
            while not newcomer.done:
                with self._changed:
                    if not newcomer.done:
                        self._changed.wait(_LOOK_AGAIN)
                if check is not None:
                    check()
        except BaseException:
            with self._lock:
                newcomer.gone = True
                if newcomer in reading.newcomers:
                    reading.newcomers.remove(newcomer)
            if newcomer.copy is not None:
                newcomer.copy.close()
            raise

    def reads(self, session: Session, n_tokens: int) -> None:
        """Note, in the thread that reads a prompt, that `n_tokens` more of it are read next.

        Whose prompts part from it before their end get copies of what was read until now.
        """
        reading = self._reading.get(session)
        if reading is not None and reading.newcomers:
            end = session.position + n_tokens
            self._hand_over(session, reading, lambda newcomer: newcomer.shared < end)

    def has_read(self, session: Session) -> None:
        """Note, in the thread that read it, that the prompt of a session was read to its end."""
        with self._lock:
            reading = self._reading.pop(session, None)
        if reading is not None:
            self._hand_over(session, reading, lambda _: True)

    def gives_up(self, session: Session) -> None:
        """Note that the prompt that a session was taken for is not read any more, if it was."""
        with self._changed:
            reading = self._reading.pop(session, None)
            for newcomer in reading.newcomers if reading else ():
                newcomer.done = True
            self._changed.notify_all()

    def _hand_over(
        self, session: Session, reading: _Reading, is_due: Callable[[_Newcomer], bool]
    ) -> None:
        with self._lock:
            due = [each for each in reading.newcomers if is_due(each)]
            reading.newcomers = [each for each in reading.newcomers if each not in due]
        try:
            for newcomer in due:
                self._give_copy(session, newcomer)
        finally:
            with self._changed:
                for newcomer in due:
                    newcomer.done = True
                self._changed.notify_all()

    def _give_copy(self, session: Session, newcomer: _Newcomer) -> None:
        place = _place_in(session, newcomer.tokens, is_read=True)
        if place < LEAST_SPARED:
            return
        try:
            copy = session.fork()
        except (EntropyKVError, MemoryError):
            return  # there is no room for a copy: the newcomer reads by itself
        with self._lock:
            if not newcomer.gone:
                newcomer.copy, newcomer.goes_on_at = copy, place
                return
        copy.close()

    # --- between two requests ---------------------------------------------------------------------

    def _of(self, caller: Caller) -> list[_Conversation]:
        return [each for each in self._free if each.caller == caller]

    def put(self, session: Session, caller: Caller, answer_place: int = 0) -> None:
        """Keep a conversation for its next turn.

        `answer_place`: the position at which its next turn continues if its answer begins with a
        thought. The caller's conversations of which it is a later turn are then forgotten: no
        further turn has their thoughts, and checkpoints have what was read before them.
        """
        if session.position == 0:
            session.close()
            return
        session.rest()
        kept = _Conversation(session, caller, session.tokens, time.monotonic(), answer_place)
        with self._lock:
            earlier = [each for each in self._of(caller) if _is_earlier_turn(each, kept)]
            self._free = [each for each in self._free if each not in earlier]
            self._free.append(kept)
        for each in earlier:
            each.session.close()
        while len(self._free) > self._most and self.forget_one():
            pass

    def length_of(self, caller: Caller) -> int:
        """Return how many tokens a caller's conversation has; 0 where it is not here."""
        with self._lock:
            last = self._last(caller)
            return 0 if last is None else len(last.tokens)

    def save(self, caller: Caller, path: Path) -> None:
        """Write a caller's conversation to a file; nobody takes it meanwhile.

        Raises SessionFileError, or PoolError where it is not here any more.
        """
        with self._of_caller(caller) as session:
            session.save(path)

    def load(self, caller: Caller, path: Path) -> None:
        """Put what a file has in the place of a caller's conversation.

        Raises SessionFileError, or PoolError where there is no room for it.
        """
        session = self._loaded(caller, path)
        with self._lock:
            former = self._of(caller)
            self._free = [each for each in self._free if each.caller != caller]
        for each in former:
            each.session.close()
        self.put(session, caller)

    def load_one(self, caller: Caller, path: Path) -> Session:
        """Put what a file has beside a caller's conversations; raises as load()."""
        session = self._loaded(caller, path)
        self.put(session, caller)
        return session

    def _loaded(self, caller: Caller, path: Path) -> Session:
        session = self._pool.session(tenant=self._tenant(caller))
        session.name = caller.name
        try:
            session.load(path)
        except BaseException:
            session.close()
            raise
        return session

    def save_one(self, session: Session, caller: Caller, path: Path) -> SavedContents | None:
        """Write a conversation to a file, where it is here and of the caller's key; None: not."""
        kept = self._taken(session, caller)
        if kept is None:
            return None
        try:
            return session.save(path)
        finally:
            with self._lock:
                self._free.append(kept)

    def erase_one(self, session: Session, caller: Caller) -> int:
        """Forget a conversation of the caller's key; returns its tokens, 0 where it is not here."""
        kept = self._taken(session, caller)
        if kept is None:
            return 0
        session.close()
        return len(kept.tokens)

    def _taken(self, session: Session, caller: Caller) -> _Conversation | None:
        """Take a conversation from the prefix_cache, where it is here and of the caller's key."""
        with self._lock:
            for kept in self._free:
                if kept.session is session and kept.caller.user == caller.user:
                    self._free.remove(kept)
                    return kept
        return None

    def _last(self, caller: Caller) -> _Conversation | None:
        """Return the last one of a caller: an edited text leaves the former one here."""
        return max(self._of(caller), key=lambda each: each.last_use, default=None)

    @contextmanager
    def _of_caller(self, caller: Caller) -> Iterator[Session]:
        with self._lock:
            kept = self._last(caller)
            if kept is None:
                raise PoolError(
                    f"the conversation {caller.name!r} was forgotten for others; read it again"
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

    def conversations(self) -> list[tuple[Caller, SessionStats, bool]]:
        """Return all that are kept: whose each is, its figures, and whether it is in the pool."""
        with self._lock:
            kept = list(self._free)
        return [(each.caller, each.session.stats(), each.session.is_live) for each in kept]

    def close(self) -> None:
        """Forget all conversations."""
        while self.forget_one():
            self.forgotten -= 1


def _is_earlier_turn(other: _Conversation, kept: _Conversation) -> bool:
    """Tell whether a conversation's text parts from a kept one's within its last thought."""
    if not other.answer_place:
        return False
    shared = common_prefix(other.tokens, kept.tokens)
    return other.answer_place <= shared < len(other.tokens)


def _place_in(session: Session, tokens: list[int], *, is_read: bool = False) -> int:
    """Return up to which position a copy of a session spares reading tokens; 0: it does not.

    All of them only where it ends with them, since that is where it has logits. `is_read`: the
    session's own prompt is just being read, and has been cut as any reading of it. With freezing, a
    text that is cut short is as one that was read from 0 only while nothing of it is frozen.
    """
    end = None if is_read and session.freezing is None else len(tokens)
    return reuse_of(session.held(), tokens, Demand(end=end)).position


def _go_back(copy: Session, position: int) -> None:
    """Let a copy go back to where texts part; to the start where there is no room for it now."""
    if position < copy.position:
        try:
            copy.truncate(position)
        except (PoolError, ContextError):
            copy.truncate(0)
