"""Llama, mistral, qwen2 and qwen3 models with ternary weights are converted, others refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from entropykv.convert import convert
from entropykv.convert.hf_config import Rope
from entropykv.errors import ModelFileError, UnsupportedModelError
from entropykv.model.geometry import read_geometry
from tests.support.hf_files import hf_config, hf_order, hf_tensors, write_hf, write_safetensors
from tests.support.i2s_files import I2sModel
from tests.support.refusals import refused
from tests.support.weights import assert_weights_are, read_weights

LLAMA = I2sModel(n_layer=1, n_embd=64, n_ff=96, n_head=4, n_head_kv=2, n_vocab=264, arch="llama")
QWEN2 = dataclasses.replace(LLAMA, arch="qwen2")
QWEN3 = dataclasses.replace(LLAMA, arch="qwen3")
Q_PROJ = "model.layers.0.self_attn.q_proj"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def with_head(model: I2sModel) -> I2sModel:
    head = model.embedding[::-1].copy()
    return dataclasses.replace(model, extra={"output.weight": head})


def fields_of(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


@pytest.mark.parametrize("layout", ["x86", "arm64", "rows4"])
@pytest.mark.parametrize("model", [LLAMA, QWEN3], ids=lambda model: model.arch)
def test_i2s_files_of_other_architectures(tmp_path: Path, model: I2sModel, layout: str) -> None:
    model = with_head(model)
    source, target = model.write(tmp_path / "i2s.gguf", layout, pre="falcon_e"), tmp_path / "o.gguf"
    summary = convert(source, target, i2s_layout=layout, embedding_type="keep")
    assert_weights_are(target, model)
    assert (summary.architecture, summary.activation) == (model.arch, "silu")
    fields = fields_of(target)
    assert fields["general.architecture"] == model.arch
    assert fields[f"{model.arch}.attention.head_count_kv"] == 2
    assert fields["tokenizer.ggml.pre"] == "llama-bpe"  # Stock llama.cpp refuses falcon_e.
    head = read_weights(target)["output.weight"]
    assert np.array_equal(head, model.extra["output.weight"])


def test_the_head_gets_the_type_of_the_embedding(tmp_path: Path) -> None:
    model = I2sModel(n_layer=1, n_head_kv=2, arch="llama")
    source, target = with_head(model).write(tmp_path / "i2s.gguf"), tmp_path / "o.gguf"
    convert(source, target)
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(target).tensors}
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q6_K"  # noqa: S105
    tied = dataclasses.replace(model, extra={"output.weight": model.embedding})
    convert(tied.write(tmp_path / "tied.gguf"), target, force=True)
    assert "output.weight" not in read_weights(target)


@pytest.mark.parametrize("model", [LLAMA, QWEN2, QWEN3], ids=lambda model: model.arch)
def test_packed_directories_of_other_architectures(tmp_path: Path, model: I2sModel) -> None:
    tensors = hf_tensors(model) | {"lm_head.weight": model.embedding[::-1].copy()}
    config = hf_config(model, tie_word_embeddings=False)
    source, target = write_hf(tmp_path / "hf", config, tensors), tmp_path / "o.gguf"
    convert(source, target, embedding_type="keep")
    if model.arch == "qwen2":  # The file is written as llama.
        heads = {"attn_q": model.n_head, "attn_k": model.n_head_kv}
        weights = read_weights(target)
        for name, ternary in model.ternary.items():
            ours = weights[f"{name}.weight"]
            n_head = heads.get(name.split(".")[2])
            assert np.array_equal(ours if n_head is None else hf_order(ours, n_head), ternary)
    else:
        assert_weights_are(target, model)
    fields = fields_of(target)
    target_architecture = {"qwen2": "llama"}.get(model.arch, model.arch)
    assert fields["general.architecture"] == target_architecture
    assert fields[f"{target_architecture}.rope.dimension_count"] == 16
    assert read_geometry(target).head_dim_k == 16
    assert np.array_equal(read_weights(target)["output.weight"], tensors["lm_head.weight"])


def test_heads_follow_the_config(tmp_path: Path) -> None:
    tensors = hf_tensors(LLAMA) | {"lm_head.weight": LLAMA.embedding[::-1].copy()}
    target = tmp_path / "o.gguf"
    # With tied embeddings, the head is not used.
    convert(write_hf(tmp_path / "hf", hf_config(LLAMA), tensors), target)
    assert "output.weight" not in read_weights(target)
    target.unlink()
    config = hf_config(LLAMA, tie_word_embeddings=False)
    source = write_hf(tmp_path / "hf", config, hf_tensors(LLAMA))
    refused(source, target, "hf: lacks tensor lm_head.weight, although tie_word_embeddings")


def test_qwen2_from_either_source_is_the_same(tmp_path: Path) -> None:
    bias = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    model = dataclasses.replace(QWEN2, extra={"blk.0.attn_q.bias": bias})
    tensors = hf_tensors(model) | {f"{Q_PROJ}.bias": bias}
    convert(model.write(tmp_path / "i2s.gguf"), tmp_path / "a.gguf")
    convert(write_hf(tmp_path / "hf", hf_config(model), tensors), tmp_path / "b.gguf")
    ours, theirs = read_weights(tmp_path / "a.gguf"), read_weights(tmp_path / "b.gguf")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert np.array_equal(hf_order(ours["blk.0.attn_q.bias"], 4), bias)


def test_biases_of_the_feed_forward_layer_are_divided_by_the_scale(tmp_path: Path) -> None:
    """Biases of the feed-forward layer are divided by the scale, because llama.cpp adds them before
    it multiplies.
    """
    bias = np.linspace(-1, 1, 96, dtype=np.float32)
    tensors = hf_tensors(LLAMA) | {"model.layers.0.mlp.up_proj.bias": bias}
    source = write_hf(tmp_path / "hf", hf_config(LLAMA), tensors)
    for weight_type, scale in (("q4_0", np.float32(LLAMA.scales["blk.0.ffn_up"])), ("f32", 1.0)):
        convert(source, tmp_path / "o.gguf", weight_type=weight_type, force=True)
        written = read_weights(tmp_path / "o.gguf")["blk.0.ffn_up.bias"]
        assert np.array_equal(written, bias / scale)


def test_modules_that_are_not_converted_stay_as_they_are(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    dense = random.standard_normal((64, 64)).astype(np.float16)
    packed = hf_tensors(LLAMA)
    for name in [name for name in packed if name.startswith(f"{Q_PROJ}.")]:
        del packed[name]
    quantization = hf_config(LLAMA)["quantization_config"]
    for listed, works in ((["lm_head", Q_PROJ], True), (["q_proj"], True), (["k_proj"], False)):
        config = hf_config(
            LLAMA, quantization_config=quantization | {"modules_to_not_convert": listed}
        )
        source = write_hf(tmp_path / "hf", config, packed | {f"{Q_PROJ}.weight": dense})
        target = tmp_path / "o.gguf"
        if not works:
            target.unlink()
            refused(source, target, "q_proj.weight is not packed", UnsupportedModelError)
            continue
        convert(source, target, force=True)
        weights = read_weights(target)
        assert np.array_equal(hf_order(weights["blk.0.attn_q.weight"], 4), dense)
        assert "blk.0.attn_q.scale" not in weights


@pytest.mark.parametrize("head_dim", [64, 100, 128])
def test_factors_of_llama3_by_their_definition(head_dim: int) -> None:
    rope = Rope.of_config(
        Path("x"), {"rope_scaling": LLAMA3_ROPE}, base=500000.0, head_dim=head_dim, n_ctx=131072
    )
    factors = rope.factors()
    assert factors is not None
    for pair, factor in enumerate(factors):
        wavelength = 2 * np.pi * 500000.0 ** (2 * pair / head_dim)
        if wavelength < 8192 / 4:
            assert factor == 1.0
        elif wavelength > 8192:
            assert factor == 8.0
        else:
            smooth = (8192 / wavelength - 1) / 3
            assert factor == pytest.approx(1 / ((1 - smooth) / 8 + smooth), rel=1e-6)
    assert {1.0, 8.0} < set(factors.tolist())


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_positions(tmp_path: Path, key: str) -> None:
    target = tmp_path / "o.gguf"

    def convert_with(rope: dict[str, Any]) -> dict[str, Any]:
        source = write_hf(tmp_path / "hf", hf_config(LLAMA, **{key: rope}), hf_tensors(LLAMA))
        convert(source, target, force=True)
        return fields_of(target)

    convert_with(LLAMA3_ROPE)
    assert read_weights(target)["rope_freqs.weight"].shape == (8,)
    fields = convert_with({"type": "linear", "factor": 4.0})
    assert fields["llama.rope.scaling.type"] == "linear"
    assert fields["llama.rope.scaling.factor"] == 4.0
    assert "rope_freqs.weight" not in read_weights(target)
    fields = convert_with({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0})
    assert fields["llama.rope.scaling.type"] == "yarn"
    assert fields["llama.rope.scaling.original_context_length"] == 512
    assert fields["llama.rope.scaling.yarn_beta_fast"] == 16.0


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"rope_scaling": LLAMA3_ROPE | {"factor": 0}}, ModelFileError, "factor is 0"),
        (
            {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 5.0}},
            ModelFileError,
            "low_freq_factor 5.0 is not below",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, ModelFileError, "factor is None"),
        ({"head_dim": 17}, ModelFileError, "KV heads of 17"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 128},
            UnsupportedModelError,
            "sliding window of 128 tokens",
        ),
        (
            {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
            UnsupportedModelError,
            "of type 'gemma'",
        ),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"},
            UnsupportedModelError,
            "of type 'llava'",
        ),
        (
            {"quantization_config": {"quant_method": "bitnet", "use_rms_norm": True}},
            UnsupportedModelError,
            "norm in every projection",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    source = write_hf(tmp_path / "hf", hf_config(LLAMA, **changes), hf_tensors(LLAMA))
    refused(source, tmp_path / "o.gguf", message, kind)  # type: ignore[arg-type]


def test_norms_in_projections_are_refused_by_name(tmp_path: Path) -> None:
    """Norms within projections, which Microsoft's embedding models have, are refused by name."""
    tensors = hf_tensors(LLAMA) | {f"{Q_PROJ}.norm.weight": np.ones(64, np.float32)}
    source = write_hf(tmp_path / "hf", hf_config(LLAMA), tensors)
    refused(source, tmp_path / "o.gguf", "norm in every projection", UnsupportedModelError)


