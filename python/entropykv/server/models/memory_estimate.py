"""Estimate the memory that a model will take, before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from entropykv.model.geometry import read_loadable
from entropykv.policy.plan import attention_layers
from entropykv.server.models.catalog import parts_of
from entropykv.server.models.loading import cache_options, for_thoughts
from entropykv.server.options import ModelOptions
from entropykv.session.images import HELD_BYTES
from entropykv.session.memory_plan import make_plan
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import RAM
from entropykv.settings.options import parse_bytes

_FIXED = 32 << 20
"""Bytes of vocabulary, graph and threads for any model."""
_VALUE = 4
"""Bytes of a value of llama.cpp's intermediate results, which are f32."""
_EMBEDDINGS, _FEED_FORWARDS = 4, 3
"""How many embeddings, and how many rows of a feed-forward layer, llama.cpp's graph holds at a time
for a token, besides its logits.
"""


@dataclass(frozen=True)
class MemoryEstimate:
    """Hold the bytes that a model takes once it is loaded and its budget is full."""

    weights: int
    """The model's files, including all parts of a split one, and its projector's."""
    cache: int
    """The KV budget, checkpoints outside it, and frozen entries in memory.

    Conversations that are swapped out to memory are not included; they are counted separately.
    """
    overhead: int
    """The intermediate values of one micro-batch, embeddings of images, and fixed costs."""

    @property
    def total(self) -> int:
        """Return all bytes of the estimate together."""
        return self.weights + self.cache + self.overhead


def estimate_memory(path: Path, options: ModelOptions) -> MemoryEstimate:
    """Estimate from the header of a model's file and its plan, as `entropykv plan` makes it.

    Raises ModelFileError, UnsupportedModelError, ProfileError, BudgetError, SettingsError.
    """
    geometry = read_loadable(path)
    asked = for_thoughts(cache_options(options), options, path)
    n_ctx = options.n_ctx or geometry.n_ctx_train
    micro_batch = options.n_ubatch if "n_ubatch" in options.model_fields_set else asked.micro_batch
    n_ubatch = min(micro_batch, options.n_batch, n_ctx)
    asked = replace(asked, n_ctx=n_ctx, n_ubatch=n_ubatch).going_back()
    cache = 0
    if attention_layers(geometry):
        plan = make_plan(path, asked)
        cache = plan.budget_bytes + _beside_the_budget(asked, plan.saved_bytes)
    values = geometry.n_vocab + _EMBEDDINGS * geometry.n_embd + _FEED_FORWARDS * geometry.n_ff
    files = parts_of(path) + ([] if options.projector is None else [Path(options.projector)])
    embeddings = 0 if options.projector is None else HELD_BYTES
    return MemoryEstimate(
        weights=sum(file.stat().st_size for file in files if file.is_file()),
        cache=cache,
        overhead=_FIXED + n_ubatch * values * _VALUE + embeddings,
    )


def _beside_the_budget(options: CacheOptions, evicted_bytes: int) -> int:
    """Return the bytes of checkpoints and frozen entries; `evicted_bytes` is what a budget
    saves.
    """
    total = 0
    if options.in_pool:
        limit = options.checkpoint_limit
        total += (parse_bytes(limit) or 0) if isinstance(limit, str) else limit
    if options.freezing is not None and options.freezing.where == RAM:
        limit_bytes = options.freezing.limit_bytes
        total += max(0, evicted_bytes) if limit_bytes is None else limit_bytes
    return total
