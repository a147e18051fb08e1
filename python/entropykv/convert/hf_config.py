"""config.json of a Hugging Face BitNet checkpoint, and the GGUF metadata made of it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

from entropykv.convert.hf_tokenizer import add_tokenizer
from entropykv.convert.source import BitNetShape
from entropykv.errors import ModelFileError, UnsupportedModelError
from entropykv.model.header import MAX_LAYERS

_ARCHITECTURES = {"BitNetForCausalLM", "BitnetForCausalLM"}
_ROPE_BASE = {"bitnet": 500000.0}  # defaults of transformers; llama's, 10000, for 1bitLLM
_AGAIN = "download it again"


@dataclass(frozen=True)
class Checkpoint:
    """A directory and its config.json, whose values are checked as they are asked for."""

    path: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read config.json; UnsupportedModelError for a model that is not BitNet."""
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelFileError(
                f"{path}: has no config.json; give a GGUF file or the directory of a Hugging Face "
                "model"
            ) from None
        names = config.get("architectures") or []
        if config.get("model_type") != "bitnet" and not _ARCHITECTURES & set(names):
            raise UnsupportedModelError(
                f"{path}: is a model of type {config.get('model_type')!r}, but only BitNet models "
                "are converted; use llama.cpp's convert_hf_to_gguf.py for others"
            )
        return cls(path, config)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.config.get(key, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ModelFileError(f"{self.path}: {key} is {value!r} in config.json; {_AGAIN}")
        return value

    def number(self, key: str, value: Any) -> float:
        """Check that `value`, found under `key`, is a positive number."""
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelFileError(f"{self.path}: {key} is {value!r} in config.json; {_AGAIN}")
        return float(value)

    @property
    def shape(self) -> BitNetShape:
        """Sizes of the model."""
        heads = self.integer("num_attention_heads")
        n_embd = self.integer("hidden_size")
        head_dim = self.integer("head_dim", n_embd // heads)
        if head_dim * heads != n_embd:
            raise UnsupportedModelError(
                f"{self.path}: {heads} heads of {head_dim} do not make up a hidden size of "
                f"{n_embd}, which llama.cpp's bitnet graph needs; use a BitNet b1.58 model"
            )
        n_head_kv = self.integer("num_key_value_heads", heads)
        n_layer = self.integer("num_hidden_layers")
        if heads % n_head_kv != 0 or n_layer > MAX_LAYERS:
            raise ModelFileError(
                f"{self.path}: has {n_layer} layers, {heads} heads and {n_head_kv} KV heads in "
                f"config.json, which llama.cpp cannot have; {_AGAIN}"
            )
        return BitNetShape(
            n_layer=n_layer,
            n_embd=n_embd,
            n_embd_kv=n_head_kv * head_dim,
            n_ff=self.integer("intermediate_size"),
            n_vocab=self.integer("vocab_size"),
        )

    @property
    def quantization(self) -> dict[str, Any]:
        """quantization_config, empty if there is none."""
        value = self.config.get("quantization_config") or {}
        if not isinstance(value, dict) or value.get("quant_method", "bitnet") != "bitnet":
            raise UnsupportedModelError(
                f"{self.path}: quantization_config is not BitNet's; use the original checkpoint"
            )
        if value.get("use_rms_norm"):
            raise UnsupportedModelError(
                f"{self.path}: has a norm in every projection (use_rms_norm), which llama.cpp's "
                "bitnet graph has not; use a BitNet b1.58 model"
            )
        return value

    @property
    def rope_base(self) -> float:
        """Base frequency; UnsupportedModelError for scaled positions."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UnsupportedModelError(
                f"{self.path}: has rope scaling {kind!r}, which is not converted; "
                "use a checkpoint without"
            )
        default = _ROPE_BASE.get(str(self.config.get("model_type")), 10000.0)
        return self.number(
            "rope_theta", rope.get("rope_theta", self.config.get("rope_theta", default))
        )

    def add_metadata(self, writer: GGUFWriter) -> None:
        """Add the keys of the bitnet architecture, and the tokenizer."""
        shape, heads = self.shape, self.integer("num_attention_heads")
        head_dim = shape.n_embd // heads
        writer.add_name(self.path.resolve().name)
        writer.add_block_count(shape.n_layer)
        writer.add_context_length(self.integer("max_position_embeddings", 2048))
        writer.add_embedding_length(shape.n_embd)
        writer.add_feed_forward_length(shape.n_ff)
        writer.add_head_count(heads)
        writer.add_head_count_kv(shape.n_embd_kv // head_dim)
        writer.add_layer_norm_rms_eps(
            self.number("rms_norm_eps", self.config.get("rms_norm_eps", 1e-5))
        )
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(self.rope_base)
        writer.add_vocab_size(shape.n_vocab)
        add_tokenizer(writer, self.path, shape.n_vocab)
