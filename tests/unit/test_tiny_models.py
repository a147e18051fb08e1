"""The tiny models of the tests themselves can be loaded by llama.cpp, and give sensible logits."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from llama_cpp import Llama

from tests.support.tiny_models import write_bitnet, write_llama

WRITERS = {"llama": write_llama, "bitnet": write_bitnet}
TEXT = string.printable + " the thing and  that, of\ttowing \u00e9\u4e2d\n"


@pytest.mark.parametrize("architecture", WRITERS)
@pytest.mark.parametrize(
    ("weight_type", "n_head", "n_head_kv", "head_dim"),
    [
        ("F32", 2, 2, 20),
        ("F16", 4, 1, 64),
        ("BF16", 3, 1, 80),
        ("Q8_0", 4, 2, 96),
        ("Q4_0", 2, 1, 128),
    ],
)
def test_llama_cpp_loads_and_decodes(
    tmp_path: Path, architecture: str, weight_type: str, n_head: int, n_head_kv: int, head_dim: int
) -> None:
    path = tmp_path / "tiny.gguf"
    WRITERS[architecture](
        path, weight_type=weight_type, n_head=n_head, n_head_kv=n_head_kv, head_dim=head_dim
    )
    model = Llama(str(path), n_ctx=256, n_threads=2, logits_all=True, verbose=False)
    tokens = model.tokenize(TEXT.encode(), add_bos=False, special=True)
    assert model.detokenize(tokens).decode() == TEXT
    assert len(tokens) < len(TEXT.encode())
    model.eval(tokens)
    logits = model.scores[: len(tokens)]
    model.close()
    assert logits.shape == (len(tokens), 320)
    assert np.isfinite(logits).all()
    assert 1.5 < logits.std() < 4.0


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_llama(tmp_path / name, seed=seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


@pytest.mark.parametrize(
    "shape",
    [
        {"weight_type": "Q8_0", "head_dim": 20, "n_head": 2},
        {"weight_type": "Q4_0", "n_ff": 48},
        {"n_head": 3, "n_head_kv": 2},
        {"n_vocab": 100},
        {"weight_type": "Q4_K"},
    ],
)
def test_impossible_shapes_are_refused(tmp_path: Path, shape: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        write_llama(tmp_path / "tiny.gguf", **shape)  # type: ignore[arg-type]
    assert not (tmp_path / "tiny.gguf").exists()


@pytest.mark.parametrize("architecture", WRITERS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_attention_is_neither_uniform_nor_a_spike(
    tmp_path: Path, architecture: str, head_dim: int
) -> None:
    """The attention of a tiny model is neither uniform nor a spike, by the entropy of one query in
    bits.

    It is computed from the weights of the first layer, without RoPE.
    """
    n_head, n_head_kv, n_keys = 4, 2, 200
    path = tmp_path / "tiny.gguf"
    WRITERS[architecture](
        path, weight_type="F32", n_head=n_head, n_head_kv=n_head_kv, head_dim=head_dim
    )
    weights = {tensor.name: np.asarray(tensor.data) for tensor in GGUFReader(path).tensors}
    states = weights["token_embd.weight"][:n_keys]
    states = states / np.sqrt((states**2).mean(axis=1, keepdims=True) + 1e-5)
    states = states * weights["blk.0.attn_norm.weight"]
    queries = (weights["blk.0.attn_q.weight"] @ states[-1]).reshape(n_head, head_dim)
    keys = (states @ weights["blk.0.attn_k.weight"].T).reshape(n_keys, n_head_kv, head_dim)
    keys = np.repeat(keys, n_head // n_head_kv, axis=1)
    scores = np.einsum("hd,nhd->hn", queries, keys) / np.sqrt(head_dim)
    masses = np.exp(scores - scores.max(axis=1, keepdims=True))
    masses /= masses.sum(axis=1, keepdims=True)
    entropy = -(masses * np.log2(np.maximum(masses, 1e-30))).sum(axis=1).mean()
    assert 0.25 * np.log2(n_keys) < entropy < 0.8 * np.log2(n_keys)
