"""Make the llama_context of the flat store, whose cells are llama.cpp's own."""

from __future__ import annotations

from typing import Any

import llama_cpp

from entropykv import _core
from entropykv.llamacpp.context import (
    GGML_TYPES,
    context_parameters,
    let_hook_change,
    refuse_diffusion,
    relu2_layers,
)
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.products import serves_products
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.store.store_context import StoreContext


class FlatContext(StoreContext):
    """Hold a context in which llama.cpp attends, and whose cells may become more."""

    masked_by_llama = True

    def __init__(self, model: Model, config: ResolvedConfig) -> None:
        """Make the hook; the store makes the cells with replace().

        Raises UnsupportedModelError for a squared-ReLU model whose layers are offloaded, and for a
        diffusion model.
        """
        refuse_diffusion(model)
        self._model = model
        self._config = config
        options = config.options
        n_gates = relu2_layers(model, options)
        self.hook: _core.WeightHook = _core.WeightHook(
            n_gates, options.most_threads, 1 + options.draft_max
        )
        self._hooked = n_gates > 0 or serves_products()

    def new_handle(self, cells: int) -> Any:
        """Make a llama_context with so many cells, for replace()."""
        config = self._config
        parameters = context_parameters(self._model, config.options, config.n_ubatch, cells)
        parameters.type_k = parameters.type_v = GGML_TYPES[config.kv_type]
        if config.kv_type != "f16":
            parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if self._hooked:
            let_hook_change(parameters, self.hook)
        return self._model.new_context(parameters)

    def replace(self, handle: Any) -> None:
        """Use this llama_context from now on, and free the one before."""
        self.close()
        self.handle = handle

    def end_step(self) -> None:
        """Check that every gate was changed if necessary."""
        self.hook.check_step()
