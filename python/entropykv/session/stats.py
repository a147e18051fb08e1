"""Count what a session does, record how many entries it holds, and show its figures as a table:
SessionStats.
"""

from __future__ import annotations

import textwrap
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Row = tuple[str, str]
MOST_POINTS = 100_000


@dataclass
class SessionCounts:
    """Count what a session does; SessionStats shows it."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    decode_seconds: float = 0.0
    climbs: dict[str, int] = field(default_factory=dict)
    """How often each rung of the recovery ladder was climbed."""

    def add_prompt(self, n_tokens: int, seconds: float) -> None:
        """Count `n_tokens` tokens of a prompt, and the seconds of reading them."""
        self.prompt_tokens += n_tokens
        self.prompt_seconds += seconds

    def add_generated(self, n_tokens: int, seconds: float) -> None:
        """Count `n_tokens` generated tokens, and the seconds of generating them."""
        self.generated_tokens += n_tokens
        self.decode_seconds += seconds

    def add_climb(self, rung: str) -> None:
        """Count a climb to a rung of the recovery ladder."""
        self.climbs[rung] = self.climbs.get(rung, 0) + 1

    def clear(self) -> None:
        """Count from zero again."""
        vars(self).update(vars(SessionCounts()))

    def figures(self) -> dict[str, Any]:
        """Return the counts by their names in SessionStats."""
        return {**vars(self), "climbs": dict(self.climbs)}


class Trajectory:
    """Record the entries of all KV heads after every micro-batch, in bounded memory.

    If there are more than `most` points, every second one is removed, and from then on only every
    second (then fourth, eighth) micro-batch is recorded.
    """

    def __init__(self, n_kv_heads: int, most: int = MOST_POINTS) -> None:
        """Start without points; `n_kv_heads` is the number of KV heads of all layers."""
        self.n_kv_heads = n_kv_heads
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Remove all points and climbs."""
        self.positions = array("q")
        """The tokens read at each point, ascending; a full cache has this many entries per
        KV head.
        """
        self.hot = array("q")
        """How many entries of all KV heads were active, that is, not frozen, at each point."""
        self.frozen = array("q")
        """How many entries of all KV heads were frozen at each point."""
        self.climbs: list[tuple[int, str]] = []
        """Position and rung of each climb of the recovery ladder."""
        self._stride = 1
        self._n_seen = 0

    def record(self, position: int, hot: int, frozen: int) -> None:
        """Record a micro-batch that ended at `position`, with the active (`hot`) and frozen entries
        of all KV heads; only every n-th becomes a point: see the class.
        """
        self._n_seen += 1
        if self._n_seen % self._stride != 0:
            return
        for values, value in zip(self._arrays(), (position, hot, frozen), strict=True):
            values.append(value)
        if len(self.positions) > self._most:
            self._stride *= 2
            for values in self._arrays():
                del values[::2]

    def mark(self, position: int, rung: str) -> None:
        """Add a climb of the recovery ladder."""
        self.climbs.append((position, rung))

    def truncate(self, position: int) -> None:
        """Remove points after a position; climbs after it are moved to it."""
        keep = len(self.positions)
        while keep and self.positions[keep - 1] > position:
            keep -= 1
        for values in self._arrays():
            del values[keep:]
        self.climbs = [(min(at, position), rung) for at, rung in self.climbs]

    def means(self) -> Iterator[tuple[int, float, float]]:
        """Yield position, and the mean numbers of active and of frozen entries per KV head."""
        for position, hot, frozen in zip(*self._arrays(), strict=True):
            yield position, hot / self.n_kv_heads, frozen / self.n_kv_heads

    def to_json(self) -> dict[str, list[object]]:
        """Return `positions`, means per KV head of `hot` and `frozen` entries, and `climbs`."""
        rows = list(self.means())
        return {
            "positions": [position for position, _, _ in rows],
            "hot": [round(hot, 2) for _, hot, _ in rows],
            "frozen": [round(frozen, 2) for _, _, frozen in rows],
            "climbs": [list(climb) for climb in self.climbs],
        }

    def _arrays(self) -> tuple[array[int], array[int], array[int]]:
        return self.positions, self.hot, self.frozen


