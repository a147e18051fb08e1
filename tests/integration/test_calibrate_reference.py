"""Calibration agrees with transformers, and with dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from entropykv.calibration.measure import CalibrationSettings, correlation, excerpts_of, measure
from entropykv.calibration.observe import Observer
from entropykv.evaluation.texts import read_texts
from tests.support.calibration_texts import QUICK, WORDS, some_texts
from tests.support.hf_names import PROJECTIONS
from tests.support.logits import tokens_for


def hf_llama(path: Path, directory: Path) -> Path:
    """Save the tiny llama of a GGUF file for transformers, with a tokenizer; return the folder."""
    torch = pytest.importorskip("torch", reason="the reference is transformers")
    transformers = pytest.importorskip("transformers", reason="the reference is transformers")
    tokenizers = pytest.importorskip("tokenizers", reason="the reference is transformers")
    reader = GGUFReader(path)
    weights = {t.name.removesuffix(".weight"): torch.tensor(t.data) for t in reader.tensors}
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=192,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
    )
    model = transformers.LlamaForCausalLM(config).float()

    def halves(weight: Any, n_head: int) -> Any:
        """Reorder rows: pairs of neighbours, as in GGUF, become the first and second half."""
        return weight.reshape(n_head, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    state = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names = norms | PROJECTIONS
    for i in range(3):
        state |= {f"model.layers.{i}.{hf}": f"blk.{i}.{ours}" for hf, ours in names.items()}
        weights[f"blk.{i}.attn_q"] = halves(weights[f"blk.{i}.attn_q"], 6)
        weights[f"blk.{i}.attn_k"] = halves(weights[f"blk.{i}.attn_k"], 2)
    model.load_state_dict({f"{hf}.weight": weights[ours] for hf, ours in state.items()})
    model.save_pretrained(directory)
    words = {word: 3 + i for i, word in enumerate(sorted(set(WORDS.split())))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="the"))  # noqa: S106
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_agrees(tiny_llama: Path, tmp_path: Path) -> None:
    directory = hf_llama(tiny_llama, tmp_path / "hf")
    from entropykv.calibration.hf import (  # noqa: PLC0415
        calibrate_hf,
        eager_entropies,
        load_eager,
    )

    model, tokenizer = load_eager(str(directory), "cpu")
    tokens = tokens_for(120)
    with Observer(tiny_llama, n_ctx=128, n_threads=2) as observer:
        ours = observer.entropies(tokens)
        theirs = eager_entropies(model, tokens)  # Transformers keeps K and V in f32.
        np.testing.assert_allclose(ours.mean(axis=1), theirs.mean(axis=1), atol=1e-3)
        np.testing.assert_allclose(ours, theirs, atol=1e-2)
        texts = some_texts()
        profile = calibrate_hf(str(directory), texts, QUICK)
        excerpts = excerpts_of(texts, lambda text: tokenizer(text)["input_ids"], QUICK)
        expected = measure(observer.entropies, excerpts, lambda _: None)
    np.testing.assert_allclose(profile.head_entropies, expected.quarters.mean(axis=0), atol=1e-3)
    assert (profile.n_head_kv, profile.n_ctx, profile.curves) == (2, 2048, None)


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_smollm2_is_near_its_dequantised_weights(smollm2: Path) -> None:
    """Entropies of SmolLM2 are near those that transformers computes with its dequantised weights:
    here in 4 texts, in benchmarks/calibration.py in all 20.
    """
    for package in ("torch", "transformers", "accelerate"):
        pytest.importorskip(package, reason="the reference is transformers")
    from entropykv.calibration.hf import eager_entropies, load_eager  # noqa: PLC0415

    pytest.importorskip("torch").set_num_threads(1)
    settings = CalibrationSettings(n_sequences=4, n_threads=2)
    model, _ = load_eager(str(smollm2.parent), "cpu", gguf_file=smollm2.name)
    with Observer(smollm2, n_ctx=128, n_threads=2) as observer:
        excerpts = excerpts_of(read_texts(None), observer.tokenize, settings)
        ours = measure(observer.entropies, excerpts, lambda _: None).quarters.mean(axis=0)
    theirs = measure(lambda ids: eager_entropies(model, ids), excerpts, lambda _: None)
    expected = theirs.quarters.mean(axis=0)
    r = correlation(ours, expected)
    assert r is not None
    assert r >= 0.995
    assert np.abs(ours - expected).mean() <= 0.02
