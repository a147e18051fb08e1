"""Byte-level BPE and sentencepiece tokenizers of Hugging Face directories are converted; others are
refused.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from entropykv.convert import convert
from entropykv.errors import ModelFileError, UnsupportedModelError
from tests.support.hf_files import N_TOKENS, hf_config, hf_tensors, write_hf, write_tokenizer
from tests.support.i2s_files import I2sModel, byte_level_vocabulary
from tests.support.refusals import refused

TINY = I2sModel(n_layer=1, n_embd=64, n_ff=96, n_head=2, n_head_kv=1, n_vocab=264)


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
