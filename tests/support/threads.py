"""Run functions at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of functions that run at the same time, each in a thread of its own;
    raises the first of their exceptions.
    """
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
