"""Show the figures of a session as a table."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from entropykv.session.stats import SessionStats

Row = tuple[str, str]


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
            f"{_used(stats)} of a budget of {_mib(stats.kv_bytes_budget)}; "
            f"{_mib(stats.kv_bytes_full)} without (f16)",
        ),
        (
            "entries",
            f"{stats.entries_kept} of {stats.entries_full} kept ({kept:.1%}); "
            f"{stats.evictions} evicted in {stats.eviction_seconds:.3f} s",
        ),
        *_frozen_rows(stats),
        *([("positions", f"re-based {stats.rebases} times")] if stats.rebases else []),
        ("peak RSS", _mib(stats.peak_rss_bytes)),
    ]


def _used(stats: SessionStats) -> str:
    """Return the most bytes that were used, or those of now if there was a larger budget before."""
    if stats.kv_bytes_peak <= stats.kv_bytes_budget:
        return f"{_mib(stats.kv_bytes_peak)} at most"
    return f"{_mib(stats.kv_bytes_now)} now"


def _draft_rows(stats: SessionStats) -> list[Row]:
    """Return how many drafts were right; empty if there were none."""
    if not stats.drafted_tokens:
        return []
    per_step = 1.0 + stats.accepted_drafts / max(stats.draft_steps, 1)
    text = f"{stats.accepted_drafts} of {stats.drafted_tokens} accepted, {per_step:.2f} tokens/step"
    rows = [("drafts", text)]
    if stats.draft_kv_bytes:
        rows.append(("KV of the draft model", _mib(stats.draft_kv_bytes)))
    return rows


def _frozen_rows(stats: SessionStats) -> list[Row]:
    """Return figures of cold storage; empty if the session has none."""
    if stats.freeze is None:
        return []
    rows = [
        (
            "frozen",
            f"{stats.frozen_entries} entries, {_mib(stats.frozen_bytes)} "
            f"({_mib(stats.frozen_bytes_peak)} at most, {stats.freeze}), "
            f"sketches in memory {_mib(stats.frozen_sketch_bytes)}, "
            f"records {_mib(stats.frozen_overhead_bytes)}",
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
    """Return a table of two columns; values longer than `width` characters continue on the next
    line.
    """
    indent = max(10, *(len(name) for name, _ in rows)) + 2
    lines = []
    for name, value in rows:
        room = max(len(value), 1) if width is None else max(width - indent, 8)
        first, *rest = textwrap.wrap(value, room) or [""]
        lines.append(f"{name:>{indent - 2}}  {first}")
        lines += [" " * indent + line for line in rest]
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
