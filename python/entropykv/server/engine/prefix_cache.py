"""Keep idle conversations of a pool, and find them by the beginning of their texts.

The pool closes the least recently used ones when it needs their room, and PrefixCache those beyond
its own limit: see SharedPool.let_go().
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from entropykv.errors import EntropyKVError, PoolError
from entropykv.files import FileStamp, stamp_of
from entropykv.server.http.access import Caller
from entropykv.session.file import SavedContents
from entropykv.session.kept_texts import IdleSession
from entropykv.session.pool import Pool
from entropykv.session.reuse import LEAST_SPARED, Demand, ReuseSource, reuse_of
from entropykv.session.session import Session
from entropykv.session.session_files import check_template, document_header
from entropykv.session.stats import SessionStats

_WORTH_WAITING = 64
"""How many tokens in common a prompt waits for at least while another prompt is being read."""
_CHECK_INTERVAL = 0.05
"""Seconds between two checks of a waiting prompt."""
_Made = TypeVar("_Made")


@dataclass(eq=False)
class _Conversation(IdleSession):
    session: Session
    caller: Caller
    document: Path | None = None
    """The file of a document, if the conversation has read that and nothing else; questions
    continue copies of it.
    """
    version: FileStamp | None = None
    """The version of the document's file, which another server may replace."""
    answer_place: int = 0
    """The position at which later turns continue, because they lack the thought of the last answer;
    0: there is no thought.
    """


@dataclass(frozen=True)
class _Prompt:
    """Hold a prompt, and what of the kept texts it may continue."""

    tokens: array[int]
    caller: Caller
    tenant: Caller
    continues: Callable[[Sequence[int]], bool] | None
    document: Path | None
    n_document: int
    """How many of the first tokens are the document's."""
    reads_question: bool


@dataclass(frozen=True, eq=False)
class _WaitingPrompt:
    """Hold a prompt that waits for a copy of what another one has read."""

    tokens: array[int]
    shared: int
    """How many tokens, from the first on, this prompt shares with the one that is being read."""
    copy: Future[tuple[Session, int] | None] = field(default_factory=Future)
    """The copy, and the position up to which it is useful; None if there is none."""


@dataclass(eq=False)
class _Reading:
    """Hold a prompt that is being read, and those that wait for a part of it."""

    prompt: _Prompt
    session: Session
    """The session that reads the prompt; another one may take its place before the first token is
    read.
    """
    waiting: list[_WaitingPrompt] = field(default_factory=list)


