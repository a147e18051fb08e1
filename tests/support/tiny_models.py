"""Write tiny GGUF models with random weights and a real tokenizer.

Equal arguments give equal bytes. The weights are scaled so that attention is neither uniform nor a
single spike, and that logits vary by a few units.
"""

from __future__ import annotations

import os
from typing import Any

from tests.support.tiny_writer import TinyGpt2Writer, TinyRope, TinyShape, TinyWriter


def write_llama(
    path: str | os.PathLike[str],
    *,
    n_layer: int = 2,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 16,
    n_ff: int = 64,
    n_vocab: int = 320,
    n_ctx_train: int = 2048,
    weight_type: str = "F16",
    seed: int = 0,
    rope_freq_base: float = 10000.0,
    activation: str | None = None,
    architecture: str = "llama",
    rope: TinyRope | None = None,
    uneven: bool = False,
    key_bias: float = 0.0,
) -> None:
    """Write a llama model; raise AssertionError for a shape that llama.cpp cannot load.

    `activation` is the value of entropykv.activation in the file: silu, relu2, or None.
    `architecture`: llama, bitnet, hunyuan-dense, which norms its keys after RoPE, or smollm3,
    without RoPE in every fourth layer. `uneven`: the first layer, and the first half of the heads
    of all layers, attend to everything equally. `key_bias`: the bias of the keys in their slowest
    pair; 0: keys have no biases.
    """
    shape = TinyShape(
        architecture,
        n_layer=n_layer,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ff=n_ff,
        n_vocab=n_vocab,
        n_ctx_train=n_ctx_train,
        weight_type=weight_type,
        rope_freq_base=rope_freq_base,
    )
    TinyWriter(path, shape, seed, activation, rope, uneven, key_bias).write()


def write_bitnet(path: str | os.PathLike[str], **options: Any) -> None:
    """Write a BitNet model (sub-norms, tied head), with options of write_llama(); the weights are
    dense, not ternary.
    """
    write_llama(path, architecture="bitnet", **options)


def write_gemma(path: str | os.PathLike[str], *, activation: str | None = None) -> None:
    """Write a gemma model, whose feed-forward gates are GELU instead of SiLU."""
    shape = TinyShape(
        "gemma",
        n_layer=2,
        n_head=4,
        n_head_kv=2,
        head_dim=64,
        n_ff=64,
        n_vocab=320,
        n_ctx_train=2048,
        weight_type="F16",
        rope_freq_base=10000.0,
    )
    TinyWriter(path, shape, 0, activation).write()


def write_gpt2(path: str | os.PathLike[str], *, n_ctx_train: int) -> None:
    """Write a gpt2 model, which has a learned embedding for each position."""
    shape = TinyShape(
        "gpt2",
        n_layer=2,
        n_head=4,
        n_head_kv=4,
        head_dim=64,
        n_ff=64,
        n_vocab=320,
        n_ctx_train=n_ctx_train,
        weight_type="F32",
        rope_freq_base=10000.0,
    )
    TinyGpt2Writer(path, shape, 0, None).write()
