"""Keep the weights of a loaded model as long as an owner or a call needs them: Weights."""

from __future__ import annotations

import threading
from collections.abc import Callable

from entropykv.errors import EntropyKVError


class Weights:
    """Count the owners and the running calls of a loaded model, and free it after the last of them.

    An owner holds the weights from share() to release(). A call that reads them, such as a
    tokenization, holds them within `with weights:`, so that another thread that closes the model
    cannot free them during the call.
    """

    def __init__(self, free: Callable[[], object]) -> None:
        """Start with one owner; `free` is called once, by the thread that ends last."""
        self._free = free
        # Reentrant, because the garbage collector may run in a thread that holds the lock.
        self._lock = threading.RLock()
        self._owners = 1
        self._calls = 0

    def share(self) -> Weights:
        """Add an owner, and return these weights; raises EntropyKVError if they are closed."""
        with self._lock:
            self._check_open()
            self._owners += 1
        return self

    def release(self) -> None:
        """Remove an owner; without owners, new calls are refused, and running ones are the last."""
        self._end(owners=1)

    def __enter__(self) -> None:
        """Begin a call that reads the weights; raises EntropyKVError if they are closed."""
        with self._lock:
            self._check_open()
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        """End the call; the last one after release() frees the weights."""
        self._end(calls=1)

    def _end(self, *, owners: int = 0, calls: int = 0) -> None:
        with self._lock:
            self._owners -= owners
            self._calls -= calls
            is_last = self._owners == 0 and self._calls == 0
        if is_last:
            self._free()

    def _check_open(self) -> None:
        if self._owners == 0:
            raise EntropyKVError("the model is closed; load it again")
