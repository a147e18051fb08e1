"""Allow one call of an EntropyLlama at a time, and keep its model until the call ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from entropykv.drop_in.context import BudgetContext
from entropykv.errors import EntropyKVError


class CallGuard:
    """Refuse a call while another thread runs one."""

    def __init__(self) -> None:
        """Make the lock; no call and no answer has begun."""
        self.lock = threading.RLock()
        self._answer: object = None
        """Identifies the current answer; an earlier one must not continue."""

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

    def begin_answer(self) -> object:
        """Return an object that identifies a new answer; earlier answers become invalid."""
        self._answer = object()
        return self._answer

    def check_goes_on(self, answer: object) -> None:
        """Raise EntropyKVError if another call has used the sequence since an answer began."""
        if self._answer is not answer:
            raise EntropyKVError(
                "another call has used this EntropyLlama, which holds one sequence, before this "
                "answer was complete; end one answer before the next, or use two models"
            )
