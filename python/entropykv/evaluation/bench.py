"""Measure how fast a model reads and writes inside a budget, against stock in the same run.

For every context length, each round reads the prompt with stock and with every budget, then decodes
in short blocks in turn, so that all meet the same state of the machine; medians count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from entropykv import _core
from entropykv.calibration.texts import read_texts
from entropykv.errors import ContextError
from entropykv.evaluation.rounds import disagreement
from entropykv.evaluation.work import (
    AttentionLoad,
    Times,
    WorkFigures,
    full_attention_operations,
    works_of,
)
from entropykv.llamacpp.stock import StockSession
from entropykv.model.geometry import ModelGeometry, read_geometry
from entropykv.policy.names import AUTO
from entropykv.session.session import Session

BLOCK = 16
"""How many tokens one contestant decodes before it is the next one's turn."""

NO_FLASH = "stock, no flash attention"
"""The contestant whose attention is many nodes, which are not told apart from others."""

_READ_BYTES = 512 << 20  # far more bytes than any cache has


@dataclass(frozen=True)
class BenchSettings:
    """Say what to measure; lengths in tokens, budgets as fractions of the length.

    `no_flash`: whether stock llama.cpp is measured without flash attention, too.
    """

    lengths: Sequence[int]
    budgets: Sequence[float] = (1.0, 0.2)
    kv_types: Sequence[str] = ("f16", "q8_0")
    policy: str = AUTO
    n_threads: int = 0
    n_generate: int = 64
    rounds: int = 3
    no_flash: bool = True


@dataclass(frozen=True)
class BenchRow:
    """Hold one contestant at one length: tokens per second, and ratios to stock flash attention.

    `kv_bytes` and `eviction_share` (of all time spent) are 0 for stock llama.cpp. `products`: see
    SessionStats. `works`: weights and attention apart. `disagreement`: by what share the slowest
    round took longer than the fastest.
    """

    length: int
    name: str
    prompt_speed: float
    prompt_ratio: float
    decode_speed: float
    decode_ratio: float
    kv_bytes: int = 0
    eviction_share: float = 0.0
    products: dict[str, str] = field(default_factory=dict)
    disagreement: float = 0.0
    works: tuple[WorkFigures, ...] = ()


