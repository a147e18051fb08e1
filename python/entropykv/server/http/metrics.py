"""Return the figures of models, as JSON and in the format of Prometheus."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from entropykv.server.engine.engine import Engine
from entropykv.server.models.held_model import HeldModel
from entropykv.server.models.registry import ModelRegistry

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

_OF_CONVERSATION = ("kv_bytes_budget", "kv_bytes_now", "entries_kept", "evictions")
_METRICS = (
    ("kv_budget_bytes", "gauge", "kv_bytes_budget", "What the KV cache can never exceed."),
    ("kv_bytes", "gauge", "kv_bytes_now", "Bytes of the KV cache in use."),
    ("kv_peak_bytes", "gauge", "kv_bytes_peak", "Most bytes of the KV cache that were in use."),
    ("kv_entries", "gauge", "entries_kept", "Entries kept, of all KV heads."),
    ("frozen_entries", "gauge", "frozen_entries", "Entries in cold storage, of all KV heads."),
    ("frozen_bytes", "gauge", "frozen_bytes", "Bytes of entries in cold storage."),
    ("frozen_sketch_bytes", "gauge", "frozen_sketch_bytes", "Bytes of sketches of these entries."),
    ("frozen_overhead_bytes", "gauge", "frozen_overhead_bytes", "Bytes of their records."),
    ("resident_peak_bytes", "gauge", "peak_rss_bytes", "Largest resident set of the process."),
    ("evictions_total", "counter", "evictions", "Entries evicted, of all KV heads."),
    ("restored_total", "counter", "entries_restored", "Entries restored from cold storage."),
    ("rebases_total", "counter", "rebases", "Times that stored keys were rotated."),
    ("prompt_tokens_total", "counter", "prompt_tokens", "Tokens of prompts that were read."),
    ("generated_tokens_total", "counter", "generated_tokens", "Tokens generated."),
    ("drafted_tokens_total", "counter", "drafted_tokens", "Tokens guessed ahead and read."),
    ("accepted_drafts_total", "counter", "accepted_drafts", "Guessed tokens that were right."),
    ("draft_steps_total", "counter", "draft_steps", "Steps that wrote, where tokens are guessed."),
    ("draft_kv_bytes", "gauge", "draft_kv_bytes", "The KV budget of the draft model."),
    ("prompt_seconds_total", "counter", "prompt_seconds", "Seconds of reading prompts."),
    ("decode_seconds_total", "counter", "decode_seconds", "Seconds of generating tokens."),
)


def as_json(engine: Engine, user: str) -> dict[str, Any]:
    """Return all figures: those of SessionStats, and the numbers of requests by outcome.

    They are sums over all users; only conversations of `user` are listed.
    """
    requests = {str(outcome): count for outcome, count in engine.outcomes.items()}
    conversations = [
        {
            "name": caller.name,
            "live": live,
            **{key: getattr(stats, key) for key in _OF_CONVERSATION},
        }
        for caller, stats, live in engine.moment().conversations
        if caller.user == user
    ]
    return {
        **dataclasses.asdict(engine.stats),
        "requests": {**requests, "waiting": engine.waiting},
        "conversations": conversations,
    }


@dataclasses.dataclass
class _Metric:
    """Hold the values of one metric, each with its labels."""

    kind: str
    text: str
    values: list[tuple[dict[str, str], float]] = dataclasses.field(default_factory=list)


def as_prometheus(models: ModelRegistry) -> str:
    """Return the figures of all models in the text format of Prometheus.

    If there are several models, every value has the label `model`; the detailed figures exist only
    for loaded models.
    """
    metrics: dict[str, _Metric] = {}
    for held, engine in models.loaded():
        label = {"model": held.name} if models.has_several else {}
        for name, kind, text, own, value in _figures(engine):
            metrics.setdefault(name, _Metric(kind, text)).values.append(({**label, **own}, value))
    if models.has_several:
        for held in models.all():
            for name, kind, text, value in _of_model(held):
                found = metrics.setdefault(name, _Metric(kind, text))
                found.values.append(({"model": held.name}, value))
    lines = []
    for name, metric in metrics.items():
        lines += [
            f"# HELP entropykv_{name} {metric.text}",
            f"# TYPE entropykv_{name} {metric.kind}",
            *(f"entropykv_{name}{_labels(labels)} {value}" for labels, value in metric.values),
        ]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    escaped = (
        (name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def _of_model(held: HeldModel) -> Iterator[tuple[str, str, str, float]]:
    """Yield name, kind, meaning and value of a model's figures that exist even if it is
    not loaded.
    """
    yield "model_loaded", "gauge", "Whether the model is loaded.", int(held.engine is not None)
    yield "model_loads_total", "counter", "How often the model was loaded.", held.loads
    size = 0 if held.engine is None or held.estimate is None else held.estimate.total
    yield "model_memory_bytes", "gauge", "Estimated bytes that the model takes.", size


def _figures(engine: Engine) -> Iterator[tuple[str, str, str, dict[str, str], float]]:
    """Yield name, kind, meaning, labels and value of the figures of one loaded model."""
    for name, kind, field, text in _METRICS:
        yield name, kind, text, {}, getattr(engine.stats, field)
    text = "Requests that generate, by outcome."
    for outcome, count in engine.outcomes.items():
        yield "requests_total", "counter", text, {"outcome": str(outcome)}, count
    yield "requests_waiting", "gauge", "Requests that wait or run.", {}, engine.waiting
    for name, kind, value, text in _more(engine):
        yield name, kind, text, {}, value


def _more(engine: Engine) -> Iterator[tuple[str, str, float, str]]:
    """Yield name, kind, value and meaning of the figures that the server itself counts."""
    running = len(engine.running)
    yield "requests_running", "gauge", running, "Requests that run."
    waiting = max(0, engine.waiting - running)
    yield "requests_queued", "gauge", waiting, "Requests that wait for their turn."
    seconds, count = engine.first_chunk_seconds, engine.first_chunks
    text = "Seconds from a streamed request to its first token."
    yield "first_token_seconds_total", "counter", seconds, text
    yield "first_tokens_total", "counter", count, "Streamed requests that got a first token."
    if (images := engine.model.images) is not None:
        yield "image_bytes", "gauge", images.n_bytes, "Bytes of embeddings of images."
    pool = engine.moment().pool
    yield "conversations", "gauge", engine.n_conversations, "Conversations kept."
    yield "conversations_live", "gauge", pool.live, "Conversations that hold entries."
    yield (
        "conversations_swapped_out",
        "gauge",
        pool.swapped_out,
        "Conversations kept outside of the pool.",
    )
    yield "swapped_bytes", "gauge", pool.swapped_bytes, "Bytes of those."
    yield "text_bytes", "gauge", pool.text_bytes, "Bytes of tokens and logits of conversations."
    prefix_cache = engine.prefix_cache
    yield (
        "resumed_total",
        "counter",
        prefix_cache.resumed,
        "Requests that went on with a conversation.",
    )
    yield (
        "forked_total",
        "counter",
        prefix_cache.forked,
        "Requests that went on with a copy of one.",
    )
    yield (
        "forgotten_total",
        "counter",
        prefix_cache.forgotten,
        "Conversations dropped to make room.",
    )
