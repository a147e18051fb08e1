"""Hold the figures of what a session did: counts, and all that SessionStats shows."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class SessionCounts:
    """Count what a session does; SessionStats shows it."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    decode_seconds: float = 0.0
    climbs: dict[str, int] = field(default_factory=dict)
    """How often the recovery ladder was climbed, by rung."""


@dataclass(frozen=True)
class SessionStats:
    """Hold counts since the session began; bytes are bytes, times are seconds of the wall clock."""

    model: str
    store: str
    policy: str
    kv_type: str
    kv_budget: str
    n_ctx: int
    prompt_tokens: int
    generated_tokens: int
    prompt_seconds: float
    decode_seconds: float
    kv_bytes_budget: int
    """What the pool (headwise) or the cache (flat) can never exceed."""
    kv_bytes_peak: int
    """The most bytes that were in use."""
    kv_bytes_now: int
    kv_bytes_full: int
    """What K and V of every token read or generated would take, for every KV head, in f16."""
    kv_bytes_staging: int
    """Bytes besides the pool: one micro-batch of one layer (headwise). Or besides the cache: the
    largest copy that was made of it, for a moment, to compact, move or save it (flat).
    """
    kv_bytes_scratch: int
    """Bytes besides both: what the threads of the attention op work with. They grow with the budget
    of the largest KV head, with the micro-batch and the threads, never with n_ctx.
    """
    entries_kept: int
    """How many entries all KV heads hold now."""
    entries_full: int
    """How many entries a full cache would hold: tokens times KV heads."""
    evictions: int
    """How many entries were evicted, of all KV heads."""
    eviction_seconds: float
    """Seconds spent choosing and dropping entries, summed over threads."""
    rebases: int
    """How often stored keys were rotated to positions that the model was trained for."""
    peak_rss_bytes: int
    products: dict[str, str] = field(default_factory=dict)
    """Who computes the products of weights, by their type in the file: the name of our kernels
    (avx2, avxvnni, avx512vnni, neon, neondot), "llama.cpp", or both."""
    products_bytes_scratch: int = 0
    """Bytes that the threads of our kernels work with. They grow with the micro-batch, the widest
    row of weights and the threads."""
    freeze: str | None = None
    """Where evicted entries are frozen, ram or disk:DIR; None: they are dropped."""
    frozen_entries: int = 0
    """How many entries of all KV heads are in cold storage now."""
    frozen_bytes: int = 0
    """The bytes of them, in memory or on disk; kv_bytes_* count hot entries only."""
    frozen_bytes_peak: int = 0
    """The most bytes that were in cold storage."""
    frozen_sketch_bytes: int = 0
    """Bytes of the sketches that queries are compared with, in memory, besides frozen_bytes."""
    frozen_overhead_bytes: int = 0
    """Bytes that cold storage takes of memory besides both: what is known of every entry (position,
    score, timer), the lists that find it, and room that is taken before it is needed."""
    entries_frozen: int = 0
    """How often an entry of any KV head went into cold storage."""
    entries_restored: int = 0
    """How often an entry came back."""
    entries_recalled: int = 0
    """How many of these came back because queries looked for them."""
    cold_seconds: float = 0.0
    """Seconds spent freezing, restoring, and looking through cold storage."""
    climbs: dict[str, int] = field(default_factory=dict)
    """How often each rung of the recovery ladder was climbed, by its name."""

    @property
    def prompt_speed(self) -> float:
        """Return the tokens of the prompt read per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_speed(self) -> float:
        """Return the tokens generated per second."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # VmHWM is of this program alone, but getrusage() remembers its parent's
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