@pytest.mark.parametrize(("kind", "name"), [(38, "TL1"), (39, "TL2")])
def test_tables_of_the_fork_are_refused_by_name(tmp_path: Path, kind: int, name: str) -> None:
    path = tmp_path / "tables.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor_info(
        "blk.0.attn_q.weight",
        (64, 64),
        np.dtype(np.void),
        64 * 64,
        raw_dtype=kind,  # type: ignore[arg-type]
    )
    writer.tensors[-1]["blk.0.attn_q.weight"].tensor = np.zeros(64 * 64, np.uint8)
    writer.add_tensor("blk.0.attn_q.weight_scale", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, tmp_path / "o.gguf", f"is a {name} file of Microsoft", UnsupportedModelError)
    with pytest.raises(UnsupportedModelError, match=f"is a {name} file"):
        read_geometry(path)


def test_shards_of_other_models_are_named(tmp_path: Path) -> None:
    tensors = list(hf_tensors(LLAMA).items())
    shards = [dict(tensors[:7]), dict(tensors[7:])]
    source = write_hf(tmp_path / "hf", hf_config(LLAMA), *shards)
    second = source / "model-00002-of-00002.safetensors"
    write_safetensors(second, shards[1] | {"model.other.weight": np.ones(4, np.float32)})
    message = "00002.safetensors: is a shard of another model .has a tensor model.other.weight"
    refused(source, tmp_path / "o.gguf", message)
    write_safetensors(second, dict(tensors[8:]))
    refused(source, tmp_path / "o.gguf", f"another model .has no tensor {tensors[7][0]}")
    write_safetensors(second, shards[1])
    convert(source, tmp_path / "o.gguf")
    assert_weights_are(tmp_path / "o.gguf", LLAMA)
