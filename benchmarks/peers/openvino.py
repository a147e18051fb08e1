"""Measure OpenVINO GenAI with the same GGUF file: its cache eviction by greedy tokens, and its
speed.

Its eviction begins after the prompt, whose cache is dense, and continues during generation, in
whole blocks. It offers no teacher forcing, so texts are compared: the greedy tokens under eviction
with those of its own full cache, both in f16. Its reader of GGUF files does not compute the same
numbers as llama.cpp. Therefore each framework is compared with its own full cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.ours import equality
from benchmarks.peers.protocol import GREEDY, SPEED, Method, Passage

BLOCK = 32
"""The tokens of a block on the CPU; all sizes are multiples of it."""
SINKS = 32
RECENT_SHARE = 128 / 672
"""The share of the cache that is for recent tokens, as in the library's default configuration."""
EXACT_HINTS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}
SPEED_HINTS: dict[str, dict[str, str]] = {
    "full cache, its own precisions": {},
    "full cache, f32 and f16": EXACT_HINTS,
}
"""Hints for the pipelines whose speed is measured, by the name of the row."""
AGGREGATIONS = ("SUM", "NORM_SUM")


def blocks(entries: float) -> int:
    """Return the number of entries, rounded up to a whole block."""
    return -int(-entries // BLOCK) * BLOCK


def eviction(aggregation: str, keep: float, n_prompt: int) -> Any:
    """Return the configuration that keeps the share `keep` of a prompt, in whole blocks."""
    size = blocks(keep * n_prompt)
    recent = blocks(RECENT_SHARE * size)
    mode = getattr(genai.AggregationMode, aggregation)
    return genai.CacheEvictionConfig(SINKS, recent, size, mode)


class OpenVINO:
    """Run a new pipeline of the model for every configuration."""

    name = "openvino-genai"

    def __init__(self, model: str, keeps: Sequence[float], n_greedy: int, n_threads: int) -> None:
        """List all methods: every aggregation at every keep ratio, and the speeds."""
        self._model, self._n_greedy, self._n_threads = model, n_greedy, n_threads
        self.methods = [
            *(
                Method(GREEDY, self.name, f"cache eviction, {aggregation}", "f16", keep)
                for aggregation in AGGREGATIONS
                for keep in keeps
            ),
            *(Method(SPEED, self.name, name, "", 1.0) for name in SPEED_HINTS),
        ]

    def measure(
        self, passage: Passage, wanted: Sequence[Method]
    ) -> Iterator[tuple[Method, dict[str, float]]]:
        """Yield the figures of the wanted methods for one text."""
        if not wanted:
            return
        full: list[int] = []
        for method in wanted:
            if method.measure == SPEED:
                yield method, self._speed(passage, SPEED_HINTS[method.name])
                continue
            full = full or self._generate(passage, None)
            config = eviction(method.name.split()[-1], method.keep, len(passage.prompt))
            share = config.get_max_cache_size() / len(passage.prompt)
            tokens = self._generate(passage, config)
            yield method, equality(full, tokens) | {"kept": share, "bytes": share}

    def _speed(self, passage: Passage, hints: dict[str, str]) -> dict[str, float]:
        """Return the speeds with a full cache, which the pipeline itself measures."""
        metrics = self._run(passage, None, hints).perf_metrics
        return {
            "prompt_speed": 1000 * len(passage.prompt) / metrics.get_ttft().mean,
            "decode_speed": 1000 / metrics.get_tpot().mean,
        }

    def _generate(self, passage: Passage, config: Any | None) -> list[int]:
        return list(self._run(passage, config, EXACT_HINTS).tokens[0])

    def _run(self, passage: Passage, config: Any | None, hints: dict[str, str]) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False
        if config is not None:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = config
        pipeline = genai.LLMPipeline(
            self._model,
            "CPU",
            scheduler_config=scheduler,
            INFERENCE_NUM_THREADS=self._n_threads,
            **hints,
        )
        generation = genai.GenerationConfig()
        generation.max_new_tokens = self._n_greedy
        generation.ignore_eos = True
        generation.apply_chat_template = False
        prompt = openvino.Tensor(np.array([passage.prompt], dtype=np.int64))
        return pipeline.generate(prompt, generation)
