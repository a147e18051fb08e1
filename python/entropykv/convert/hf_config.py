"""Read config.json of a Hugging Face 1.58-bit checkpoint, and translate it to GGUF metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType

from entropykv.convert.decoder import DecoderShape
from entropykv.convert.hf_tokenizer import add_tokenizer
from entropykv.convert.ternary import Floats
from entropykv.errors import ModelFileError, UnsupportedModelError
from entropykv.model.header import MAX_LAYERS

_YARN_KEYS: dict[str, Callable[[GGUFWriter, float], None]] = {
    "beta_fast": GGUFWriter.add_rope_scaling_yarn_beta_fast,
    "beta_slow": GGUFWriter.add_rope_scaling_yarn_beta_slow,
}


def positive_number(path: Path, key: str, value: Any) -> float:
    """Return `value`, that of `key` in config.json, as a float; raises ModelFileError, which names
    `path`, unless it is a finite number above 0.
    """
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelFileError(f"{path}: {key} is {value!r} in config.json; download it again")
    return float(value)


@dataclass(frozen=True)
class Rope:
    """Hold the settings of RoPE in a Hugging Face config.

    `kind` is rope_type in transformers; `values` is the object rope_parameters or rope_scaling.
    """

    path: Path
    kind: str
    base: float
    head_dim: int
    n_ctx: int
    values: dict[str, Any]

    @classmethod
    def of_config(
        cls, path: Path, config: dict[str, Any], *, base: float, head_dim: int, n_ctx: int
    ) -> Rope:
        """Read RoPE from a config.json; `base` is used if it names none. Raises
        UnsupportedModelError for a kind that cannot be converted, and ModelFileError for a base
        that is no positive number.
        """
        values = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = str(values.get("rope_type", values.get("type", "default")))
        base = values.get("rope_theta", config.get("rope_theta") or base)
        if kind not in ("default", "linear", "yarn", "llama3"):
            raise UnsupportedModelError(
                f"{path}: has rope scaling {kind!r}, but only linear, yarn and llama3 are "
                "converted; use a checkpoint with one of these, or without"
            )
        if values.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise UnsupportedModelError(
                f"{path}: rotates a part of each head (partial_rotary_factor), which the graphs "
                "that are written do not; use a checkpoint that rotates whole heads"
            )
        rope = cls(path, kind, 1.0, head_dim, n_ctx, {**values, "rope_theta": base})
        return cls(path, kind, rope.number("rope_theta"), head_dim, n_ctx, values)

    def number(self, key: str, default: float | None = None) -> float:
        """Return the positive number under `key`, or `default` if the key is missing; raises
        ModelFileError for any other value, and for a missing key without a default.
        """
        return positive_number(self.path, key, self.values.get(key, default))

    def add_metadata(self, writer: GGUFWriter) -> None:
        """Add the base and the scaling as metadata, but llama3's factors are written as a tensor;
        raises ModelFileError for an invalid value.
        """
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(self.base)
        if self.kind == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(self.number("factor"))
        elif self.kind == "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(self.number("factor"))
            n_ctx_orig = self.number("original_max_position_embeddings", self.n_ctx)
            writer.add_rope_scaling_orig_ctx_len(int(n_ctx_orig))
            if self.values.get("attention_factor") is not None:
                # attention_factor is the whole factor. llama.cpp multiplies the value in a file by
                # YaRN's own factor, and does not read the key that its converter writes.
                own = 1.0 + 0.1 * math.log(self.number("factor"))
                writer.add_rope_scaling_attn_factors(self.number("attention_factor") / own)
            for key, add in _YARN_KEYS.items():
                if self.values.get(key) is not None:
                    add(writer, self.number(key))

    def factors(self) -> Floats | None:
        """Return divisors of the frequencies, shape (head_dim / 2,); None if all of them are 1.

        Source: _compute_llama3_parameters in transformers' modeling_rope_utils.py. Wavelengths
        above n_ctx / low_freq_factor are multiplied by `factor`, those below n_ctx /
        high_freq_factor stay, and those between are blended. Raises ModelFileError for invalid
        values, and unless low_freq_factor is below high_freq_factor.
        """
        if self.kind != "llama3":
            return None
        factor, n_ctx = self.number("factor"), self.number("original_max_position_embeddings")
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        if low >= high:
            raise ModelFileError(
                f"{self.path}: low_freq_factor {low} is not below high_freq_factor {high} in "
                "config.json; download it again"
            )
        frequencies = self.base ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        # Number of full rotations within the context that the model was pretrained with.
        turns = n_ctx * frequencies / (2.0 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        divisors: Floats = (1.0 / ((1.0 - kept) / factor + kept)).astype(np.float32)
        return divisors


_TARGET_OF = {
    "BitNetForCausalLM": "bitnet",
    "BitnetForCausalLM": "bitnet",  # Models of 1bitLLM have this architecture.
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    # Written as llama, with its biases, because llama.cpp's qwen2 graph ignores scales (see
    # decoder.py).
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
}
# This is the default of transformers; for all other architectures it is 10000.
_ROPE_BASE = {"bitnet": 500000.0}
_AGAIN = "download it again"


@dataclass(frozen=True)
class HfCheckpoint:
    """Hold the directory and config.json of a checkpoint; each value is checked when it is read."""

    path: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> HfCheckpoint:
        """Read config.json; raises ModelFileError if it is missing, ValueError if it is no JSON,
        and UnsupportedModelError for a model that cannot be converted.
        """
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelFileError(
                f"{path}: has no config.json; give a GGUF file or the directory of a Hugging Face "
                "model"
            ) from None
        checkpoint = cls(path, config)
        if checkpoint._class not in _TARGET_OF:
            raise UnsupportedModelError(
                f"{path}: is a model of type {config.get('model_type')!r} ({checkpoint._class}), "
                "but only 1.58-bit decoders of text are converted, as "
                f"{', '.join(sorted(_TARGET_OF))}; use llama.cpp's convert_hf_to_gguf.py for others"
            )
        if checkpoint.target_architecture != "bitnet" and not config.get("quantization_config"):
            raise UnsupportedModelError(
                f"{path}: is a model of type {config.get('model_type')!r} without "
                "quantization_config, so that its weights are dense; use the checkpoint with "
                "1.58-bit weights, or llama.cpp's convert_hf_to_gguf.py"
            )
        return checkpoint

    @property
    def _class(self) -> str:
        """Return the name of the transformers class that implements the checkpoint's model."""
        names = self.config.get("architectures") or []
        if self.config.get("model_type") == "bitnet":
            return "BitNetForCausalLM"
        return next((name for name in names if name in _TARGET_OF), str(names[0] if names else ""))

    @property
    def target_architecture(self) -> str:
        """Return the architecture that the converted file declares."""
        return _TARGET_OF[self._class]

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the positive integer under `key`, or `default` if the key is missing.

        Raises ModelFileError for any other value.
        """
        value = self.config.get(key, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ModelFileError(f"{self.path}: {key} is {value!r} in config.json; {_AGAIN}")
        return value

    @property
    def shape(self) -> DecoderShape:
        """Return the sizes of the model's tensors.

        Raises ModelFileError for impossible sizes, and UnsupportedModelError for those that the
        target architecture cannot have.
        """
        n_head = self.integer("num_attention_heads")
        n_embd = self.integer("hidden_size")
        head_dim = self.integer("head_dim", n_embd // n_head)
        if self.target_architecture == "bitnet" and head_dim * n_head != n_embd:
            raise UnsupportedModelError(
                f"{self.path}: {n_head} heads of {head_dim} do not make up a hidden size of "
                f"{n_embd}, which llama.cpp's bitnet graph needs; use a BitNet b1.58 model"
            )
        n_head_kv = self.integer("num_key_value_heads", n_head)
        n_layer = self.integer("num_hidden_layers")
        if n_head % n_head_kv != 0 or n_layer > MAX_LAYERS or head_dim % 2 != 0:
            raise ModelFileError(
                f"{self.path}: has {n_layer} layers, {n_head} heads and {n_head_kv} KV heads of "
                f"{head_dim} in config.json, which llama.cpp cannot have; {_AGAIN}"
            )
        return DecoderShape(
            architecture=self.target_architecture,
            n_layer=n_layer,
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            n_ff=self.integer("intermediate_size"),
            n_vocab=self.integer("vocab_size"),
        )

    @property
    def quantization(self) -> dict[str, Any]:
        """Return the object quantization_config, or an empty one if config.json has none.

        Raises UnsupportedModelError if it is not BitNet's, or has a norm in every projection.
        """
        value = self.config.get("quantization_config") or {}
        if not isinstance(value, dict) or value.get("quant_method", "bitnet") != "bitnet":
            raise UnsupportedModelError(
                f"{self.path}: quantization_config is not BitNet's; use the original checkpoint"
            )
        if value.get("use_rms_norm"):
            raise UnsupportedModelError(
                f"{self.path}: has a norm in every projection (use_rms_norm), which no graph of "
                "llama.cpp has; use a checkpoint without, such as the published BitNet b1.58"
            )
        return value

    def keeps_dense(self, module: str) -> bool:
        """Tell whether modules_to_not_convert excludes a module from quantisation; without such a
        list, the output head is excluded.
        """
        listed = self.quantization.get("modules_to_not_convert")
        names = ["lm_head"] if listed is None else listed
        return any(f".{name}." in f".{module}." for name in names)

    @property
    def rope(self) -> Rope:
        """Return the rotary position embedding; raises UnsupportedModelError for a kind that cannot
        be converted, and ModelFileError for an invalid value.
        """
        shape = self.shape
        rope = Rope.of_config(
            self.path,
            self.config,
            base=_ROPE_BASE.get(str(self.config.get("model_type")), 10000.0),
            head_dim=shape.head_dim,
            n_ctx=self.integer("max_position_embeddings", 2048),
        )
        if rope.kind == "llama3" and shape.architecture != "llama":
            raise UnsupportedModelError(
                f"{self.path}: has rope scaling 'llama3', which llama.cpp's {shape.architecture} "
                "graph does not compute; use a checkpoint with linear, yarn or no scaling"
            )
        return rope

    def check_attention(self) -> None:
        """Raise UnsupportedModelError for sliding-window attention, which the written graphs do not
        have.
        """
        window = self.config.get("sliding_window")
        used = self.config.get("use_sliding_window", self._class == "MistralForCausalLM")
        n_ctx = self.integer("max_position_embeddings", 2048)
        if used and isinstance(window, int) and window < n_ctx:
            raise UnsupportedModelError(
                f"{self.path}: attends to a sliding window of {window} tokens, which llama.cpp's "
                f"{self.target_architecture} graph does not; use a checkpoint without"
            )

    def add_metadata(self, writer: GGUFWriter) -> None:
        """Add the keys of the target architecture, and the tokenizer; raises ModelFileError for an
        invalid value, and the errors of add_tokenizer().
        """
        shape = self.shape
        writer.add_name(self.path.resolve().name)
        writer.add_block_count(shape.n_layer)
        writer.add_context_length(self.integer("max_position_embeddings", 2048))
        writer.add_embedding_length(shape.n_embd)
        writer.add_feed_forward_length(shape.n_ff)
        writer.add_head_count(shape.n_head)
        writer.add_head_count_kv(shape.n_head_kv)
        if shape.head_dim * shape.n_head != shape.n_embd:
            writer.add_key_length(shape.head_dim)
            writer.add_value_length(shape.head_dim)
        writer.add_layer_norm_rms_eps(
            positive_number(self.path, "rms_norm_eps", self.config.get("rms_norm_eps", 1e-5))
        )
        self.rope.add_metadata(writer)
        writer.add_vocab_size(shape.n_vocab)
        add_tokenizer(writer, self.path, shape.n_vocab)
