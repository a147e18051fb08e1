"""Compute the logits of converted files with an F32 cache, to compare them with references."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.llamacpp.context import let_hook_change
from entropykv.llamacpp.model import Model
from entropykv.store.step import MicroBatch

Logits = npt.NDArray[np.float32]


TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 290, 100)]


def exact_logits(path: Path, tokens: list[int] = TOKENS, *, n_threads: int = 2) -> Logits:
    """Return the logits of plain llama.cpp with an F32 cache: (n_tokens, n_vocab).

    The activation is squared ReLU if the file says so.
    """
    model = Model(path, n_gpu_layers=0, verbose=False)
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 256
    parameters.n_threads = parameters.n_threads_batch = n_threads
    parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    hook = None
    if model.geometry.activation == "relu2":
        hook = _core.WeightHook(model.geometry.n_layer)
        let_hook_change(parameters, hook)
        hook.begin_step()
    context = model.new_context(parameters)
    batch = MicroBatch(256, model.n_vocab)
    try:
        logits = batch.decode(context, tokens, 0, n_rows=len(tokens))
        if hook is not None:
            hook.check_step()
    finally:
        batch.close()
        llama_cpp.llama_free(context)
        model.close()
    assert logits is not None
    return logits
