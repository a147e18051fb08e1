"""Map positions in a text to the positions that RoPE sees, for sessions beyond the trained context.

A store counts positions in the text. RoPE sees them reduced by `shift`, so that they stay below the
positions that the model was trained for. Sinks keep their positions; an entry that would be moved
before the first position after the sinks is treated as if it were there (rope_position in
cpp/decide/rope_params.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llama_cpp

from entropykv import _core
from entropykv.errors import ContextError
from entropykv.llamacpp.context import (
    CELL_PADDING,
    context_parameters,
    decode_one_token,
    let_hook_change,
)
from entropykv.llamacpp.model import Model
from entropykv.settings.cache_options import CacheOptions

STEPS = 4
"""A shift is a multiple of limit / STEPS.

Therefore, while a text grows, at least the newest 3/4 of the limit have the distances that they
have in the text, and no stored key is rotated more than STEPS times before it is clamped. The
rounding errors of rotating a key do not accumulate beyond that, however long the session is.
"""


@dataclass(frozen=True)
class RopeRange:
    """Limit the positions that RoPE sees to [0, limit); the first `n_sinks` are never shifted."""

    limit: int
    n_sinks: int

    @property
    def step(self) -> int:
        """Return by how many positions the shift grows at a time."""
        return max(1, self.limit // STEPS)

    def shift_for(self, shift: int, position: int, n_tokens: int) -> int:
        """Return the shift for reading `n_tokens` at text position `position`; `shift` is the
        current one.

        The shift stays the same as long as RoPE sees the tokens between half the limit and the
        limit. The lower bound makes distances exact again after a rollback to a much earlier
        position.
        """
        end = position + n_tokens
        if end - shift <= self.limit and position - shift >= self.limit // 2:
            return shift
        return -(-max(0, end - self.limit) // self.step) * self.step

    def seen(self, position: int, shift: int) -> int:
        """Return the RoPE position of a position in the text."""
        return _core.rope_position(position, self.n_sinks, shift)

    def drafts_in_place(self, shift: int, position: int, wanted: int) -> int:
        """Return how many of `wanted` drafts may follow a token at `position` before keys move to
        other positions.
        """
        while wanted and self.shift_for(shift, position, 1 + wanted) != shift:
            wanted -= 1
        return wanted


def largest_micro_batch(n_ubatch: int, n_ctx: int, n_ctx_train: int) -> int:
    """Return the most tokens of a micro-batch: beyond the trained context, a step of the shift."""
    if n_ctx <= n_ctx_train:
        return min(n_ubatch, n_ctx)
    return min(n_ubatch, RopeRange(n_ctx_train, 0).step)


def check_sinks(n_sinks: int, n_ctx: int, n_ctx_train: int) -> None:
    """Raise ContextError if sinks leave too few positions of the trained context for a shift."""
    if n_ctx > n_ctx_train and n_sinks > n_ctx_train // STEPS:
        raise ContextError(
            f"{n_sinks} sinks are too many for a context of {n_ctx} tokens with a model that was "
            f"trained for {n_ctx_train}; use at most {n_ctx_train // STEPS} (n_sinks, --sinks)"
        )


def flat_range(model: Model, n_ctx: int, n_sinks: int) -> RopeRange:
    """Return the range of positions that RoPE may see in llama.cpp's own cache."""
    without_rope = llama_cpp.llama_model_rope_type(model.handle) == llama_cpp.LLAMA_ROPE_TYPE_NONE
    if without_rope and not model.geometry.learned_positions:
        # Without RoPE (ALiBi, recurrent, or no positions at all), positions are not limited.
        return RopeRange(n_ctx, n_sinks)
    return RopeRange(model.geometry.n_ctx_train, n_sinks)


def k_shift_obstacle(model: Model, context: Any, options: CacheOptions, kv_type: str) -> str:
    """Return why the keys of a context cannot be moved to other positions; "" if they can."""
    if llama_cpp.llama_model_is_hybrid(model.handle):
        return "it has recurrent layers"
    if not llama_cpp.llama_memory_can_shift(llama_cpp.llama_get_memory(context)):
        return "llama.cpp cannot rotate the keys of its cache"
    head_dim = model.geometry.head_dim_k
    n_rotated = int(model.metadata("rope.dimension_count") or head_dim)
    if kv_type != "f16" and (head_dim % 64 != 0 or n_rotated != head_dim):
        return "llama.cpp cannot rotate quantised keys of its head size (--kv-type f16 can)"
    return _probed_obstacle(model, options)


def _probed_obstacle(model: Model, options: CacheOptions) -> str:
    """Decode one token in a temporary context with the probe, and return the obstacle that it
    finds, or "".
    """
    probe = _core.KShiftProbe()
    parameters = context_parameters(model, options, 1, CELL_PADDING)
    let_hook_change(parameters, probe)
    context = model.new_context(parameters)
    try:
        if not decode_one_token(context):
            return "llama.cpp cannot decode a token with it"
    finally:
        llama_cpp.llama_free(context)
    return probe.obstacle
