"""Allow one call of an EntropyLlama at a time, and keep its model until the call ends."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from entropykv.drop_in.context import BudgetContext
from entropykv.errors import EntropyKVError

Answer = Generator[Any, None, None]


class CallGuard:
    """Refuse a call while another thread runs one, and end an answer that was left for another."""

    def __init__(self) -> None:
        """Make the lock; no call and no answer has begun."""
        self.lock = threading.RLock()
        self._answer: Answer | None = None
        """The current answer; an earlier one must not continue."""

    @contextmanager
    def call(self, context: BudgetContext) -> Iterator[None]:
        """Keep the model in the `with` block; raises EntropyKVError if closed, or if another thread
        calls it.
        """
        if not self.lock.acquire(blocking=False):
            _ = context.session  # Raises if another thread closes it.
            raise EntropyKVError(
                "another thread is using this EntropyLlama, which holds one sequence; let calls "
                "take turns with a lock, or give each thread a model of its own"
            )
        try:
            with context.weights:
                yield
        finally:
            self.lock.release()

    def begin(self, answer: Answer) -> None:
        """Note the answer that uses the sequence from now on."""
        self._answer = answer

    def leave(self) -> None:
        """Close the current answer, so that the session is free for another call; the caller holds
        the lock.
        """
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()

    def check_goes_on(self, answer: Answer, context: BudgetContext) -> None:
        """Raise EntropyKVError if the model was closed, or another call has used the sequence,
        since an answer began.
        """
        if self._answer is not answer:
            _ = context.session  # Raises if it was closed.
            raise EntropyKVError(
                "another call has used this EntropyLlama, which holds one sequence, before this "
                "answer was complete; end one answer before the next, or use two models"
            )

    def end(self, answer: Answer) -> None:
        """Close an answer whose consumer has left it, unless another call has done so.

        It never waits, because the garbage collector may run it: if another thread is within a
        call, the next call closes the answer.
        """
        if self._answer is answer and self.lock.acquire(blocking=False):
            try:
                self.leave()
            finally:
                self.lock.release()
