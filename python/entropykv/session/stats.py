"""SessionStats: figures of what a session did."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class SessionStats:
    """Counts since the session began; bytes are bytes, times are seconds of the wall clock."""

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
    """Most bytes that were in use."""
    kv_bytes_now: int
    kv_bytes_full: int
    """K and V of every token read or generated, for every KV head, in f16."""
    kv_bytes_staging: int
    """Besides the pool: one micro-batch of one layer (headwise). Besides the cache: the largest
    copy that was made of it, for a moment: to compact it, to move or to save it (flat)."""
    kv_bytes_scratch: int
    """Besides both: what the threads of the attention op work with. It grows with the budget of the
    largest KV head, with the micro-batch and the threads, never with n_ctx."""
    entries_kept: int
    """Entries of all KV heads now."""
    entries_full: int
    """Entries that a full cache would hold: tokens times KV heads."""
    evictions: int
    """Entries evicted, of all KV heads."""
    eviction_seconds: float
    """Time spent choosing and dropping entries, summed over threads."""
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
    """Entries of all KV heads in cold storage now."""
    frozen_bytes: int = 0
    """Bytes of theirs, in memory or on disk; those of kv_bytes_* are hot entries only."""
    frozen_bytes_peak: int = 0
    """Most bytes that were in cold storage."""
    frozen_sketch_bytes: int = 0
    """Bytes of the sketches that queries are compared with, in memory, besides frozen_bytes."""
    entries_frozen: int = 0
    """How often an entry went into cold storage, of all KV heads."""
    entries_restored: int = 0
    """How often one came back."""
    entries_recalled: int = 0
    """How often of these because queries looked for it."""
    cold_seconds: float = 0.0
    """Time spent freezing, restoring, and looking through cold storage."""
    climbs: dict[str, int] = field(default_factory=dict)
    """How often each rung of the recovery ladder was climbed, by its name."""

    @property
    def prompt_speed(self) -> float:
        """Tokens of the prompt per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_speed(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # VmHWM is of this program alone; getrusage() remembers its parent's
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
