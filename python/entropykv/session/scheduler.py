"""Choose which tokens are read next: one decision per step, for all sequences of a pool.

Every thread that decodes submits its next tokens and waits. One thread leads: it makes steps for
all waiting threads until its own tokens are read, and then another thread leads. A step reads the
single token of every session that writes, and one piece of the prompt that arrived first. Therefore
no stream waits for more than one piece, and the products of many single tokens cost little more
than those of one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from entropykv.errors import EntropyKVError, PoolError
from entropykv.store.step import Part

MOST_PATIENCE = 0.05
"""The most seconds that a step waits for the next tokens of the sessions in the last step."""
PATIENCE = 0.5
"""The most that a step waits for the next tokens of the sessions in the last step, as a fraction of
the time of that step.
"""
_CHECK_INTERVAL = 0.02
"""The seconds after which a leader without work checks again whether a session is idle."""


@dataclass(eq=False)
class Work:
    """Hold the next tokens of a sequence, while the thread that submitted them waits."""

    owner: Hashable
    part: Part
    arrival: int
    """The number of the text that the tokens belong to, from arrive(): texts with lower numbers are
    read first.
    """
    turn: threading.Condition = field(default_factory=threading.Condition)
    """The condition that wakes the thread that submitted this work: when the tokens were read, or
    when the thread must lead.
    """
    thread: int = field(default_factory=threading.get_ident)
    done: bool = False

    @property
    def is_single(self) -> bool:
        """Tell whether the work is a single token, with its drafts, as when a session writes."""
        return self.part.is_single


def choose(waiting: Sequence[Work], *, together: bool, singles_turn: bool) -> list[Work]:
    """Return the works of one step: all single tokens, then the first piece of a prompt.

    Without `together`, a step reads either the single tokens or the piece, in turns
    (`singles_turn`): recurrent layers accept only sequences of equal length, a device attends to
    single tokens of several sequences in llama.cpp's own graph if nothing else is read, and
    llama.cpp reads either tokens or embeddings in one step.
    """
    singles = [work for work in waiting if work.is_single]
    pieces = [work for work in waiting if not work.is_single]
    first = sorted(pieces, key=lambda work: work.arrival)[:1]
    if first and first[0].part.embedded is not None:
        together = False
    if together or not singles or not first:
        return [*singles, *first]
    return singles if singles_turn else first


class Scheduler:
    """Make the steps of all sequences of a pool, one after the other."""

    def __init__(
        self,
        admit: Callable[[Work], bool],
        run: Callable[[list[Work]], None],
        *,
        together: bool,
        least_patience: float = 0.0,
        tidy: Callable[[], None] = lambda: None,
    ) -> None:
        """Use `admit`, which makes a sequence live, or returns False if it has to wait, and `run`,
        which does a step.

        `together`: see choose(). `least_patience`: how many seconds a step waits at least for the
        sessions of the last step, however short that was. `tidy` is called before and after every
        step, and before and after actions between two steps, to do what could not be done within a
        step.
        """
        self._admit = admit
        self._run = run
        self._together = together
        self._tidy = tidy
        self._closed: str | None = None
        """The message for calls after close()."""
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """The condition that wakes the thread that gathers the works of a step, and the threads
        that wait for the end of a step.
        """
        self._waiting: list[Work] = []
        self._step: list[Work] = []
        """The works of the running step."""
        self._expected: dict[Hashable, int] = {}
        """The owners of works in the last step, each with its thread; they may soon submit more."""
        self._leader: int | None = None
        """The thread that makes a step, or does something between two steps."""
        self._gatherer: int | None = None
        """The thread that waits for the works of the next step."""
        self._guests = 0
        self._arrivals = 0
        self._least_patience = self._patience = least_patience
        self._singles_turn = True

    @property
    def n_waiting(self) -> int:
        """Return how many sequences have tokens that wait to be read."""
        return len(self._waiting)

    def arrive(self) -> int:
        """Return the number of a reading that begins now; those with lower numbers come first.
        Raises EntropyKVError in a process that was forked.
        """
        self._check_process()
        with self._changed:
            self._arrivals += 1
            return self._arrivals

    def submit(self, owner: Hashable, part: Part, arrival: int) -> None:
        """Submit a part of a text and wait until it was read; an error of reading it, or of
        cancel(), is then in `part.error`.

        Raises EntropyKVError after close(), and in a process that was forked.
        """
        self._check_process()
        work = Work(owner, part, arrival, threading.Condition(self._lock))
        with self._lock:
            self._check_open()
            self._waiting.append(work)
            self._expected.pop(owner, None)
            if self._gatherer is not None and not self._awaited(self._gatherer):
                self._changed.notify_all()
            try:
                while not work.done:
                    if self._is_led():
                        work.turn.wait()
                    else:
                        self._lead()
            finally:
                if work in self._waiting:
                    self._waiting.remove(work)
                self._hand_over()

    def _is_led(self) -> bool:
        """Tell whether a thread makes a step, gathers the works of one, or does something between
        two steps.
        """
        return self._leader is not None or self._guests > 0 or self._gatherer is not None

    def _hand_over(self) -> None:
        """Let the thread of a waiting work make the next step, if no thread leads."""
        if self._waiting and not self._is_led():
            self._waiting[0].turn.notify()

    def _awaited(self, gatherer: int) -> bool:
        """Tell whether the thread that gathers works should wait for the next tokens of owners with
        other threads.
        """
        return any(thread != gatherer for thread in self._expected.values())

    def rest(self, owner: Hashable) -> None:
        """Stop waiting for an owner's next tokens, because none may follow soon."""
        with self._changed:
            if self._expected.pop(owner, None) is not None:
                self._changed.notify_all()

    def cancel(self, owner: Hashable, why: str = "the decode was called off") -> None:
        """Cancel the waiting tokens of an owner: the thread that submitted them gets a PoolError
        with the reason `why`.
        """
        self._drop(lambda work: work.owner is owner, PoolError(why))

    def close(self, why: str) -> None:
        """Cancel all waiting works, and refuse new ones with an EntropyKVError with the reason.

        The leading thread calls it, so that no step is running.
        """
        with self._lock:
            self._closed = why
            self._drop(lambda _: True, EntropyKVError(why))

    @property
    def is_forked(self) -> bool:
        """Tell whether this process was forked from the one that made the scheduler.

        Such a process has none of the threads that compute steps, and may have a lock that no
        thread frees.
        """
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self.is_forked:
            raise EntropyKVError(
                "this process was forked from the one that loaded the model, and has none of its "
                "threads; load the model here, or start processes by spawn"
            )

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EntropyKVError(self._closed)

    def _drop(self, concerns: Callable[[Work], bool], error: EntropyKVError) -> None:
        """End the waiting works that `concerns` selects with an error; works of a running step are
        completed.
        """
        with self._changed:
            for work in [each for each in self._waiting if concerns(each)]:
                if work not in self._step:
                    work.part.error = error
                    self._waiting.remove(work)
                    work.done = True
                    work.turn.notify()
            self._changed.notify_all()

    def leads(self) -> bool:
        """Tell whether the calling thread makes a step, or does something between two."""
        return self._leader == threading.get_ident()

    def is_waiting(self, owner: Hashable) -> bool:
        """Tell whether tokens of an owner wait to be read."""
        return any(work.owner is owner for work in self._waiting)

    @contextmanager
    def between_steps(self, *, even_closed: bool = False) -> Iterator[None]:
        """Wait for the running step, and let the `with` block change the pool before the next one;
        such blocks may be nested.

        Raises EntropyKVError after close(), unless `even_closed`, and in a process that was forked.
        """
        self._check_process()
        if self.leads():
            yield
            return
        with self._changed:
            self._guests += 1
            try:
                while self._leader is not None:
                    self._changed.wait()
                if not even_closed:
                    self._check_open()
                self._leader = threading.get_ident()
            finally:
                self._guests -= 1
                self._hand_over()
        try:
            self._tidy()
            if not even_closed:
                self._check_open()  # tidy() may have closed the scheduler.
            yield
            self._tidy()
        finally:
            with self._changed:
                self._leader = None
                self._changed.notify_all()
                self._hand_over()

    def _lead(self) -> None:
        """Make one step, or wait until a session becomes idle."""
        self._gather()
        # While _gather() waited, another thread may have taken the lead, or read all that waited.
        if self._leader is not None or self._guests or not self._waiting:
            return
        self._leader = threading.get_ident()
        waiting = sorted(self._waiting, key=lambda work: work.arrival)
        self._changed.release()
        try:
            self._tidy()
            ready = [work for work in waiting if self._admit(work)]
            self._do(ready)
            self._tidy()
        finally:
            self._changed.acquire()
            done = [work for work in waiting if work in self._step or work.part.error is not None]
            self._step = []
            self._leader = None
            self._end(done)
        if not done:
            self._changed.wait(_CHECK_INTERVAL)

    def _do(self, ready: Sequence[Work]) -> None:
        """Make a step with the works that choose() takes from `ready`; the other works continue to
        wait.
        """
        self._singles_turn = not self._singles_turn
        with self._changed:
            possible = [work for work in ready if work.part.error is None]
            self._step = choose(possible, together=self._together, singles_turn=self._singles_turn)
        if not self._step:
            return
        start = time.monotonic()
        try:
            self._run(self._step)
        except BaseException:
            for work in self._step:
                work.part.untouched = False
                work.part.error = PoolError("a step was interrupted; call reset() first")
            raise
        of_step = min(MOST_PATIENCE, PATIENCE * (time.monotonic() - start))
        self._patience = max(self._least_patience, of_step)

    def _end(self, works: Sequence[Work]) -> None:
        for work in works:
            work.done = True
            work.turn.notify()
            if work in self._waiting:
                self._waiting.remove(work)
            if work.part.error is None:
                self._expected[work.owner] = work.thread
        self._changed.notify_all()

    def _gather(self) -> None:
        """Wait shortly for the next tokens of the sessions of the last step, so that they join this
        step.
        """
        own = self._gatherer = threading.get_ident()
        end = time.monotonic() + self._patience
        try:
            while self._leader is None and not self._guests:
                left = end - time.monotonic()
                if left <= 0 or not self._awaited(own):
                    break
                self._changed.wait(left)
        finally:
            self._gatherer = None
        self._expected.clear()
