"""Compute one token's forward pass in numpy, over exactly the entries that a session keeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from entropykv import Session
from tests.fuzz.models import FuzzModel
from tests.support.model_reference import Array, ModelReference
from tests.support.reference import stored, stored_values


class Oracle(ModelReference):
    """Compute a llama whose K and V of earlier tokens are those in a session's headwise store."""

    rounding = 3e-2
    """The tolerance for K and V that are rounded again, and weights multiplied in f16."""

    def __init__(self, model: FuzzModel, session: Session) -> None:
        """Read the weights; Oracle.of() tells whether the model is supported."""
        super().__init__(model.path, "silu")
        self._session = session
        self._place = 0
        if session.config.kv_type == "q8_0/iq4_nl":
            self.rounding = 1e-1  # A value between two of 16 levels may be rounded to the other.

    @staticmethod
    def of(model: FuzzModel, session: Session) -> Oracle | None:
        """Return an oracle; None for another kind of model, the flat store and freezing."""
        if not model.in_oracle or session.cache.store == "flat" or session.config.freezing:
            return None
        return Oracle(model, session)

    def next_logits(self, token: int) -> Array | None:
        """Return the logits after one more token; None if the keys will have been moved before."""
        store: Any = self._session._slot.store
        position = self._session.position
        if store.facts.rope.shift_for(store.shift, position, 1) != store.shift:
            return None
        self._place = store.facts.rope.seen(position, store.shift)
        return np.asarray(self.logits([token])[0])

    def attention(self, x: Array, layer: int) -> Array:
        """Compute attention of one token over the kept entries and itself."""
        core = self._session._slot.store.core  # type: ignore[attr-defined]
        normed = self.norm(x, f"blk.{layer}.attn_norm")
        q = self.rotated(self.heads(normed, layer, "attn_q", self.n_head))
        k = self.rotated(self.heads(normed, layer, "attn_k", self.n_head_kv))
        v = self.heads(normed, layer, "attn_v", self.n_head_kv)
        kv_type = self._session.config.kv_type
        group = self.n_head // self.n_head_kv
        mixed = []
        for head in range(self.n_head):
            kv_head = head // group
            _, _, kept_k, kept_v = core.rows(layer, kv_head)
            keys = np.concatenate([kept_k, stored(k[kv_head], kv_type)])
            values = np.concatenate([kept_v, stored_values(v[kv_head], kv_type)])
            logits = keys @ q[head, 0] / np.sqrt(q.shape[2])
            weights = np.exp(logits - logits.max())
            mixed.append(weights @ values / weights.sum())
        return self.project(np.concatenate(mixed)[None], layer, "attn_output")

    def rotated(self, x: Array) -> Array:
        """Apply RoPE to one token at its position."""
        dim = x.shape[2]
        turns = np.exp(1j * self._place * self.rope_base ** (-np.arange(0, dim, 2) / dim))
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turns
        result = np.empty_like(x)
        result[..., 0::2], result[..., 1::2] = turned.real, turned.imag
        return result
