"""Examine a model's graph before the headwise store serves it: find its attention layers, or
refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp

from entropykv import _core
from entropykv.errors import EntropyKVError, SettingsError, UnsupportedModelError
from entropykv.llamacpp.context import (
    context_parameters,
    decode_one_token,
    layer_windows,
    let_hook_change,
    refuse_diffusion,
)
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.find import check_model
from entropykv.settings.cache_options import CacheOptions


def refuse_by_kind(model: Model, store: str = "headwise") -> None:
    """Raise UnsupportedModelError for a kind of model that cannot be recognised by the graph."""
    refuse_diffusion(model)
    kinds = {
        "it has only recurrent layers": llama_cpp.llama_model_is_recurrent(model.handle),
        "it has an encoder": llama_cpp.llama_model_has_encoder(model.handle),
    }
    for why, applies in kinds.items():
        if applies:
            raise unsupported(model, why, store)


def hooked_context(
    model: Model,
    options: CacheOptions,
    hook: _core.GraphHook,
    n_ubatch: int,
    n_sequences: int,
    *,
    on_devices: bool = False,
) -> Any:
    """Make a context with cells for one micro-batch; the hook changes its graphs.

    `on_devices`: the cells of each layer are on its device. A micro-batch has up to `n_ubatch`
    tokens of one sequence, and one token of each other one.
    """
    n_tokens = n_ubatch + n_sequences - 1
    # In a hybrid model, the last cell of a sequence stays until it reads more.
    cells = n_tokens + n_sequences * is_recurrent(model)
    parameters = context_parameters(model, options, n_tokens, cells, n_sequences)
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F16
    # For the headwise store, K, V and attention stay on the CPU, where our ops run, even if layers
    # are on a device.
    parameters.offload_kqv = on_devices
    let_hook_change(parameters, hook)
    return model.new_context(parameters)


def probed_layers(
    model: Model,
    options: CacheOptions,
    hook: _core.GraphHook,
    context: Any,
    store: str = "headwise",
) -> list[_core.LayerShape]:
    """Decode one token and examine the graph; returns the shapes of the attention layers.

    Raises UnsupportedModelError if the graph has something that the store does not support.
    """
    if not decode_one_token(context):
        raise EntropyKVError(f"{model.geometry.path}: llama.cpp cannot run this model")
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
    if hook.refusal or not hook.nodes:
        raise unsupported(model, hook.refusal or "it has no attention layers", store)
    try:
        windows = layer_windows(model, options)
    except UnsupportedModelError as error:
        raise unsupported(model, str(error), store) from None
    if not windows:
        return [node.shape for node in hook.nodes]
    return [windows[node.cache_layer].of(node.shape) for node in hook.nodes]


def check_config(
    config: ResolvedConfig, model: Model, layers: Sequence[_core.LayerShape], rope_obstacle: str
) -> None:
    """Raise ProfileError for a profile of other layers, SettingsError for an unusable measure."""
    if config.profile is not None:
        heads = (len(layers), layers[0].n_head, layers[0].n_head_kv)
        check_model(config.profile, model.geometry, heads)
    importance = config.policy.importance
    if importance.predicts and rope_obstacle:
        raise SettingsError(
            f"{model.name}: policy {config.policy.name} predicts scores from keys as they were "
            f"before RoPE, which this model does not allow: {rope_obstacle}; use measure mass"
        )


def unsupported(model: Model, why: str, store: str) -> UnsupportedModelError:
    """Return the error for a model that a store cannot serve."""
    return UnsupportedModelError(
        f"{model.name}: the {store} store cannot serve this model: {why}; use --store flat "
        "(store='flat'), which serves any model"
    )
