"""Return the figures of models, as JSON and in the format of Prometheus."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric, generate_latest
from prometheus_client.registry import Collector

from entropykv.server.engine.engine import Engine
from entropykv.server.models.held_model import HeldModel
from entropykv.server.models.registry import ModelRegistry

PROMETHEUS = CONTENT_TYPE_PLAIN_0_0_4

_OF_CONVERSATION = ("kv_bytes_budget", "kv_bytes_now", "entries_kept", "evictions")
_METRICS = (
    # Name, field of SessionStats, meaning. What ends with _total is a counter, all else a gauge.
    ("kv_budget_bytes", "kv_bytes_budget", "What the KV cache can never exceed."),
    ("kv_bytes", "kv_bytes_now", "Bytes of the KV cache in use."),
    ("kv_peak_bytes", "kv_bytes_peak", "Most bytes of the KV cache that were in use."),
    ("kv_entries", "entries_kept", "Entries kept, of all KV heads."),
    ("frozen_entries", "frozen_entries", "Entries in cold storage, of all KV heads."),
    ("frozen_bytes", "frozen_bytes", "Bytes of entries in cold storage."),
    ("frozen_sketch_bytes", "frozen_sketch_bytes", "Bytes of sketches of frozen entries."),
    ("frozen_overhead_bytes", "frozen_overhead_bytes", "Bytes of records of frozen entries."),
    ("resident_peak_bytes", "peak_rss_bytes", "Largest resident set of the process."),
    ("evictions_total", "evictions", "Entries evicted, of all KV heads."),
    ("restored_total", "entries_restored", "Entries restored from cold storage."),
    ("rebases_total", "rebases", "Times that stored keys were rotated."),
    ("prompt_tokens_total", "prompt_tokens", "Tokens of prompts that were read."),
    ("generated_tokens_total", "generated_tokens", "Tokens generated."),
    ("drafted_tokens_total", "drafted_tokens", "Tokens guessed ahead and read."),
    ("accepted_drafts_total", "accepted_drafts", "Guessed tokens that were right."),
    ("draft_steps_total", "draft_steps", "Steps that wrote, where tokens are guessed."),
    ("draft_kv_bytes", "draft_kv_bytes", "The KV budget of the draft model."),
    ("prompt_seconds_total", "prompt_seconds", "Seconds of reading prompts."),
    ("decode_seconds_total", "decode_seconds", "Seconds of generating tokens."),
)


def as_json(engine: Engine, user: str) -> dict[str, Any]:
    """Return the figures of SessionStats, and as `requests` the numbers of requests by outcome.

    They are sums over all users; `conversations` lists only those of `user`.
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


def as_prometheus(models: ModelRegistry) -> bytes:
    """Return the figures of all models in the text format of Prometheus.

    If there are several models, every value has the label `model`; the detailed figures exist only
    for loaded models.
    """
    return generate_latest(_Figures(models))


class _Figures(Collector):
    """Collect the figures of a registry of models; unlike prometheus_client's own metrics, they are
    counted elsewhere, and belong to no registry of the process.
    """

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        models, metrics = self._models, dict[str, Metric]()

        def add(name: str, value: float, text: str, labels: dict[str, str]) -> None:
            name = f"entropykv_{name}"
            # prometheus_client appends `_total` to the names of counters.
            base = name.removesuffix("_total")
            kind = "gauge" if base == name else "counter"
            metrics.setdefault(name, Metric(base, text, kind)).add_sample(name, labels, value)

        for held, engine in models.loaded():
            label = {"model": held.name} if models.has_several else {}
            for outcome, count in engine.outcomes.items():
                labels = {**label, "outcome": str(outcome)}
                add("requests_total", count, "Requests that generate, by outcome.", labels)
            for name, value, text in _figures(engine):
                add(name, value, text, label)
        if models.has_several:
            for held in models.all():
                for name, value, text in _of_model(held):
                    add(name, value, text, {"model": held.name})
        return metrics.values()


def _of_model(held: HeldModel) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and meaning of a model's figures that exist even if it is not loaded."""
    yield "model_loaded", int(held.engine is not None), "Whether the model is loaded."
    yield "model_loads_total", held.loads, "How often the model was loaded."
    size = 0 if held.engine is None or held.estimate is None else held.estimate.total
    yield "model_memory_bytes", size, "Estimated bytes that the model takes."


def _figures(engine: Engine) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and meaning of the figures of one loaded model."""
    for name, field, text in _METRICS:
        yield name, getattr(engine.stats, field), text
    running = len(engine.running)
    yield "requests_waiting", engine.waiting, "Requests that wait or run."
    yield "requests_running", running, "Requests that run."
    yield "requests_queued", max(0, engine.waiting - running), "Requests that wait for their turn."
    text = "Seconds from a streamed request to its first token."
    yield "first_token_seconds_total", engine.first_chunk_seconds, text
    yield "first_tokens_total", engine.first_chunks, "Streamed requests that got a first token."
    if (images := engine.model.images) is not None:
        yield "image_bytes", images.n_bytes, "Bytes of embeddings of images."
    pool, prefixes = engine.moment().pool, engine.prefix_cache
    yield "conversations", engine.n_conversations, "Conversations kept."
    yield "conversations_live", pool.live, "Conversations that hold entries."
    swapped_out = "Conversations kept outside of the pool."
    yield "conversations_swapped_out", pool.swapped_out, swapped_out
    yield "swapped_bytes", pool.swapped_bytes, "Bytes of conversations outside of the pool."
    yield "text_bytes", pool.text_bytes, "Bytes of tokens and logits of conversations."
    yield "resumed_total", prefixes.resumed, "Requests that went on with a conversation."
    yield "forked_total", prefixes.forked, "Requests that went on with a copy of a conversation."
    n_let_go = engine.pool.runner.shared.n_let_go
    yield "forgotten_total", n_let_go, "Conversations dropped to make room."
