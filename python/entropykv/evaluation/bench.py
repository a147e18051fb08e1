"""Measure how fast a model reads and writes inside a budget, against stock llama.cpp in the same
run.

For every context length, each round first reads the prompt with stock and with every budget. Then
all contestants decode short blocks in turn, so that they run under the same load of the machine.
The median of the rounds is reported.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from entropykv import _core
from entropykv.errors import ContextError
from entropykv.evaluation.combination import COMPARED_TYPES
from entropykv.evaluation.metrics import disagreement
from entropykv.evaluation.stock import StockSession
from entropykv.evaluation.texts import read_texts
from entropykv.model.geometry import ModelGeometry, read_geometry
from entropykv.policy.policy import AUTO
from entropykv.session.session import Session
from entropykv.settings.cache_options import CacheOptions

WORKS = ("weights", "attention", "rest")
"""The kinds of work: products of weights; storing K and V, and attending to them; norms, rotations
and all other nodes of the graph.
"""


@dataclass(frozen=True)
class WorkFigures:
    """Hold the figures of one kind of work, of stock llama.cpp or of one budget: `phase` is prompt
    or decode, `work` one of WORKS.

    `seconds`: for the whole prompt, or for decoding BLOCK tokens. `share`: the fraction of the
    seconds of all kinds of work. `ratio`: stock's seconds divided by these. Operations and bytes
    per second, 0 if unknown: of weights, the operations of their products, and the bytes read; of
    attention, only operations over a full cache (prompt), or only bytes of entries in use (decode).
    """

    phase: str
    work: str
    seconds: float
    share: float
    ratio: float
    operations_per_second: float = 0.0
    bytes_per_second: float = 0.0


@dataclass(frozen=True)
class AttentionLoad:
    """Hold the operations of attention in reading a prompt, or the bytes of K and V that attention
    reads while BLOCK tokens are decoded; 0 if unknown.
    """

    operations: float = 0.0
    bytes: float = 0.0


Times = Mapping[str, tuple[float, float, float]]


def works_of(phase: str, times: Times, stock: Times, load: AttentionLoad) -> list[WorkFigures]:
    """Return the figures of every kind of work that took time.

    `times`, and `stock` for stock llama.cpp: seconds, operations and bytes by the kind of work.
    They were measured while every node of the graph was computed separately, also the nodes that
    entropykv computes. `load`: the work of attention, which llama.cpp does not count.
    """
    total = sum(seconds for seconds, _, _ in times.values())
    found = []
    for work in WORKS:
        seconds, operations, n_bytes = times[work]
        if work == "attention":
            operations, n_bytes = load.operations, load.bytes
        if seconds > 0:
            found.append(
                WorkFigures(
                    phase=phase,
                    work=work,
                    seconds=seconds,
                    share=seconds / total,
                    ratio=stock[work][0] / seconds,
                    operations_per_second=operations / seconds,
                    bytes_per_second=n_bytes / seconds,
                )
            )
    return found


def full_attention_operations(geometry: ModelGeometry, n_tokens: int) -> float:
    """Return how many operations causal attention of a prompt takes: two per value and visible
    token.

    Sliding windows are ignored, so that the result is too large for a model that has some.
    """
    values = sum(geometry.heads_per_layer) * (geometry.head_dim_k + geometry.head_dim_v)
    return 2 * values * n_tokens * (n_tokens + 1) / 2


BLOCK = 16
"""How many tokens one contestant decodes before the next one takes its turn."""

NO_FLASH = "stock, no flash attention"
"""The name of stock llama.cpp without flash attention. Its attention has many graph nodes, which
cannot be told apart from other nodes.
"""

_READ_BYTES = 512 << 20  # Far more bytes than any CPU cache has.


@dataclass(frozen=True)
class BenchSettings:
    """Hold what bench() measures; lengths are those of prompts, in tokens, budgets are fractions of
    the length.

    `n_generate`: how many tokens follow a prompt in each of the `rounds`. `n_threads` 0: the usable
    cores. `no_flash`: also measure stock llama.cpp without flash attention.
    """

    lengths: Sequence[int]
    budgets: Sequence[float] = (1.0, 0.2)
    kv_types: Sequence[str] = COMPARED_TYPES
    policy: str = AUTO
    n_threads: int = 0
    n_generate: int = 64
    rounds: int = 3
    no_flash: bool = True


@dataclass(frozen=True)
class BenchRow:
    """Hold the figures of stock llama.cpp or of one budget at one length: tokens per second, and
    ratios to stock with flash attention.

    `length`: of the prompt, in tokens. A ratio above 1 is faster than stock. `kv_bytes` (the peak
    of the cache) and `eviction_share` (the fraction of the time that eviction took) are 0 for stock
    llama.cpp. `products`: see SessionStats. `works`: the figures of each kind of work.
    `disagreement`: by what share the slowest round took longer than the fastest.
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
    """Seconds, operations and bytes of each kind of work, for phase prompt (the whole prompt) and
    decode (BLOCK tokens).
    """
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
        """Read and write once more while llama.cpp times every graph node separately."""
        self.session.reset()
        for phase, part in (("prompt", (prompt,)), ("decode", [[token] for token in tokens])):
            self.session.hook.measure_work(True)
            for step in part:
                self.session.decode(step)
            self.apart[phase] = self.session.hook.work
        self.session.hook.measure_work(False)

    def works(self, stock: _Contestant) -> tuple[WorkFigures, ...]:
        """Return the figures of each kind of work; empty if take_apart() was not called."""
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
            )  # Sessions count anew in every round.
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
        n_blocks = len(self.decode_seconds) // len(self.prompt_seconds)
        firsts = range(0, len(self.decode_seconds), max(1, n_blocks))
        written = [statistics.median(self.decode_seconds[i : i + n_blocks]) for i in firsts]
        return max(disagreement(self.prompt_seconds), disagreement(written))


