"""Write Hugging Face directories of 1.58-bit models without torch and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.hf_names import PROJECTIONS
from tests.support.i2s_files import I2sModel, byte_level_vocabulary

Arrays = dict[str, npt.NDArray[np.generic]]

N_TOKENS = 262
"""The number of tokens that every tokenizer has; a larger vocabulary is padded."""

_DTYPES = {"float32": "F32", "float16": "F16", "uint8": "U8", "float64": "F64", "int64": "I64"}
_NAMES = {ours: theirs for theirs, ours in PROJECTIONS.items()}
_NORMS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_CLASSES = {
    "bitnet": "BitNetForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write_safetensors(path: Path, tensors: Arrays, header: dict[str, Any] | None = None) -> None:
    """Write the length of the header, the header, and the data; `header`: changes of the header's
    entries, by the name of the tensor.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        entries[name] = {
            "dtype": _DTYPES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + values.nbytes],
        }
        data += values.tobytes()
    for name, changes in (header or {}).items():
        entries[name] |= changes
    encoded = json.dumps(entries).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def pack_hf(ternary: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Pack four ternary values per byte: each quarter of the rows takes two bits, the first quarter
    the lowest.
    """
    quarter = ternary.shape[0] // 4
    packed = np.zeros((quarter, ternary.shape[1]), dtype=np.uint8)
    for row in range(ternary.shape[0]):
        packed[row % quarter] |= (ternary[row] + 1).astype(np.uint8) << 2 * (row // quarter)
    return packed


def hf_order(rows: npt.NDArray[Any], n_head: int) -> npt.NDArray[Any]:
    """Return rows of a query or key projection, (n_head * head_dim, ...), in Hugging Face's order,
    given those of llama.cpp's llama graph.
    """
    head_dim = len(rows) // n_head
    half = head_dim // 2
    order = [
        head * head_dim + 2 * (index % half) + index // half
        for head in range(n_head)
        for index in range(head_dim)
    ]
    ordered: npt.NDArray[Any] = rows[order]
    return ordered


def hf_tensors(model: I2sModel, *, packed: bool = True) -> Arrays:
    """Return the tensors of a checkpoint: packed weights with their scales, or dense F32."""
    heads = {"attn_q": model.n_head, "attn_k": model.n_head_kv} if model.graph == "llama" else {}
    tensors: Arrays = {"model.embed_tokens.weight": model.embedding}
    tensors["model.norm.weight"] = model.norm(model.n_embd)
    for layer in range(model.n_layer):
        for name, size in model.norm_sizes.items():
            tensors[f"model.layers.{layer}.{_NORMS[name]}.weight"] = model.norm(size)
        for ours, theirs in _NAMES.items():
            ternary, scale = (
                store[f"blk.{layer}.{ours}"] for store in (model.ternary, model.scales)
            )
            if ours in heads:
                ternary = hf_order(ternary, heads[ours])
            weight = f"model.layers.{layer}.{theirs}.weight"
            if packed:
                tensors[weight] = pack_hf(ternary)
                tensors[f"{weight}_scale"] = np.array([scale], dtype=np.float32)
            else:
                tensors[weight] = ternary.astype(np.float32) * np.float32(scale)
    return tensors


def hf_config(model: I2sModel, **changes: Any) -> dict[str, Any]:
    """Return config.json of a packed checkpoint; a change to None removes the key."""
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model.graph]],
        "model_type": model.graph,
        "hidden_act": "relu2" if model.graph == "bitnet" else "silu",
        "hidden_size": model.n_embd,
        "intermediate_size": model.n_ff,
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": model.n_head_kv,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "vocab_size": model.n_vocab,
        "tie_word_embeddings": True,
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
        },
    } | changes
    return {key: value for key, value in config.items() if value is not None}


def write_tokenizer(directory: Path, **changes: Any) -> None:
    """Write the tokenizer.json of a byte-level BPE; `changes` replace parts of it."""
    tokens, merges = byte_level_vocabulary(N_TOKENS)
    specials = [
        {"id": len(tokens) - 2 + index, "content": token, "special": True}
        for index, token in enumerate(tokens[-2:])
    ]
    tokenizer = {
        "added_tokens": specials,
        "pre_tokenizer": {"type": "ByteLevel", "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens[:-2])},
            "merges": [merge.split() for merge in merges],
        },
    } | changes
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ messages }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_hf(directory: Path, config: dict[str, Any], *shards: Arrays) -> Path:
    """Write a checkpoint with a tokenizer, and an index if there are several shards; return its
    directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        write_safetensors(directory / "model.safetensors", shards[0])
        return directory
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(directory / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
