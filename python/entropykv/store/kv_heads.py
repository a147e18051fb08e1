"""Do what the stores that keep entries per KV head have in common, wherever those entries are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.positions import RopeRange
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.store.protocol import Pooled, Store, StoreFacts


class KvHeadStore(Store, Pooled):
    """Keep the entries of one sequence per (layer, KV head), in a store of the extension."""

    _config: ResolvedConfig
    _store: _core.HeadwiseStore | _core.DeviceStore
    _hook: _core.GraphHook
    layers: Sequence[_core.LayerShape]
    shift = 0
    _rebases = 0

    def _facts(self, model: Model, rope_obstacle: str, **others: Any) -> StoreFacts:
        """Return facts about the layers, and the `others`."""
        limit = self._hook.rope_limit or model.geometry.n_ctx_train
        return StoreFacts(
            n_kv_heads=sum(shape.n_head_kv for shape in self.layers),
            bytes_full_per_token=sum(2 * s.n_head_kv * s.entry_values for s in self.layers),
            rope=RopeRange(limit, self._config.options.n_sinks),
            rope_obstacle=rope_obstacle,
            **others,
        )

    def _seen_position(self, position: int, n_tokens: int) -> int:
        """Return where RoPE sees a position from which n_tokens are read.

        If they do not fit there, all keys are moved first.
        """
        rope = self.facts.rope
        shift = rope.shift_for(self.shift, position, n_tokens)
        if shift != self.shift:
            ropes = [node.rope for node in self._hook.nodes]
            self._store.rebase(ropes, rope.n_sinks, self.shift, shift)
            self.shift = shift
            self._rebases += 1
        return rope.seen(position, shift)

    def truncate(self, position: int) -> None:
        """Drop entries from a position on.

        Raises ContextError if a recurrent state is beyond it, or if layers with windows have
        dropped entries that later tokens would see.
        """
        self.rollback.check(position)
        self._store.truncate(position)
        self.rollback.note_truncated(position)
        if position == 0:
            self.shift = 0

    def can_return_to(self, position: int) -> bool:
        """Tell whether windows hold everything that they held at that time; recurrent states never
        do.
        """
        return self.rollback.leads_to(position)

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending."""
        return self._store.positions(layer, kv_head)

    def importance(self, layer: int, kv_head: int) -> npt.NDArray[np.float32] | None:
        """Return the importance of the entries of entries(); None if queries do not add to it."""
        if not self._config.policy.importance.adds_up:
            return None
        return self._store.importance(layer, kv_head)

    def _heads(self) -> Iterator[tuple[int, int]]:
        """Yield layer and KV head of every KV head."""
        for layer, shape in enumerate(self.layers):
            for kv_head in range(shape.n_head_kv):
                yield layer, kv_head

    @property
    def pooled(self) -> KvHeadStore:
        """Return the store itself."""
        return self

    @property
    def n_entries(self) -> int:
        """Return how many entries all KV heads hold."""
        return self._store.entries

    def set_evicted(self, n: int) -> None:
        """Set how many entries were evicted so far."""
        self._store.evicted = n

    @property
    def evicted(self) -> int:
        """Return how many entries of all KV heads were evicted so far."""
        return self._store.evicted

    def counters(self) -> dict[str, Any]:
        """Return this store's figures for SessionStats."""
        return {
            "kv_type": self._config.kv_type,
            "kv_bytes_budget": self._store.budget_bytes,
            "kv_bytes_peak": self._store.peak_bytes,
            "kv_bytes_now": self._store.used_bytes,
            "kv_bytes_staging": self._store.staging_bytes,
            "kv_bytes_scratch": self._store.scratch_bytes,
            "products": self._hook.products,
            "products_bytes_scratch": self._hook.products_scratch_bytes,
            "entries_kept": self._store.entries,
            "evictions": self._store.evicted,
            "eviction_seconds": self._store.eviction_seconds,
            "rebases": self._rebases,
        }