@dataclass(frozen=True)
class SessionStats:
    """Hold the figures of a session since it began; sizes are in bytes, times in elapsed
    seconds. print() shows the most important ones as a table.
    """

    model: str
    """The model's name, or the name of its file."""
    store: str
    """The store in use: headwise, device or flat."""
    policy: str
    """The policy in use; for `auto`, the one that it stands for."""
    kv_type: str
    """The type in which K and V are stored."""
    kv_budget: str
    """The current budget, as a user types it."""
    n_ctx: int
    """The most tokens that the text may have."""
    prompt_tokens: int
    """How many tokens of prompts were read."""
    generated_tokens: int
    """How many tokens were generated."""
    prompt_seconds: float
    """Seconds spent reading prompts."""
    decode_seconds: float
    """Seconds spent generating tokens."""
    kv_bytes_budget: int
    """The bytes that the pool (headwise), the entries (device) or the cache (flat) can never
    exceed.
    """
    kv_bytes_peak: int
    """The most bytes that were in use."""
    kv_bytes_now: int
    """The bytes in use now."""
    kv_bytes_full: int
    """The bytes that K and V of every token read or generated would take in f16, for every
    KV head.
    """
    kv_bytes_staging: int
    """Headwise: the bytes outside the pool, of one micro-batch of one layer. Device: those of the
    rows of one micro-batch in all layers, and of padding. Flat: the bytes of the
    largest temporary copy of the cache, made to compact, move or save it.
    """
    kv_bytes_scratch: int
    """Bytes outside kv_bytes_budget and kv_bytes_staging: working memory of the threads that
    compute attention. It depends on the budget of the largest KV head, the micro-batch and the
    threads, never on n_ctx. While session/passages.py measures what an answer looks at, 8 bytes for
    each entry come on top.
    """
    entries_kept: int
    """How many entries all KV heads hold now."""
    entries_full: int
    """How many entries a full cache would hold: tokens times KV heads."""
    evictions: int
    """How many entries of all KV heads were evicted."""
    eviction_seconds: float
    """Seconds spent choosing and dropping entries, summed over threads."""
    rebases: int
    """How often stored keys were rotated to positions within the trained context."""
    peak_rss_bytes: int
    """The largest resident memory of the process so far."""
    products: dict[str, str] = field(default_factory=dict)
    """What computes products of weights, by the type of the weights in the file: the name of
    entropykv's kernels (avx2, avxvnni, avx512vnni, neon, neondot), "llama.cpp", or both.
    """
    products_bytes_scratch: int = 0
    """Bytes of working memory for entropykv's products. They depend on the micro-batch, the widest
    row of weights and the threads.
    """
    kv_bytes_on_devices: dict[str, int] = field(default_factory=dict)
    """The bytes of the device store by device: entries, staging and working memory; empty for other
    stores.
    """
    device_traffic: dict[str, int] = field(default_factory=dict)
    """How many graphs the device store had computed on devices (`computed`), and how many copies
    went to them (`uploads`) and came from them (`downloads`), while texts were read; empty for
    other stores.
    """
    centred_layers: int = 0
    """In how many layers keys are stored without the biases that the model adds to them: see
    docs/background/quality-and-speed.md.
    """
    drafted_tokens: int = 0
    """How many tokens were guessed and read: see docs/background/drafts.md."""
    accepted_drafts: int = 0
    """How many of the guessed tokens were right."""
    draft_steps: int = 0
    """In how many steps tokens were written while there was a drafter, with drafts or without."""
    draft_kv_bytes: int = 0
    """The bytes of the KV budget of the model of --model-draft, besides kv_bytes_budget."""
    freeze: str | None = None
    """Where evicted entries are frozen, ram or disk:DIR; None: they are dropped."""
    frozen_entries: int = 0
    """How many entries of all KV heads are in cold storage now."""
    frozen_bytes: int = 0
    """The bytes of the entries in cold storage, in memory or on disk; kv_bytes_now and
    kv_bytes_peak count only active ones.
    """
    frozen_bytes_peak: int = 0
    """The most bytes that were in cold storage."""
    frozen_sketch_bytes: int = 0
    """Bytes of the sketches in memory that queries are compared with; not in frozen_bytes."""
    frozen_overhead_bytes: int = 0
    """Further bytes of cold storage in memory: the data of every entry (position, score, timer),
    the lists that find it, and reserved room.
    """
    entries_frozen: int = 0
    """How often an entry of any KV head was frozen."""
    entries_restored: int = 0
    """How often an entry was restored."""
    entries_recalled: int = 0
    """How many of the restored entries were recalled because queries needed them."""
    cold_seconds: float = 0.0
    """Seconds spent freezing, restoring, and searching cold storage."""
    climbs: dict[str, int] = field(default_factory=dict)
    """How often each rung of the recovery ladder was climbed, by its name."""

    def __str__(self) -> str:
        """Return the most important figures as a table of about ten lines."""
        return format_rows(stats_rows(self))

    @property
    def prompt_speed(self) -> float:
        """Return how many tokens of prompts were read per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_speed(self) -> float:
        """Return how many tokens were generated per second."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0


