"""Check that llama.cpp can move the keys of its own cache (K-shift) as a model's RoPE requires.

llama_memory_can_shift does not tell. As of llama-cpp-python 0.3.36, the K-shift multiplies the keys
of YaRN models by their magnitude once more, rotates keys without a position (SmolLM3) and keys that
were normed after their rotation (Hunyuan), and crashes on quantised keys of some head sizes.
"""

from __future__ import annotations

from typing import Any

import llama_cpp

from entropykv import _core
from entropykv.llamacpp.context import (
    CELL_PADDING,
    context_parameters,
    decode_one_token,
    let_hook_change,
)
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.positions import RopeRange
from entropykv.settings.cache_options import CacheOptions


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
