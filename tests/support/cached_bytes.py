"""Compute the cache bytes per token from the shapes of the layers."""

from __future__ import annotations

from pathlib import Path

import llama_cpp

from tests.support.logits import tokens_for


def bytes_cached_for_a_token(path: Path) -> float:
    """Return the bytes per token in llama.cpp's own cache, by how much its saved state grows."""
    model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, flash_attn=True, verbose=False)
    sizes = []
    for n_tokens in (8, 16):
        model.eval(tokens_for(n_tokens))
        sizes.append(llama_cpp.llama_state_seq_get_size(model.ctx, 0))
    model.close()
    return (sizes[1] - sizes[0]) / 16
