"""The engine's figures, as JSON and as Prometheus reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

from entropykv.server.engine import Engine

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

_METRICS = (
    ("kv_budget_bytes", "gauge", "kv_bytes_budget", "What the KV cache can never exceed."),
    ("kv_bytes", "gauge", "kv_bytes_now", "Bytes of the KV cache in use."),
    ("kv_peak_bytes", "gauge", "kv_bytes_peak", "Most bytes of the KV cache that were in use."),
    ("kv_entries", "gauge", "entries_kept", "Entries kept, of all KV heads."),
    ("frozen_entries", "gauge", "frozen_entries", "Entries in cold storage, of all KV heads."),
    ("frozen_bytes", "gauge", "frozen_bytes", "Bytes of entries in cold storage."),
    ("resident_peak_bytes", "gauge", "peak_rss_bytes", "Largest resident set of the process."),
    ("evictions_total", "counter", "evictions", "Entries evicted, of all KV heads."),
    ("restored_total", "counter", "entries_restored", "Entries restored from cold storage."),
    ("rebases_total", "counter", "rebases", "Times that stored keys were rotated."),
    ("prompt_tokens_total", "counter", "prompt_tokens", "Tokens of prompts that were read."),
    ("generated_tokens_total", "counter", "generated_tokens", "Tokens generated."),
    ("prompt_seconds_total", "counter", "prompt_seconds", "Seconds of reading prompts."),
    ("decode_seconds_total", "counter", "decode_seconds", "Seconds of generating tokens."),
)


def as_json(engine: Engine) -> dict[str, Any]:
    """All figures: those of SessionStats, and requests by their outcome."""
    requests = {str(outcome): count for outcome, count in engine.outcomes.items()}
    return {**dataclasses.asdict(engine.stats), "requests": {**requests, "waiting": engine.waiting}}


def as_prometheus(engine: Engine) -> str:
    """The text format of Prometheus."""
    lines = []
    for name, kind, field, text in _METRICS:
        lines += _head(name, kind, text)
        lines.append(f"entropykv_{name} {getattr(engine.stats, field)}")
    lines += _head("requests_total", "counter", "Requests that generate, by outcome.")
    lines += [
        f'entropykv_requests_total{{outcome="{outcome}"}} {count}'
        for outcome, count in engine.outcomes.items()
    ]
    lines += _head("requests_waiting", "gauge", "Requests that wait or run.")
    lines.append(f"entropykv_requests_waiting {engine.waiting}")
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP entropykv_{name} {text}", f"# TYPE entropykv_{name} {kind}"]
