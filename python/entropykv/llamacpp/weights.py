"""Keep the weights of a loaded model as long as anybody reads them: Weights."""

from __future__ import annotations

import threading
from collections.abc import Callable

from entropykv.errors import EntropyKVError


class Weights:
    """Count those who use a loaded model, and free it when the last of them has ended.

    An owner holds the weights from share() to release(). A call that reads them, as one that turns
    text into tokens does, holds them within `with weights:`, so that a thread that closes the model
    meanwhile does not take them away from it.
    """

    def __init__(self, free: Callable[[], object]) -> None:
        """Begin with one owner; `free` is called once, by the thread that ends last."""
        self._free = free
        self._lock = threading.RLock()  # garbage may be collected by who holds it
        self._owners = 1
        self._calls = 0

    def share(self) -> Weights:
        """Add an owner, and return these weights; raises EntropyKVError once they are closed."""
        with self._lock:
            self._check_open()
            self._owners += 1
        return self

    def release(self) -> None:
        """Take away an owner; without any, calls are refused, and those that run are the last."""
        with self._lock:
            self._owners -= 1
            is_last = self._owners == 0 and self._calls == 0
        if is_last:
            self._free()

    def __enter__(self) -> None:
        """Begin a call that reads the weights; raises EntropyKVError once they are closed."""
        with self._lock:
            self._check_open()
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        """End the call; the last one after release() frees the weights."""
        with self._lock:
            self._calls -= 1
            is_last = self._owners == 0 and self._calls == 0
        if is_last:
            self._free()

    def _check_open(self) -> None:
        if self._owners == 0:
            raise EntropyKVError("the model is closed; load it again")
