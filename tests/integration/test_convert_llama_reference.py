"""Converted Llama-shaped 1.58-bit checkpoints give nearly the logits of transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Session
from entropykv.convert import convert
from entropykv.llamacpp.distributions import mean_divergence
from tests.support.convert_reference import (
    N_VOCAB,
    TOKENS,
    add_quantization,
    make_ternary,
    pack_checkpoint,
    projections,
    reference_logits,
    save_checkpoint,
    torch,
    transformers,
)
from tests.support.exact_logits import exact_logits
from tests.support.logits import relative_error

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
# These families differ in numbers and sizes of heads, tied or separate output heads, biases, norms
# of queries and keys, and scaled positions; their published models are larger.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-8b": ("Llama", {"n_head": 4, "n_head_kv": 1, "rope": {"rope_theta": 500000.0}}),
    "falcon3": ("Llama", {"n_head": 2, "head_dim": 96, "rope": {"rope_theta": 1000042.0}}),
    "falcon-e": ("Llama", {"n_head": 4, "n_head_kv": 2}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope": LLAMA3_ROPE}),
    "linear-rope": ("Llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
    "yarn-rope": ("Llama", {"rope": YARN}),
    "yarn-factor": ("Llama", {"rope": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0}}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def random_llama(family: str, **changes: Any) -> Any:
    """Return a small model of a family, whose logits vary by a few units."""
    name, options = FAMILIES[family]
    options = options | changes
    rope = {"rope_type": "default", "rope_theta": 10000.0} | options.pop("rope", {})
    config = getattr(transformers, f"{name}Config")(
        vocab_size=N_VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=options.pop("n_head", 4),
        num_key_value_heads=options.pop("n_head_kv", 2),
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        bos_token_id=1,
        eos_token_id=2,
        **{"tie_word_embeddings": False, **options},
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(0.1 * noise + (0.0 if weight_name.endswith("bias") else 1.0))
            else:
                gain = 2.5 if "embed" in weight_name or "lm_head" in weight_name else 1.3
                weight.copy_(away_from_ties(noise) * gain / weight.shape[1] ** 0.5)
    return model


def away_from_ties(weights: Any) -> Any:
    """Move weights away from the middle between two ternary values, where rounding would decide.

    The last bit of the mean depends on the number of threads with which torch sums the weights.
    """
    ratio = weights.abs() / weights.abs().mean()
    return torch.where((ratio - 0.5).abs() < 1e-4, 1.01 * weights, weights)


def save(model: Any, directory: Path) -> Path:
    """Save a checkpoint with float weights, which transformers quantises when it loads them."""
    save_checkpoint(model, directory)
    add_quantization(directory, "autobitlinear", "online")
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_weights_give_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    model = random_llama(family)
    source, target = save(model, tmp_path / "hf"), tmp_path / "out.gguf"
    convert(source, target, weight_type="f32", embedding_type="f32")
    expected = reference_logits(model)
    assert expected.std() > 1.0
    assert np.abs(exact_logits(target, TOKENS) - expected).max() < 1e-4
    with Session(target, n_ctx=128, kv_type="f16", n_threads=2) as session:
        ours = session.decode(TOKENS, all_logits=True)
    assert relative_error(ours, expected) < 1e-2  # The cache is f16.


@pytest.mark.parametrize("family", ["falcon3", "yarn-rope", "biases", "qwen2", "qwen3"])
def test_ternary_weights_give_nearly_the_logits_of_transformers(
    tmp_path: Path, family: str
) -> None:
    model = random_llama(family)
    source, target = save(model, tmp_path / "hf"), tmp_path / "out.gguf"
    make_ternary(model)
    convert(source, target, weight_type="q4_0", embedding_type="f32")
    expected, ours = reference_logits(model), exact_logits(target, TOKENS)
    assert relative_error(ours, expected) < 5e-2
    assert mean_divergence(expected, ours) < 2e-2


@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
@pytest.mark.parametrize("family", ["falcon-e", "qwen3"])
def test_packed_weights_give_the_logits_of_transformers(
    tmp_path: Path, family: str, linear_class: str
) -> None:
    model = random_llama(family)
    save_checkpoint(model, tmp_path / "hf")
    running = pack_checkpoint(tmp_path / "hf", model, linear_class)
    make_ternary(model)
    with torch.no_grad():
        for name, module in projections(model).items():
            stored = running[name].weight_scale
            scale = stored if linear_class == "autobitlinear" else 1.0 / stored
            module.weight.copy_(torch.sign(module.weight) * scale)
    convert(tmp_path / "hf", tmp_path / "out.gguf", weight_type="f32", embedding_type="f32")
    expected = reference_logits(model)
    assert expected.std() > 0.5
    assert np.abs(exact_logits(tmp_path / "out.gguf", TOKENS) - expected).max() < 1e-4
