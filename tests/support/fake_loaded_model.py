"""Stand in for the model and the pool of a server in tests of the parts around them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from entropykv.session.pool import PoolStats
from entropykv.session.reuse import PrefixIndex
from entropykv.session.stats import SessionStats


def _zeros(of: Any) -> Any:
    required = [each for each in dataclasses.fields(of) if each.default is dataclasses.MISSING]
    return of(**{each.name: 0 for each in required if each.default_factory is dataclasses.MISSING})


class FakePool:
    """Stand in for a pool of one or several conversations."""

    def __init__(self, n_sequences: int = 1) -> None:
        self.holds_one = n_sequences == 1
        self.runner = self.scheduler = self.kept_texts = self.shared = self
        self.factory = self.facts = self
        self.n_let_go = 0
        self.index = PrefixIndex()
        self.n_sequences = n_sequences
        self.bytes_full_per_token = self.n_kv_heads = 0

    def between_steps(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stats(self) -> PoolStats:
        return _zeros(PoolStats)

    def counters(self) -> dict[str, int]:
        return {}

    def sessions(self) -> list[Any]:
        return []


class FakeLoadedModel:
    """Stand in for a loaded model; it reads nothing."""

    name = "fake"

    def __init__(self, pool: FakePool | None = None) -> None:
        self.pool = pool or FakePool()

    def stats(self) -> SessionStats:
        return _zeros(SessionStats)

    def close(self) -> None:
        pass
