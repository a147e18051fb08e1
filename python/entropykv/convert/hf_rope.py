"""Read rotary position embeddings of a Hugging Face config: GGUF metadata and frequency factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType

from entropykv.convert.ternary import Floats
from entropykv.errors import ModelFileError, UnsupportedModelError

_YARN_KEYS: dict[str, Callable[[GGUFWriter, float], None]] = {
    "beta_fast": GGUFWriter.add_rope_scaling_yarn_beta_fast,
    "beta_slow": GGUFWriter.add_rope_scaling_yarn_beta_slow,
}


def positive_number(path: Path, key: str, value: Any) -> float:
    """Return the value of a key of config.json; raises ModelFileError unless it is a positive
    number.
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
        """Read RoPE from a config.json; raises UnsupportedModelError for a kind that cannot be
        converted.
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
        """Return the positive number under `key`, or `default`; raises ModelFileError for any other
        value.
        """
        return positive_number(self.path, key, self.values.get(key, default))

    def add_metadata(self, writer: GGUFWriter) -> None:
        """Add the base and the scaling as metadata; llama3's factors are written as a tensor
        instead.
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
                # This is the whole attention factor. llama.cpp multiplies the value in a file by
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
        high_freq_factor stay, and those between are blended.
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
