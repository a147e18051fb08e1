"""Set the parameters of llama.cpp contexts, reject models that cannot run in one, and find out
which layers have sliding windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llama_cpp

from entropykv import _core
from entropykv.errors import ModelFileError, UnsupportedModelError
from entropykv.llamacpp.model import Model, offloaded_layers
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import KV_PARTS, joint_kv_type

SEQUENCE = 0
"""llama.cpp's number of the only sequence of a context."""
CELL_PADDING = 256
"""llama.cpp rounds the number of its cells up to a multiple of this."""
GGML_TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "iq4_nl": llama_cpp.GGML_TYPE_IQ4_NL,
}
"""llama.cpp's numbers of the types of K or of V."""
GGML_PAIRS = {
    kv_type: (GGML_TYPES[of_keys], GGML_TYPES[of_values])
    for kv_type, (of_keys, of_values) in KV_PARTS.items()
}
"""llama.cpp's numbers of the types of K and of V, by the types in KV_TYPES."""


def kv_type_of_numbers(of_keys: int | None, of_values: int | None) -> str:
    """Return the type of KV_TYPES with llama.cpp's numbers for K and V, at least one of which is
    not None: see joint_kv_type().
    """
    names = {number: name for name, number in GGML_TYPES.items()}
    of_parts = [None if n is None else names.get(n, f"type {n}") for n in (of_keys, of_values)]
    return joint_kv_type(*of_parts)


def context_parameters(
    model: Model, options: CacheOptions, n_ubatch: int, cells: int, n_sequences: int = 1
) -> Any:
    """Return the parameters of a context with `cells` cells in llama.cpp's own cache; the caller
    sets what only its own context needs.

    The sequences share the cells. Raises ModelFileError for a model that would keep llama.cpp in an
    endless loop.
    """
    _check_rotation(model)
    parameters = model.context_defaults()
    parameters.n_ctx = cells
    parameters.n_batch = n_ubatch
    parameters.n_ubatch = n_ubatch
    parameters.n_seq_max = n_sequences
    parameters.kv_unified = n_sequences > 1
    parameters.n_threads = options.threads
    parameters.n_threads_batch = options.threads_batch
    return parameters


def _check_rotation(model: Model) -> None:
    """Raise ModelFileError for RoPE over zero values, with which the loop of ggml's op
    never ends.
    """
    if llama_cpp.llama_model_rope_type(model.handle) == llama_cpp.LLAMA_ROPE_TYPE_NONE:
        return
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        if model.metadata(key) == "0":
            raise ModelFileError(
                f"{model.geometry.path}: is damaged ({model.geometry.architecture}.{key} is 0); "
                "download or convert it again"
            )


def decode_one_token(context: Any) -> bool:
    """Decode a token in an empty context, so that hooks see its graph; returns False if
    that fails.
    """
    # Keep a reference, because the batch holds only the address.
    tokens = (llama_cpp.llama_token * 1)(0)
    batch = llama_cpp.llama_batch_get_one(tokens, 1)
    return bool(llama_cpp.llama_decode(context, batch) == 0)


def refuse_diffusion(model: Model) -> None:
    """Raise UnsupportedModelError for a model that does not read its tokens one after the other."""
    if llama_cpp.llama_model_is_diffusion(model.handle):
        raise UnsupportedModelError(
            f"{model.name}: it is a diffusion model, whose tokens all see each other, so there is "
            "no KV cache to keep inside a budget; run it with llama.cpp alone"
        )


def relu2_layers(model: Model, options: CacheOptions) -> int:
    """Return how many layers have gates that a hook must change to squared ReLU: all layers, or 0.

    Raises UnsupportedModelError if layers are offloaded to a device, because the hook's op runs on
    the CPU.
    """
    if model.geometry.activation != "relu2":
        return 0
    if offloaded_layers(options.n_gpu_layers):
        raise UnsupportedModelError(
            f"{model.name}: its squared ReLU is computed on the CPU, but layers are offloaded; "
            "use no --n-gpu-layers"
        )
    return model.geometry.n_layer


def let_hook_change(
    parameters: Any,
    hook: _core.GraphHook | _core.WeightHook | _core.KShiftProbe | _core.WindowProbe,
) -> None:
    """Set a hook that reads or changes a context's graphs, and let every operation run where its
    weights are; the hook must live as long as the context.
    """
    parameters.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(hook.callback)
    parameters.cb_eval_user_data = hook.user_data
    # Otherwise, nodes next to a large product would run on the device, too.
    parameters.op_offload = False


_LEAST = 3
"""The smallest window W for which positions 0, 1, W - 1 and W are different."""
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

    The header does not tell: as of llama-cpp-python 0.3.36, the architecture's code decides which
    layers have a window, for some architectures regardless of the metadata. llama_model_n_swa()
    returns only the window size W. Therefore four tokens are read, at positions 0, 1, W - 1 and W,
    and the mask of the last one shows each layer's kind: without a window it sees four tokens, with
    a sliding window three, and with windows that begin at multiples of W one.

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