def stats_rows(stats: SessionStats) -> list[Row]:
    """Return the figures of a session as pairs (name, value)."""
    kept = stats.entries_kept / stats.entries_full if stats.entries_full else 1.0
    return [
        ("model", f"{stats.model}, {stats.store} store, policy {stats.policy}, {stats.kv_type}"),
        ("prompt", f"{stats.prompt_tokens} tokens, {stats.prompt_speed:.1f} tokens/s"),
        ("generated", f"{stats.generated_tokens} tokens, {stats.decode_speed:.1f} tokens/s"),
        *_draft_rows(stats),
        (
            "KV cache",
            f"{_used(stats)} of a budget of {mib(stats.kv_bytes_budget)}; "
            f"{mib(stats.kv_bytes_full)} without (f16)",
        ),
        (
            "entries",
            f"{stats.entries_kept} of {stats.entries_full} kept ({kept:.1%}); "
            f"{stats.evictions} evicted in {stats.eviction_seconds:.3f} s",
        ),
        *_frozen_rows(stats),
        *([("positions", f"re-based {stats.rebases} times")] if stats.rebases else []),
        ("peak RSS", mib(stats.peak_rss_bytes)),
    ]


def _used(stats: SessionStats) -> str:
    """Return in words the most bytes that were in use; if there was a larger budget before, the
    bytes in use now.
    """
    if stats.kv_bytes_peak <= stats.kv_bytes_budget:
        return f"{mib(stats.kv_bytes_peak)} at most"
    return f"{mib(stats.kv_bytes_now)} now"


def _draft_rows(stats: SessionStats) -> list[Row]:
    """Return how many drafts were right; empty if there were none."""
    if not stats.drafted_tokens:
        return []
    per_step = 1.0 + stats.accepted_drafts / max(stats.draft_steps, 1)
    text = f"{stats.accepted_drafts} of {stats.drafted_tokens} accepted, {per_step:.2f} tokens/step"
    rows = [("drafts", text)]
    if stats.draft_kv_bytes:
        rows.append(("KV of the draft model", mib(stats.draft_kv_bytes)))
    return rows


def _frozen_rows(stats: SessionStats) -> list[Row]:
    """Return figures of cold storage; empty if the session has none."""
    if stats.freeze is None:
        return []
    rows = [
        (
            "frozen",
            f"{stats.frozen_entries} entries, {mib(stats.frozen_bytes)} "
            f"({mib(stats.frozen_bytes_peak)} at most, {stats.freeze}), "
            f"sketches in memory {mib(stats.frozen_sketch_bytes)}, "
            f"records {mib(stats.frozen_overhead_bytes)}",
        ),
        (
            "restored",
            f"{stats.entries_restored} of {stats.entries_frozen} times that an entry was frozen, "
            f"{stats.entries_recalled} of them by recall; {stats.cold_seconds:.3f} s",
        ),
    ]
    climbs = ", ".join(f"{rung} {count}x" for rung, count in stats.climbs.items())
    return [*rows, ("recovery", climbs)] if climbs else rows


def format_rows(rows: list[Row], width: int | None = None) -> str:
    """Return a table of two columns; values continue on the next line where a line would have more
    than `width` characters. None: lines have any length.
    """
    indent = max(10, *(len(name) for name, _ in rows)) + 2
    lines = []
    for name, value in rows:
        room = max(len(value), 1) if width is None else max(width - indent, 8)
        first, *rest = textwrap.wrap(value, room) or [""]
        lines.append(f"{name:>{indent - 2}}  {first}")
        lines += [" " * indent + line for line in rest]
    return "\n".join(lines)


def mib(size: int) -> str:
    """Return a number of bytes in MiB, as users read it."""
    return f"{size / 2**20:.1f} MiB"
