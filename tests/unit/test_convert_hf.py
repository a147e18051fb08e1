"""Hugging Face directories with any storage of weights and their tokenizers, and damaged I2_S
files, are converted without torch, or refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv import cli
from entropykv.convert import convert
from entropykv.errors import EntropyKVError, ModelFileError, UnsupportedModelError
from tests.support.hf_files import (
    N_TOKENS,
    hf_config,
    hf_tensors,
    write_hf,
    write_safetensors,
    write_tokenizer,
)
from tests.support.i2s_files import I2sModel, byte_level_vocabulary
from tests.support.refusals import refused
from tests.support.weights import assert_weights_are, read_weights

TINY = I2sModel(n_layer=1, n_embd=64, n_ff=96, n_head=2, n_head_kv=1, n_vocab=264)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
LINEAR = {"quant_method": "bitnet", "linear_class": "autobitlinear"}


def halves(model: I2sModel) -> list[dict[str, Any]]:
    tensors = list(hf_tensors(model).items())
    return [dict(tensors[:9]), dict(tensors[9:])]


@pytest.mark.parametrize("shards", [1, 2])
def test_packed_weights_are_exact(tmp_path: Path, shards: int) -> None:
    parts = [hf_tensors(TINY)] if shards == 1 else halves(TINY)
    source, target = write_hf(tmp_path / "hf", hf_config(TINY), *parts), tmp_path / "out.gguf"
    summary = convert(source, target)
    assert_weights_are(target, TINY)
    assert (summary.architecture, summary.activation) == ("bitnet", "relu2")
    fields = {name: field.contents() for name, field in GGUFReader(target).fields.items()}
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["bitnet.vocab_size"] == TINY.n_vocab
    assert fields["bitnet.attention.head_count_kv"] == TINY.n_head_kv
    assert fields["bitnet.rope.freq_base"] == 500000.0
    assert fields["bitnet.rope.dimension_count"] == 32
    assert fields["general.name"] == "hf"


def test_bitlinear_divides_by_its_scale(tmp_path: Path) -> None:
    tensors = hf_tensors(TINY)
    for name in [name for name in tensors if name.endswith("_scale")]:
        tensors[name] = (1.0 / tensors[name]).astype(np.float32)
    for config in ({**LINEAR, "linear_class": "bitlinear"}, {"quant_method": "bitnet"}):
        source = write_hf(tmp_path / "hf", hf_config(TINY, quantization_config=config), tensors)
        convert(source, tmp_path / "out.gguf", force=True)
        weights = read_weights(tmp_path / "out.gguf")
        for name, scale in TINY.scales.items():
            assert weights[f"{name}.scale"][0] == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("online", [True, False])
def test_master_weights_are_quantised_unless_dense(tmp_path: Path, online: bool) -> None:
    """Full-precision weights become ternary, or stay as they are for a dense type.

    The mean of weights that are already ternary is not their scale, but their signs are kept.
    """
    config = {**LINEAR, "quantization_mode": "online"} if online else None
    tensors = hf_tensors(TINY, packed=False)
    source = write_hf(tmp_path / "hf", hf_config(TINY, quantization_config=config), tensors)
    convert(source, tmp_path / "ternary.gguf")
    convert(source, tmp_path / "dense.gguf", weight_type="f32")
    ternary, dense = (read_weights(tmp_path / f"{n}.gguf") for n in ("ternary", "dense"))
    for name, values in TINY.ternary.items():
        assert np.array_equal(ternary[f"{name}.weight"], values)
        mean = TINY.scales[name] * np.abs(values).mean()
        assert ternary[f"{name}.scale"][0] == pytest.approx(mean, rel=1e-5)
        assert np.array_equal(dense[f"{name}.weight"], values * np.float32(TINY.scales[name]))
        assert f"{name}.scale" not in dense


def test_names_of_1bitllm_and_its_silu(tmp_path: Path) -> None:
    renamed = {
        name.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm"): t
        for name, t in hf_tensors(TINY, packed=False).items()
    }
    renamed["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(16, dtype=np.float32)
    changes = {"architectures": ["BitnetForCausalLM"], "model_type": "llama"}
    config = hf_config(
        TINY, **changes, hidden_act="silu", quantization_config=None, rope_theta=None
    )
    convert(write_hf(tmp_path / "hf", config, renamed), tmp_path / "out.gguf")
    fields = GGUFReader(tmp_path / "out.gguf").fields
    assert fields["entropykv.activation"].contents() == "silu"
    assert fields["bitnet.rope.freq_base"].contents() == 10000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "of type 'gemma'"),
        (
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "quantization_config": None,
            },
            "of type 'llama' without quantization_config",
        ),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "rope scaling 'llama3', which llama.cpp's bitnet graph does not",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 48}, "2 heads of 48 do not make up a hidden size of 64"),
        ({"quantization_config": {"quant_method": "gptq"}}, "not BitNet's"),
        ({"quantization_config": {**LINEAR, "use_rms_norm": True}}, "use_rms_norm"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = write_hf(tmp_path / "hf", hf_config(TINY, **changes), hf_tensors(TINY))
    refused(source, tmp_path / "out.gguf", f"hf: .*{message}", UnsupportedModelError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": 2}, "lacks tensor blk.1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 300}, r"token_embd.weight has shape \[264, 64\]"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"num_attention_heads": 128}, "head_dim is 0"),
        ({"num_hidden_layers": 2**31 - 1}, "2147483647 layers"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 heads and 3 KV heads"),
    ],
)
def test_impossible_configs_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    source = write_hf(tmp_path / "hf", hf_config(TINY, **changes), hf_tensors(TINY))
    refused(source, tmp_path / "out.gguf", f"hf: .*{message}")


def test_missing_files_are_named(tmp_path: Path) -> None:
    source, target = write_hf(tmp_path / "hf", hf_config(TINY), *halves(TINY)), tmp_path / "o.gguf"
    second = source / "model-00002-of-00002.safetensors"
    kept = second.read_bytes()
    second.unlink()
    refused(source, target, "model-00002-of-00002.safetensors: no such file, but model.saf")
    assert cli.main(["convert", str(source), str(target)]) == 2
    second.write_bytes(kept)
    (source / "model.safetensors.index.json").unlink()
    refused(source, target, "has 2 [*].safetensors but no model.safetensors.index.json")
    for path in source.glob("*.safetensors"):
        path.unlink()
    refused(source, target, r"has no \*.safetensors")
    (source / "config.json").unlink()
    refused(source, target, "hf: has no config.json")
    (source / "config.json").write_text("[1]")
    refused(source, target, "hf: is damaged")


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", hf_config(TINY), *halves(TINY))
    write_safetensors(tmp_path / "other.safetensors", hf_tensors(TINY))
    index = {"weight_map": {"a": "../other.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, tmp_path / "out.gguf", "hf/other.safetensors: no such file")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"dtype": "F8_E4M3"}, "unknown type F8_E4M3"),
        ({"shape": [16, 65]}, "has 1024 bytes for"),
        ({"shape": [-16, -64]}, "has shape"),
        ({"data_offsets": [-40, 984]}, "overlaps the header"),
        ({"data_offsets": [1 << 40, (1 << 40) + 1024]}, "is truncated"),
        ({"data_offsets": 7}, "is damaged"),
    ],
)
def test_damaged_headers_are_named(tmp_path: Path, header: dict[str, Any], message: str) -> None:
    source = write_hf(tmp_path / "hf", hf_config(TINY), hf_tensors(TINY))
    write_safetensors(source / "model.safetensors", hf_tensors(TINY), {Q_PROJ: header})
    refused(source, tmp_path / "out.gguf", f"model.safetensors: .*{message}")


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    source, target = write_hf(tmp_path / "hf", hf_config(TINY), hf_tensors(TINY)), tmp_path / "o"
    for changes, kind, message in (
        ({f"{Q_PROJ}_scale": np.array([0.0], np.float32)}, ModelFileError, "the scale of .*q_proj"),
        ({f"{Q_PROJ}_scale": np.ones(2, np.float32)}, ModelFileError, "has no weight_scale"),
        ({Q_PROJ: np.full((16, 64), 255, np.uint8)}, ModelFileError, "other than -1, 0 and 1"),
        ({Q_PROJ: np.zeros((64, 64), np.float32)}, UnsupportedModelError, "is not packed"),
        ({Q_PROJ: np.zeros((8, 64), np.uint8)}, ModelFileError, "attn_q.weight has shape"),
        ({"model.norm.weight": np.zeros(64, np.int64)}, UnsupportedModelError, "has type I64"),
        ({"model.norm.bias": np.zeros(64, np.float32)}, UnsupportedModelError, "has no place"),
        (
            {"lm_head.weight": np.zeros((264, 64), np.float16)},
            UnsupportedModelError,
            "has an untied head",
        ),
    ):
        write_safetensors(source / "model.safetensors", hf_tensors(TINY) | changes)
        refused(source, target, message, kind)
    tensors = hf_tensors(TINY, packed=False)
    tensors[Q_PROJ] = np.full((64, 64), np.nan, np.float32)
    source = write_hf(tmp_path / "nan", hf_config(TINY, quantization_config=None), tensors)
    refused(source, target, "q_proj.weight is not finite")
    signalling = np.full(64, 0x7F800001, np.uint32).view(np.float32)
    norm = "model.norm.weight"
    write_safetensors(source / "model.safetensors", hf_tensors(TINY) | {norm: signalling})
    refused(source, target, "output_norm.weight has values that are not finite")
    tensors[Q_PROJ] = np.full((64, 64), 1e6, np.float32)
    write_safetensors(source / "model.safetensors", tensors)
    refused(source, target, "too large for the type", weight_type="f16")


def converted_or_refused(source: Path, target: Path) -> bool:
    """Convert damaged files; returns whether that was possible. A refusal has one line, and leaves
    no file.
    """
    message = ""
    try:
        convert(source, target, force=True)
    except EntropyKVError as error:
        message = str(error)
    assert "\n" not in message
    assert target.exists() == (not message)
    return not message


@settings(max_examples=150)
@given(data=st.data())
def test_random_damage(tmp_path: Path, data: st.DataObject) -> None:
    """A directory with one file that is truncated, or has changed bytes in its JSON or header, is
    converted or refused.
    """
    source, target = tmp_path / "hf", tmp_path / "out.gguf"
    write_hf(source, hf_config(TINY), hf_tensors(TINY))
    name = data.draw(st.sampled_from(["config.json", "tokenizer.json", "model.safetensors"]))
    content = bytearray((source / name).read_bytes())
    limit = min(len(content), 4000)
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, limit - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            offset = data.draw(st.integers(0, limit - 1))
            content[offset] = data.draw(st.sampled_from([*b'0-9",:[]{}x', 0, 255]))
    (source / name).write_bytes(content)
    converted_or_refused(source, target)
    target.unlink(missing_ok=True)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


fuzz = settings(max_examples=200)


def assert_converted_or_refused(directory: Path, damage: Callable[[bytearray], bytearray]) -> None:
    source, target = directory / "fuzz.gguf", directory / "out.gguf"
    source.write_bytes(damage(bytearray((directory / "i2s.gguf").read_bytes())))
    if converted_or_refused(source, target):
        assert GGUFReader(target).tensors
        target.unlink()
    assert {path.name for path in directory.iterdir()} == {"i2s.gguf", "fuzz.gguf"}


@fuzz
@given(data=st.data())
def test_random_truncation(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "i2s.gguf").exists():
        TINY.write(tmp_path / "i2s.gguf")
    size = (tmp_path / "i2s.gguf").stat().st_size
    length = data.draw(st.integers(0, size - 1))
    assert_converted_or_refused(tmp_path, lambda content: content[:length])


@fuzz
@given(data=st.data())
def test_random_bytes(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "i2s.gguf").exists():
        TINY.write(tmp_path / "i2s.gguf")
    header = (tmp_path / "i2s.gguf").read_bytes().index(TINY.embedding[:1].tobytes())
    numbers = st.sampled_from([0, 1, 2, 36, 255, (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1])
    values = st.one_of(
        st.binary(min_size=1, max_size=8), numbers.map(lambda number: struct.pack("<Q", number))
    )
    offsets = st.one_of(
        st.integers(0, 1300), st.integers(header - 1500, header - 1), st.integers(0, header + 900)
    )
    flips = data.draw(st.lists(st.tuples(offsets, values), min_size=1, max_size=3))

    def damage(content: bytearray) -> bytearray:
        for offset, value in flips:
            content[offset : offset + len(value)] = value
        return content

    assert_converted_or_refused(tmp_path, damage)


def test_tokenizer(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", hf_config(TINY), hf_tensors(TINY))
    convert(source, tmp_path / "out.gguf")
    fields = {
        name: field.contents() for name, field in GGUFReader(tmp_path / "out.gguf").fields.items()
    }
    tokens, merges = byte_level_vocabulary(N_TOKENS)
    assert fields["tokenizer.ggml.tokens"] == [*tokens, "[PAD262]", "[PAD263]"]
    assert fields["tokenizer.ggml.token_type"] == [1] * 260 + [3, 3, 5, 5]
    assert fields["tokenizer.ggml.merges"] == merges
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.bos_token_id"] == 260
    assert fields["tokenizer.ggml.eos_token_id"] == 261
    assert fields["tokenizer.chat_template"] == "{{ messages }}"


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_first(*patterns: str, **last: Any) -> dict[str, Any]:
    """Return a pre_tokenizer that splits at regular expressions, and then into bytes."""
    steps = [{"type": "Split", "pattern": {"Regex": pattern}} for pattern in patterns]
    return {
        "type": "Sequence",
        "pretokenizers": [*steps, {"type": "ByteLevel", "use_regex": False} | last],
    }


@pytest.mark.parametrize(
    ("splits", "special", "name"),
    [
        (split_first(_LLAMA3), "<|end|>", "llama-bpe"),
        (split_first(_LLAMA3.replace("{1,3}", "")), "<|end|>", "qwen2"),
        (split_first("[0-9]"), ">>ABSTRACT<<", "falcon3"),
        (split_first(_LLAMA3), ">>ABSTRACT<<", "llama-bpe"),
        (split_first("[0-9][0-9][0-9]", use_regex=True), ">>ABSTRACT<<", "falcon"),
    ],
)
def test_splits_have_the_names_of_llama_cpp(
    tmp_path: Path, splits: dict[str, Any], special: str, name: str
) -> None:
    source = write_hf(tmp_path / "hf", hf_config(TINY), hf_tensors(TINY))
    added = [{"id": 261, "content": special, "special": True}]
    write_tokenizer(source, pre_tokenizer=splits, added_tokens=added)
    convert(source, tmp_path / "out.gguf")
    fields = GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == name


def test_tokenizers_that_are_refused(tmp_path: Path) -> None:
    source, target = write_hf(tmp_path / "hf", hf_config(TINY), hf_tensors(TINY)), tmp_path / "o"
    for changes, kind, message in (
        ({"pre_tokenizer": {"type": "Metaspace"}}, UnsupportedModelError, "byte-level BPE"),
        ({"pre_tokenizer": None}, UnsupportedModelError, "byte-level BPE"),
        ({"pre_tokenizer": split_first("[0-9]")}, UnsupportedModelError, "byte-level BPE"),
        ({"model": {"type": "Unigram", "vocab": {}}}, UnsupportedModelError, "byte-level BPE"),
        ({"model": {"type": "BPE", "vocab": {"a": 999}}}, ModelFileError, "'a' has id 999"),
        ({"model": None}, ModelFileError, "tokenizer.json: is damaged"),
        ({"added_tokens": [{"id": 1}]}, ModelFileError, "tokenizer.json: is damaged"),
    ):
        write_tokenizer(source, **changes)
        refused(source, target, message, kind)
    (source / "tokenizer.json").unlink()
    missing = r"hf: has no tokenizer \(tokenizer.json or tokenizer.model\).*put the tokenizer files"
    refused(source, target, missing)
    for content, message in (
        (b"\n", "is truncated"),
        (b"\x0f", "is damaged"),
        (b"", "not a BPE model"),
        (sentencepiece_model(1), "not a BPE model"),
        (sentencepiece_model(2, [("a", 0.0, 1)] * 265), "265 tokens for a vocabulary of 264"),
    ):
        (source / "tokenizer.model").write_bytes(content)
        refused(source, target, f"tokenizer.model: .*{message}")


@pytest.mark.needs("/proc/self/mem")
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", hf_config(TINY), hf_tensors(TINY))
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("/proc/self/mem")
    refused(source, tmp_path / "out.gguf", "hf/tokenizer.json: cannot be read")


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("\u2581th", -1.0, 1)]
PIECES += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]


def sentencepiece_model(model_type: int, pieces: list[tuple[str, float, int]] = PIECES) -> bytes:
    """Return a sentencepiece model as protobuf bytes, written field by field."""
    content = b""
    for text, score, kind in pieces:
        encoded = text.encode()
        piece = b"\x0a" + bytes([len(encoded)]) + encoded + b"\x15" + struct.pack("<f", score)
        piece += b"\x18" + bytes([kind])
        content += b"\x0a" + bytes([len(piece)]) + piece
    # The message ends with a vocab_size of 32000.
    trainer = b"\x18" + bytes([model_type]) + b"\x20" + b"\x80\xfa\x01"
    return content + b"\x12" + bytes([len(trainer)]) + trainer


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """The sentencepiece file is used if the tokenizer.json beside it is not byte-level, as in
    1bitLLM's models.
    """
    config = hf_config(TINY, bos_token_id=1, eos_token_id=2)
    source = write_hf(tmp_path / "hf", config, hf_tensors(TINY))
    write_tokenizer(source, pre_tokenizer=None)
    (source / "tokenizer.model").write_bytes(sentencepiece_model(2))
    added = {
        "1": {"content": "<s>", "special": True},
        "260": {"content": "<pad>", "special": True},
        "261": {"content": "<mark>", "special": False},
    }
    settings = {"added_tokens_decoder": added, "add_prefix_space": False}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    convert(source, tmp_path / "out.gguf")
    fields = {
        name: field.contents() for name, field in GGUFReader(tmp_path / "out.gguf").fields.items()
    }
    assert fields["tokenizer.ggml.model"] == "llama"
    texts = [text for text, _, _ in PIECES]
    assert fields["tokenizer.ggml.tokens"] == [*texts, "<pad>", "<mark>", "[PAD262]", "[PAD263]"]
    assert fields["tokenizer.ggml.scores"] == [score for _, score, _ in PIECES] + [0.0] * 4
    assert fields["tokenizer.ggml.token_type"] == [2, 3, 3, 1] + [6] * 256 + [3, 4, 5, 5]
    assert fields["tokenizer.ggml.add_space_prefix"] is False
    assert fields["tokenizer.ggml.bos_token_id"] == 1
    assert fields["tokenizer.ggml.eos_token_id"] == 2