class PrefixCache:
    """Keep conversations between two requests; the least recently used are dropped first.

    A dropped conversation is read again with its next turn, because requests have the whole text.
    Conversations continue only from others of their tenant: see Caller.tenant().
    """

    def __init__(self, pool: Pool, most: int, *, shared_prefixes: bool = True) -> None:
        """Keep at most `most` conversations of a pool; `shared_prefixes`: see Caller.tenant()."""
        self._pool = pool
        self._most = most
        self._shared_prefixes = shared_prefixes
        self._lock = threading.Lock()
        """Held while conversations are chosen for prompts, taken out, kept and dropped.

        It is the first of three that are taken in this order: this one; the right to change the
        pool (Scheduler.between_steps()), which waits for the end of a step; the lock of the index.
        The pool lets go of conversations with the last two, and so never waits for the first.
        """
        self._texts = pool.runner.kept_texts.index
        """The pool's index of kept texts: conversations, prompts that are being read, and
        checkpoints.
        """
        self._readings: dict[Session, _Reading] = {}
        """The prompts that are being read, by the sessions that read them."""
        self.forked = 0
        """How many requests continued from a copy of another conversation."""
        self.resumed = 0
        """How many requests continued a conversation itself."""

    def take(
        self,
        tokens: Sequence[int],
        caller: Caller,
        check: Callable[[], object] | None = None,
        continues: Callable[[Sequence[int]], bool] | None = None,
        document: Path | None = None,
        *,
        reads_question: bool = False,
    ) -> Session:
        """Return the session that a prompt continues, or a new one; put() returns it to the cache.

        `document` is the file of a document with whose tokens the prompt begins: if the caller has
        no conversation about it that the prompt continues, it continues a copy of the document.

        A named conversation continues only under its name. `continues` tells whether the prompt
        begins with the text of some tokens, possibly in other tokens. If another prompt with the
        same beginning is just being read, this one waits for the common part, and calls `check`
        meanwhile, which may raise. reads() and has_read() report how far the prompt was read.
        `reads_question`: see Demand; then it waits for no other prompt, either. Raises the errors
        of open_document(), and PoolError without room for a session.
        """
        n_document = 0 if document is None else len(self.open_document(document, caller))
        text, tenant = array("i", tokens), self._tenant(caller)
        prompt = _Prompt(text, caller, tenant, continues, document, n_document, reads_question)
        reading, go_on = self._started(prompt, check)
        try:  # go_on() may take long, so that it runs without the lock.
            go_on()
        except BaseException:
            self.gives_up(reading.session)
            reading.session.close()
            raise
        reading.session.name = caller.name
        return reading.session

    def _started(
        self, prompt: _Prompt, check: Callable[[], object] | None
    ) -> tuple[_Reading, Callable[[], object]]:
        """Begin to read a prompt, once it need not wait for another one; from now on, others may
        wait for what it reads. Returns the reading, and a function that lets its session continue
        from the part of the prompt that was read before.
        """
        asked: set[_Reading] = set()
        while True:
            with self._lock:
                reader, waiting_prompt = self._worth_waiting_for(prompt, asked)
                if reader is None:
                    return self._start(prompt)
                reader.waiting.append(waiting_prompt)
            asked.add(reader)
            found = self._awaited(waiting_prompt, check)
            if found is not None:
                with self._lock:
                    self.forked += 1
                    copy, place = found
                    go_back = partial(copy.text.truncate_or_clear, place)
                    return self._reads(prompt, copy), go_back

    def _start(self, prompt: _Prompt) -> tuple[_Reading, Callable[[], object]]:
        with self._texts.lock:  # Otherwise the pool might close the session.
            own = self._going_on(prompt)
            if own is not None:
                self._texts.remove(own)
        if own is not None:
            self.resumed += 1
            return self._reads(prompt, own.session), lambda: None
        near, spared = (None, 0) if prompt.document is not None else self._nearest(prompt)
        reading = self._reads(prompt, self._pool.session(tenant=prompt.tenant))
        return reading, partial(self._go_on_from_others, reading, near, spared)

    def _go_on_from_others(
        self, reading: _Reading, near: _Conversation | None, spared: int
    ) -> None:
        """Let a new session go on from the checkpoint that saves most reading; or replace it by a
        copy of the prompt's document, or of the conversation `near`, whose copy would save `spared`
        tokens.
        """
        prompt, own = reading.prompt, reading.session
        beyond = max(spared, LEAST_SPARED) - 1
        copy: Session | None
        if prompt.document is not None:
            copy = self._copy_of_document(prompt.document, prompt.caller)
        elif own.text.return_to_checkpoint(prompt.tokens, beyond, repeatable=True):
            copy = own
        else:
            copy = self._copy_of_kept(near, prompt.caller)
        if copy is None:
            return
        with self._lock:
            if near is not None and copy is near.session:
                self.resumed += 1
            else:
                self.forked += 1
            reading.session = copy
            self._readings[copy] = self._readings.pop(own)
        if copy is not own:
            own.close()

    def _tenant(self, caller: Caller) -> Caller:
        return caller.tenant(shared_prefixes=self._shared_prefixes)

    def _going_on(self, prompt: _Prompt) -> _Conversation | None:
        """Return the caller's conversation that a prompt continues beyond its document, or None.

        Other prompts may also continue it. Therefore the prompt must contain the whole
        conversation, or all but its last answer, which is quickly read again from the checkpoint
        before it. If the pool holds one conversation alone, that is truncated to what the prompt
        continues.
        """
        if self._pool.holds_one:
            found = self._texts.longest_first(_Conversation, prompt.tokens, prompt.tenant)
            return next((each for each, shared in found if shared > 1), None)
        runner = self._pool.runner
        leads_back = runner.kept_texts.checkpoint_limit > 0 and runner.config.freezing is None
        demand = Demand(is_cut=False, needs_logits=False, reads_question=prompt.reads_question)
        best, most = None, prompt.n_document
        for each, shared in self._own(prompt.tokens, prompt.caller):
            text, kept = each.tokens, 0
            if max(shared, len(text)) <= most:
                continue
            held = each.session.text.held()
            reuse = reuse_of(held, prompt.tokens, demand, shared)
            if reuse.source is ReuseSource.WHOLE or (
                prompt.continues is not None and prompt.continues(text)
            ):
                kept = len(text)
            elif leads_back and 0 < held.text.parts.end_of_prompt <= shared:
                kept = reuse.shared if held.can_return_to(reuse.shared) else 0
            if kept > most:
                best, most = each, kept
        return best

    def _own(self, tokens: array[int], caller: Caller) -> list[tuple[_Conversation, int]]:
        """Return a caller's conversations without a document that begin as `tokens` do, each with
        the length of the common beginning in tokens, the longest first.
        """
        found = self._texts.longest_first(_Conversation, tokens, self._tenant(caller))
        return [each for each in found if each[0].caller == caller and each[0].document is None]

    def _nearest(self, prompt: _Prompt) -> tuple[_Conversation | None, int]:
        """Return the tenant's conversation of which a copy saves most tokens, and how many; (None,
        0) if none saves LEAST_SPARED.
        """

        def saved(kept: _Conversation, shared: int) -> int:
            return _place_in(kept.session, prompt.tokens, shared)

        near, spared = self._texts.nearest(_Conversation, prompt.tokens, prompt.tenant, saved)
        return (near, spared) if spared >= LEAST_SPARED else (None, 0)

    def _copy_of_kept(self, near: _Conversation | None, caller: Caller) -> Session | None:
        """Return a copy of a conversation, or the conversation itself if there is no room for a
        copy and it is the caller's own.

        Returns None if neither is possible, or if the conversation is gone.
        """
        with self._lock:
            # Another request may have taken the conversation, or the pool may have closed it.
            if near is None or not self._texts.remove(near):
                return None
            try:
                with self._kept_again(near):
                    return near.session.fork()
            except PoolError:
                is_own = near.caller == caller and near.document is None
                return near.session if is_own and self._texts.remove(near) else None

    def open_document(self, path: Path, caller: Caller) -> list[int]:
        """Load a document unless it is kept already; returns its tokens.

        Raises SessionFileError for a file that cannot be loaded, or PoolError if there is no room
        for it.
        """
        return self._with_document(path, caller, lambda kept: kept.session.tokens)

    def _copy_of_document(self, path: Path, caller: Caller) -> Session:
        return self._with_document(path, caller, lambda kept: kept.session.fork())

    def _with_document(
        self, path: Path, caller: Caller, use: Callable[[_Conversation], _Made]
    ) -> _Made:
        """Load a document if necessary, and use it before it can be dropped."""
        with self._lock:
            if (kept := self._document(path, caller)) is not None:
                with self._kept_again(kept):
                    return use(kept)
        loaded = self._load_document(path, caller)
        with self._lock:
            kept = self._document(path, caller)  # Another request may have loaded it meanwhile.
            with self._kept_again(kept or loaded):
                made = use(kept or loaded)
        if kept is not None:
            loaded.session.close()
        self._drop_surplus()
        return made

    @contextmanager
    def _kept_again(self, taken: _Conversation) -> Iterator[None]:
        """Keep a conversation after the block, as the most recently used; `_lock` is held."""
        try:
            yield
        finally:
            self._add(taken)

    def _document(self, path: Path, caller: Caller) -> _Conversation | None:
        """Take the document of a file if it is kept for the caller's tenant, or return None; the
        caller holds `_lock`.

        If the file was replaced by another version since it was loaded, the document does not count
        as kept.
        """
        tenant, version = self._tenant(caller), stamp_of(path)
        for each in self._kept:
            if each.document != path or self._tenant(each.caller) != tenant:
                continue
            if version in (None, each.version) and self._texts.remove(each):
                return each
        return None

    def _load_document(self, path: Path, caller: Caller) -> _Conversation:
        version = stamp_of(path)
        self._drop(lambda each: each.document == path and each.version != version)
        check_template(self._pool.runner.model, document_header(path))
        session = self._loaded(caller, path)
        session.name, session.is_document = path.stem, True
        session.rest()
        return _Conversation(session, caller, path, version)

    def forget_document(self, path: Path) -> None:
        """Drop a document whose file was removed."""
        self._drop(lambda each: each.document == path)

    def _worth_waiting_for(
        self, prompt: _Prompt, asked: set[_Reading]
    ) -> tuple[_Reading | None, _WaitingPrompt]:
        """Return the reading that has more of a prompt than any kept text has, or None, and how the
        prompt would wait for it. Readings in `asked` do not count: the prompt has waited for them.
        """
        runner, tokens = self._pool.runner, prompt.tokens
        recurrent = runner.factory.context.recurrent

        def saved(reader: _Reading, shared: int) -> int:
            # Text behind the place where both texts differ can be cut only if nothing was evicted.
            session = reader.session
            drops = recurrent or session.cache.evicted > 0
            can_be = shared >= session.position or not drops
            return shared if can_be and reader not in asked else 0

        reader, most = None, 0
        if not prompt.reads_question:
            reader, most = self._texts.nearest(_Reading, tokens, prompt.tenant, saved)
        waiting_prompt = _WaitingPrompt(tokens, most)
        if reader is None or most < _WORTH_WAITING:
            return None, waiting_prompt
        _, known = self._nearest(prompt)
        with runner.scheduler.between_steps():
            _, spared = runner.kept_texts.nearest(tokens, prompt.tenant, Demand())
        piece = runner.config.n_ubatch  # Up to a micro-batch of the common tokens is read again.
        worth = most >= max(known, spared, prompt.n_document) + max(_WORTH_WAITING, piece)
        return (reader if worth else None), waiting_prompt

    @staticmethod
    def _awaited(
        waiting_prompt: _WaitingPrompt, check: Callable[[], object] | None
    ) -> tuple[Session, int] | None:
        """Wait for the copy that a prompt gets, and return it as _WaitingPrompt.copy says; an
        exception that `check` raises ends the wait.
        """
        copy = waiting_prompt.copy
        try:
            while not wait([copy], _CHECK_INTERVAL).done:
                if check is not None:
                    check()
        except BaseException:
            if not copy.cancel() and (found := copy.result()) is not None:
                found[0].close()
            raise
        return copy.result()

    def _reads(self, prompt: _Prompt, session: Session) -> _Reading:
        """Record that a session reads a prompt; `_lock` is held."""
        reading = self._readings[session] = _Reading(prompt, session)
        self._texts.add(reading, prompt.tokens, prompt.tenant)
        return reading

    def reads(self, session: Session, n_tokens: int) -> None:
        """Record, in the thread that reads a prompt, that `n_tokens` more are read next.

        Prompts that differ before the end of these tokens get copies of what was read so far.
        """
        reading = self._readings.get(session)
        if reading is None or not reading.waiting:
            return
        end = session.position + n_tokens
        with self._lock:
            due = [each for each in reading.waiting if each.shared < end]
            reading.waiting = [each for each in reading.waiting if each.shared >= end]
        _hand_over(due, session)

    def has_read(self, session: Session) -> None:
        """Record, in the reading thread, that the prompt of a session was read to its end."""
        _hand_over(self._ended(session), session)

    def gives_up(self, session: Session) -> None:
        """Record that the prompt of a session is not read any further, if it was being read."""
        _hand_over(self._ended(session), None)

    def _ended(self, session: Session) -> list[_WaitingPrompt]:
        """Return the prompts that waited for that of a session, which is read no further."""
        with self._lock:
            reading = self._readings.pop(session, None)
            if reading is None:
                return []
            self._texts.remove(reading)
            return reading.waiting

    def _add(self, kept: _Conversation) -> None:
        """Keep a conversation; `_lock` is held."""
        self._texts.add(kept, kept.tokens, self._tenant(kept.caller))

    def _drop(self, is_gone: Callable[[_Conversation], bool]) -> None:
        """Close the conversations that a function names."""
        with self._lock:
            gone = [each for each in self._kept if is_gone(each) and self._texts.remove(each)]
        for each in gone:
            each.session.close()

    def put(self, session: Session, caller: Caller, answer_place: int = 0) -> None:
        """Keep a conversation for its next turn; an empty one is closed.

        `answer_place`: the position at which the next turn continues if the last answer begins with
        a thought. The caller's conversations of earlier turns are then forgotten: no further turn
        has their thoughts, and checkpoints have what was read before these.
        """
        if session.position == 0:
            session.close()
            return
        session.rest()
        conversation = _Conversation(session, caller, answer_place=answer_place)
        with self._lock:
            earlier = [
                each
                for each, shared in self._own(conversation.tokens, caller)
                # Such a conversation differs from this one only after the beginning of its last
                # answer.
                if 0 < each.answer_place <= shared < len(each.tokens)
            ]
            self._add(conversation)
        self._drop(earlier.__contains__)
        self._drop_surplus()

    @property
    def _kept(self) -> list[_Conversation]:
        """Return the conversations, the least recently used first."""
        return self._texts.of(_Conversation)

    def _drop_surplus(self) -> None:
        while len(self._kept) > self._most and self._pool.runner.let_go():
            pass

    def length_of(self, caller: Caller) -> int:
        """Return how many tokens a caller's conversation has; 0 if there is none."""
        with self._lock:
            last = self._of(caller)
            return 0 if last is None else len(last.tokens)

    def save(
        self, caller: Caller, path: Path, session: Session | None = None
    ) -> SavedContents | None:
        """Save a caller's latest conversation to a file, or that of a session; no request can use
        it meanwhile. Returns what was saved, or None if the conversation is not kept.

        Raises SessionFileError if the file cannot be written.
        """
        with self._lock:
            kept = self._of(caller, session)
            if kept is None or not self._texts.remove(kept):
                return None
        try:
            return kept.session.files.save(path)
        finally:
            with self._lock:
                self._add(kept)

    def load(self, caller: Caller, path: Path, *, replaces: bool = True) -> Session:
        """Load a file as a caller's conversation, which takes the place of all others of the caller
        if it `replaces` them.

        Raises SessionFileError for a file that cannot be loaded, or PoolError if there is no room
        for it.
        """
        session = self._loaded(caller, path)
        if replaces:
            self._drop(lambda each: each.caller == caller and each.document is None)
        self.put(session, caller)
        return session

    def _loaded(self, caller: Caller, path: Path) -> Session:
        session = self._pool.session(tenant=self._tenant(caller))
        session.name = caller.name
        try:
            session.files.load(path)
        except BaseException:
            session.close()
            raise
        return session

    def forget(self, caller: Caller, session: Session) -> int:
        """Drop the conversation of a session; returns how many tokens it had, 0 if not kept."""
        with self._lock:
            kept = self._of(caller, session)
            if kept is None or not self._texts.remove(kept):
                return 0
        n_tokens = session.position
        session.close()
        return n_tokens

    def _of(self, caller: Caller, session: Session | None = None) -> _Conversation | None:
        """Return the conversation of a session if it belongs to the caller's key, or else the
        caller's latest one: after an edit, the former one is kept, too. `_lock` is held.
        """
        found = None
        for each in self._kept:
            if session is None:
                fits = each.caller == caller and each.document is None
            else:
                fits = each.session is session and each.caller.user == caller.user
            found = each if fits else found
        return found

    def conversations(self) -> list[tuple[Caller, SessionStats, bool]]:
        """Return, for each kept conversation, its caller, its figures, and whether it holds entries
        of the pool.
        """
        with self._lock:
            kept = self._kept
        return [(each.caller, each.session.stats(), each.session.cache.is_live) for each in kept]

    def close(self) -> None:
        """Drop all conversations."""
        self._drop(lambda _: True)


