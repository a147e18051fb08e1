"""Write tiny models with every kind of RoPE and a short trained context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_models import write_bitnet, write_llama
from tests.support.tiny_writer import TinyRope

TRAINED = 256


SMALL: dict[str, Any] = {"n_ubatch": 32, "n_threads": 1}
FACTORS = tuple(float(f) for f in np.linspace(1.0, 8.0, 16))
YARN = TinyRope(yarn_factor=4.0, n_ctx_orig=64)


MODELS: dict[str, Callable[[Path, int], None]] = {
    "llama": lambda path, n: write_llama(path, head_dim=32, n_ctx_train=n, weight_type="F32"),
    "bitnet": lambda path, n: write_bitnet(path, head_dim=32, n_ctx_train=n, weight_type="F32"),
    "partial": lambda path, n: write_bitnet(
        path, head_dim=32, n_ctx_train=n, weight_type="F32", rope=TinyRope(n_dims=16)
    ),
    "factors": lambda path, n: write_llama(
        path, head_dim=32, n_ctx_train=n, weight_type="F32", rope=TinyRope(factors=FACTORS)
    ),
    "yarn": lambda path, n: write_llama(
        path, head_dim=32, n_ctx_train=n, weight_type="F32", rope=YARN
    ),
    "wide": lambda path, n: write_llama(
        path, n_head=2, n_head_kv=1, head_dim=64, n_ctx_train=n, weight_type="F32"
    ),
    "smollm3": lambda path, n: write_llama(
        path, head_dim=32, n_layer=4, n_ctx_train=n, weight_type="F32", architecture="smollm3"
    ),
}