@dataclass
class _Contestant:
    name: str
    session: StockSession | Session
    apart: dict[str, Times] = field(default_factory=dict)
    """What each kind of work took, by phase: of a prompt, of BLOCK tokens after it."""
    loads: dict[str, AttentionLoad] = field(default_factory=dict)
    prompt_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)

    def read(self, tokens: Sequence[int]) -> None:
        self.session.reset()
        start = time.perf_counter()
        self.session.decode(tokens)
        self.prompt_seconds.append(time.perf_counter() - start)

    def write(self, tokens: Sequence[int]) -> None:
        start = time.perf_counter()
        for token in tokens:
            self.session.decode([token])
        self.decode_seconds.append((time.perf_counter() - start) / len(tokens))

    def take_apart(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Read and write once more, every node by itself."""
        self.session.reset()
        for phase, part in (("prompt", (prompt,)), ("decode", [[token] for token in tokens])):
            self.session.hook.measure_work(True)
            for step in part:
                self.session.decode(step)
            self.apart[phase] = self.session.hook.work
        self.session.hook.measure_work(False)

    def works(self, stock: _Contestant) -> tuple[WorkFigures, ...]:
        """Figures of the kinds of work; none where it was not taken apart."""
        return tuple(
            work
            for phase, times in self.apart.items()
            for work in works_of(
                phase, times, stock.apart[phase], self.loads.get(phase, AttentionLoad())
            )
        )

    def row(self, length: int, stock: _Contestant) -> BenchRow:
        prompt = statistics.median(self.prompt_seconds)
        decode = statistics.median(self.decode_seconds)
        kv_bytes, share = 0, 0.0
        products: dict[str, str] = {}
        if isinstance(self.session, Session):
            stats = self.session.stats()
            spent = self.prompt_seconds[-1] + BLOCK * sum(self.decode_seconds) / len(
                self.prompt_seconds
            )  # the counters are those of the last round
            kv_bytes, share = stats.kv_bytes_peak, stats.eviction_seconds / spent
            products = stats.products
        return BenchRow(
            length=length,
            name=self.name,
            prompt_speed=length / prompt,
            prompt_ratio=statistics.median(stock.prompt_seconds) / prompt,
            decode_speed=1 / decode,
            decode_ratio=statistics.median(stock.decode_seconds) / decode,
            kv_bytes=kv_bytes,
            eviction_share=share,
            products=products,
            disagreement=self._disagreement(),
            works=self.works(stock),
        )

    def _disagreement(self) -> float:
        n_blocks = len(self.decode_seconds) // len(self.prompt_seconds)  # blocks in one round
        firsts = range(0, len(self.decode_seconds), max(1, n_blocks))
        written = [statistics.median(self.decode_seconds[i : i + n_blocks]) for i in firsts]
        return max(disagreement(self.prompt_seconds), disagreement(written))


def bench(
    model: str | os.PathLike[str],
    settings: BenchSettings,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[BenchRow]:
    """Measure a model; yields the rows of each length when it is done.

    `progress` is called with (steps done, steps in all). Raises as Session does, and ContextError
    for a length that is impossible.
    """
    for length in settings.lengths:
        if length < BLOCK:
            raise ContextError(f"a length cannot be {length}; give {BLOCK} tokens or more")
    done = 0
    for length in settings.lengths:
        contestants: list[_Contestant] = []
        try:
            contestants.extend(_contestants(model, settings, length))
            n_apart = sum(map(_is_taken_apart, contestants))
            total = (settings.rounds * len(contestants) + n_apart) * len(settings.lengths)
            for _ in _rounds(contestants, settings, length):
                done += 1
                if progress is not None:
                    progress(done, total)
            _set_loads(contestants, read_geometry(model), length)
            yield from (c.row(length, contestants[0]) for c in contestants)
        finally:
            for contestant in contestants:
                contestant.session.close()


def _contestants(
    model: str | os.PathLike[str], settings: BenchSettings, length: int
) -> Iterator[_Contestant]:
    """Make all contestants, stock flash attention first."""
    n_ctx = length + settings.n_generate + BLOCK
    stock = {"stock": True, **({NO_FLASH: False} if settings.no_flash else {})}
    for name, flash in stock.items():
        yield _Contestant(
            name, StockSession(model, n_ctx=n_ctx, n_threads=settings.n_threads, flash=flash)
        )
    for kv_type in settings.kv_types:
        for budget in settings.budgets:
            session = Session(
                model,
                n_ctx=n_ctx,
                kv_budget=1.0 if budget == 1.0 else max(2, int(budget * length)),
                kv_type=kv_type,
                policy=settings.policy,
                store="headwise",
                n_threads=settings.n_threads,
            )
            yield _Contestant(f"{kv_type} {budget:g}", session)


def _rounds(contestants: list[_Contestant], settings: BenchSettings, length: int) -> Iterator[None]:
    """Read and write in turn; yields after every prompt."""
    stock = contestants[0].session
    assert isinstance(stock, StockSession)  # noqa: S101
    last = length + settings.n_generate
    tokens = history_tokens(stock, last)
    for _ in range(settings.rounds):
        for contestant in contestants:
            contestant.read(tokens[:length])
            yield
        for first in range(length, last, BLOCK):
            for contestant in contestants:
                contestant.write(tokens[first : first + BLOCK])
    for contestant in filter(_is_taken_apart, contestants):
        contestant.take_apart(tokens[:length], tokens[length : length + BLOCK])
        yield


def _is_taken_apart(contestant: _Contestant) -> bool:
    """Tell whether the attention of its graphs is one node a layer."""
    return contestant.name != NO_FLASH


def _set_loads(contestants: Sequence[_Contestant], geometry: ModelGeometry, length: int) -> None:
    """Tell what attention had to do: stock holds all in f16, we what is in the cache.

    How many rows a prompt's tokens attended to is known where nothing was evicted.
    """
    for contestant in contestants:
        held = geometry.cached_values * 2 * (length + BLOCK / 2)
        operations = full_attention_operations(geometry, length)
        if isinstance(contestant.session, Session):
            stats = contestant.session.stats()
            held = stats.kv_bytes_now
            if stats.entries_kept < stats.entries_full:
                operations = 0.0
        contestant.loads = {
            "prompt": AttentionLoad(operations=operations),
            "decode": AttentionLoad(bytes=held * BLOCK),
        }


def history_tokens(session: StockSession | Session, n_tokens: int) -> list[int]:
    """Return so many tokens of the calibration texts, again from the first one where they end."""
    tokens = session.tokenize("\n\n".join(text.content for text in read_texts()))
    return (tokens * (1 + n_tokens // len(tokens)))[:n_tokens]


def read_bandwidth(n_threads: int) -> float:
    """Measure bytes per second of a plain read of memory with so many threads: the best of 5."""
    return max(_core.read_bandwidth(_READ_BYTES, n_threads) for _ in range(5))
