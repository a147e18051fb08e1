"""Find out which layers of a model have sliding windows, from llama.cpp's masks.

The header does not tell: as of llama-cpp-python 0.3.36, the architecture's code decides which
layers have a window, for some architectures regardless of the metadata. llama_model_n_swa() returns
only the window size W. Therefore four tokens are read, at positions 0, 1, W - 1 and W, and the mask
of the last one shows each layer's kind: without a window it sees four tokens, with a sliding window
three, and with windows that begin at multiples of W one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llama_cpp

from entropykv import _core
from entropykv.errors import UnsupportedModelError
from entropykv.llamacpp.context import CELL_PADDING, context_parameters, let_hook_change
from entropykv.llamacpp.model import Model
from entropykv.settings.cache_options import CacheOptions

_LEAST = 3
"""The smallest window for which positions 0, 1, W - 1 and W are different."""
_ALL, _SLIDING, _CHUNKED = 4, 3, 1


@dataclass(frozen=True)
class LayerWindow:
    """Describe which part of a text a layer sees."""

    size: int = 0
    """Size in tokens; 0 means that the layer sees everything."""
    chunked: bool = False
    """True if windows begin at multiples of their size instead of sliding."""

    def of(self, shape: _core.LayerShape) -> _core.LayerShape:
        """Set this window in the shape of a layer, and return the shape."""
        return shape.with_window(self.size, self.chunked)


def layer_windows(model: Model, options: CacheOptions) -> dict[int, LayerWindow]:
    """Return the windows of a model's attention layers, by llama.cpp's number of the layer.

    The dict is empty for a model without windows. Raises UnsupportedModelError, with only the
    reason as its text, for windows of a kind that the headwise store does not support.
    """
    size = llama_cpp.llama_model_n_swa(model.handle)
    if size <= 0:
        return {}
    if size < _LEAST:
        raise UnsupportedModelError(f"its sliding window has only {size} tokens")
    return {layer: _window(size, n) for layer, n in _cells_seen(model, options, size)}


def _window(size: int, n_seen: int) -> LayerWindow:
    if n_seen == _ALL:
        return LayerWindow()
    if n_seen not in (_SLIDING, _CHUNKED):
        raise UnsupportedModelError("its sliding window is not one of the newest positions")
    return LayerWindow(size, n_seen == _CHUNKED)


def _cells_seen(model: Model, options: CacheOptions, size: int) -> list[tuple[int, int]]:
    """Read four tokens, and return (layer, cells) for each layer: how many of them the last one, at
    position `size`, sees.
    """
    probe = _core.WindowProbe()
    # Use two sequences, because llama.cpp requires consecutive positions within one.
    parameters = context_parameters(model, options, 2, CELL_PADDING, n_sequences=2)
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    let_hook_change(parameters, probe)
    context = model.new_context(parameters)
    try:
        _decode(context, 2, 0, 0)
        _decode(context, 1, size - 1, 1)
        llama_cpp.llama_memory_seq_cp(llama_cpp.llama_get_memory(context), 1, 0, -1, -1)
        probe.clear()
        _decode(context, 1, size, 0)
    finally:
        llama_cpp.llama_free(context)
    return probe.visible


def _decode(context: Any, n_tokens: int, position: int, sequence: int) -> None:
    batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)
    batch.n_tokens = n_tokens
    for i in range(n_tokens):
        batch.token[i], batch.pos[i] = 0, position + i
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.logits[i] = i == n_tokens - 1
    code = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    if code != 0:
        raise UnsupportedModelError("llama.cpp cannot show its sliding window")