def _place_in(
    session: Session, tokens: array[int], shared: int | None = None, *, is_read: bool = False
) -> int:
    """Return up to which position a copy of a session saves reading tokens; 0: it does not.

    The position is the end of `tokens` only if the copy ends there, because only then it has
    logits. `shared`: how many tokens both have in common, if that is known. `is_read`: the
    session's own prompt is just being read, and was cut as in any reading. With freezing, a text
    that is truncated equals one that was read from 0 only while nothing of it is frozen.
    """
    end = None if is_read and session.config.freezing is None else len(tokens)
    return reuse_of(session.text.held(), tokens, Demand(end=end), shared).position


def _copy_for(session: Session, tokens: array[int]) -> tuple[Session, int] | None:
    """Return a copy of a session for a prompt, and the position up to which it is useful; None if
    it saves too little, or without room: then the prompt is read separately.
    """
    place = _place_in(session, tokens, is_read=True)
    if place < LEAST_SPARED:
        return None
    try:
        return session.fork(), place
    except (EntropyKVError, MemoryError):
        return None


def _hand_over(waiting: list[_WaitingPrompt], session: Session | None) -> None:
    """Give prompts that wait copies of what a session has read; without a session, None."""
    while waiting:
        each = waiting.pop(0)
        if each.copy.set_running_or_notify_cancel():
            found = None
            try:
                found = None if session is None else _copy_for(session, each.tokens)
            except BaseException:
                _hand_over(waiting, None)
                raise
            finally:
                each.copy.set_result(found)