def bench(
    model: str | os.PathLike[str],
    settings: BenchSettings,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[BenchRow]:
    """Measure a model; yields the rows of a length once it has been measured.

    `progress` is called with (steps done, total steps). Raises the errors of Session, and
    ContextError for a length below BLOCK, or one that the model cannot have.
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
    """Load and yield the contestants one by one: stock llama.cpp with flash attention, with
    settings.no_flash also without it, then a session for each type and budget.
    """
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
                learn=False,
                store="headwise",
                n_threads=settings.n_threads,
                fixed_threads=True,
            )
            yield _Contestant(f"{kv_type} {budget:g}", session)


def _rounds(contestants: list[_Contestant], settings: BenchSettings, length: int) -> Iterator[None]:
    """Let all contestants read and write in turn, then time their nodes; yields at each prompt."""
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
    """Tell whether a contestant's attention is one node per layer, so that it can be timed."""
    return contestant.name != NO_FLASH


def _set_loads(contestants: Sequence[_Contestant], geometry: ModelGeometry, length: int) -> None:
    """Set the work of attention for each contestant: stock reads all entries in f16, a Session
    those that its cache holds.

    The number of rows that a prompt's tokens attend to is known only if nothing was evicted;
    otherwise operations are 0.
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
    """Return `n_tokens` tokens of the calibration texts, which are repeated if too short."""
    tokens = session.tokenize("\n\n".join(text.content for text in read_texts()))
    return (tokens * (1 + n_tokens // len(tokens)))[:n_tokens]


def read_bandwidth(n_threads: int) -> float:
    """Return the bytes per second that `n_threads` threads read from memory, in the best of 5
    trials.
    """
    return max(_core.read_bandwidth(_READ_BYTES, n_threads) for _ in range(5))


_LETTERS_PER_TOKEN = 3


@dataclass(frozen=True)
class DraftRow:
    """Hold the figures of one task: median speeds in tokens per second, without and with drafts;
    how many tokens a step writes with drafts; and how many drafts were read, and were right.
    """

    task: str
    speed_without: float
    speed_with: float
    tokens_per_step: float
    drafted: int
    accepted: int
    same: bool
    """Whether all texts are the same with drafts and without."""

    @property
    def ratio(self) -> float:
        """Return how many times as fast writing is with drafts."""
        return self.speed_with / self.speed_without


def draft_tasks(text: str, length: int) -> Iterator[tuple[str, str]]:
    """Yield names and prompts of about `length` tokens, from a text that is long enough."""
    text = text[: _LETTERS_PER_TOKEN * length]
    yield "copy", f"{text}\n\nThe same text once more:\n\n{text[:200]}"
    sentences = [part.strip() for part in text.split(". ") if part.strip()]
    turned = ". ".join(reversed(sentences))
    yield "quote", f"{text}\n\nIts sentences, the last one first:\n\n{turned[:400]}"
    rows = [{"id": i, "name": f"item {i}", "price": i * 7 % 100} for i in range(length // 24)]
    table = "\n".join(f"{row['id']};{row['name']};{row['price']}" for row in rows)
    yield (
        "table",
        f"id;name;price\n{table}\n\nAs JSON:\n\n" + json.dumps(rows[: len(rows) // 4])[:-1],
    )
    yield "prose", text


def bench_drafts(
    model: str | os.PathLike[str],
    options: CacheOptions,
    text: str,
    *,
    length: int,
    n_tokens: int,
    rounds: int,
) -> Iterator[DraftRow]:
    """Yield the figures of each task, with prompts of `length` tokens and `n_tokens` written ones.

    Three tasks copy: they give the model a document and the first words of something that repeats
    it. The fourth lets it go on writing prose. Every text is written without drafts and with them,
    one after the other in every round; DraftRow.same says whether the texts are the same.

    `options.spec_type` and the options of a draft model say how tokens are guessed; n_ctx is set
    here. Raises the errors of Session.
    """
    options = replace(options, n_ctx=length + n_tokens + 1)
    without = replace(options, spec_type="none", spec_draft_model=None)
    with Session(model, without) as plain, Session(model, options) as drafting:
        for task, prompt in draft_tasks(text, length):
            tokens = plain.tokenize(prompt)[-length:]
            plain_speeds, speeds, same = [], [], True
            before = drafting.stats()
            for _ in range(rounds):
                expected, speed = write(plain, tokens, n_tokens)
                plain_speeds.append(speed)
                found, speed = write(drafting, tokens, n_tokens)
                speeds.append(speed)
                same = same and found == expected
            now = drafting.stats()
            accepted = now.accepted_drafts - before.accepted_drafts
            yield DraftRow(
                task=task,
                speed_without=statistics.median(plain_speeds),
                speed_with=statistics.median(speeds),
                tokens_per_step=1.0 + accepted / max(now.draft_steps - before.draft_steps, 1),
                drafted=now.drafted_tokens - before.drafted_tokens,
                accepted=accepted,
                same=same,
            )


def write(session: Session, tokens: Sequence[int], n: int) -> tuple[list[int], float]:
    """Read a prompt and write n tokens; returns the written ones, and how many per second."""
    session.reset()
    session.decode(tokens)
    start = time.perf_counter()
    written = list(session.generate([], n))
    return written, len(written) / (time.perf_counter() - start)
