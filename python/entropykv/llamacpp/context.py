"""Set the parameters of llama.cpp contexts, and reject models that cannot run in one."""

from __future__ import annotations

from typing import Any

import llama_cpp

from entropykv import _core
from entropykv.errors import ModelFileError, UnsupportedModelError
from entropykv.llamacpp.model import Model, offloaded_layers
from entropykv.settings.cache_options import CacheOptions

CELL_PADDING = 256
"""llama.cpp rounds the number of its cells up to a multiple of this."""
GGML_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
"""llama.cpp's numbers of the types in KV_TYPES."""


def context_parameters(
    model: Model, options: CacheOptions, n_ubatch: int, cells: int, n_sequences: int = 1
) -> Any:
    """Return the parameters that both stores need, with `cells` cells in llama.cpp's own cache.

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
    """Set a hook that reads or changes a context's graphs; the hook must live as long as the
    context.
    """
    parameters.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(hook.callback)
    parameters.cb_eval_user_data = hook.user_data
    # Otherwise, nodes next to a large product would run on the device, too.
    parameters.op_offload = False
