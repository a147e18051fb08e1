"""Compute the forward pass of a small llama or bitnet in numpy, without llama.cpp or our code.

Weights are dequantised. The code follows the definition of the models (transformers'
LlamaForCausalLM and BitNetForCausalLM).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize

from tests.support.reference import round_f16

Array = npt.NDArray[np.float64]


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def relu2(x: Array) -> Array:
    return np.square(np.maximum(x, 0.0))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": silu, "relu2": relu2}


class ModelReference:
    """Hold a model from a GGUF file, and compute in float64."""

    def __init__(self, path: Path, activation: str) -> None:
        """Read the model; `activation` is the function of the gates, whatever the file says."""
        self.attended: list[tuple[Array, Array, Array, Array]] = []
        # Entries are hidden by adding these values, usually -inf, to a layer's attention logits.
        self.hidden: dict[int, Array] = {}
        # This function is applied to K and V, as storing them rounds them.
        self.stored: Callable[[Array], Array] = np.asarray
        reader = GGUFReader(path)
        self.activation = ACTIVATIONS[activation]
        self.weights = {
            t.name.removesuffix(".weight"): dequantize(t.data, t.tensor_type).astype(np.float64)
            for t in reader.tensors
        }
        for name in [name for name in self.weights if name.endswith(".scale")]:
            self.weights[name.removesuffix(".scale")] *= self.weights.pop(name)
        self.architecture = str(reader.fields["general.architecture"].contents())

        def number(key: str) -> float:
            return float(reader.fields[f"{self.architecture}.{key}"].contents())

        self.n_layer = int(number("block_count"))
        self.n_head = int(number("attention.head_count"))
        self.n_head_kv = int(number("attention.head_count_kv"))
        self.epsilon = number("attention.layer_norm_rms_epsilon")
        self.rope_base = number("rope.freq_base")

    def logits(self, tokens: Sequence[int]) -> Array:
        """Return logits, (len(tokens), n_vocab), of a sequence that begins at position 0."""
        embedding = self.weights["token_embd"]
        x = embedding[np.asarray(tokens)]
        for layer in range(self.n_layer):
            x = x + self.attention(x, layer)
            x = x + self.feed_forward(x, layer)
        return self.norm(x, "output_norm") @ self.weights.get("output", embedding).T

    def attention(self, x: Array, layer: int) -> Array:
        normed = self.norm(x, f"blk.{layer}.attn_norm")
        q = self.rotated(self.heads(normed, layer, "attn_q", self.n_head))
        k = self.rotated(self.heads(normed, layer, "attn_k", self.n_head_kv))
        v = self.heads(normed, layer, "attn_v", self.n_head_kv)
        group = self.n_head // self.n_head_kv
        k, v = self.stored(k).repeat(group, axis=0), self.stored(v).repeat(group, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[2])
        scores += np.triu(np.full(scores.shape[1:], -np.inf), 1) + self.hidden.get(layer, 0.0)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        self.attended.append((q, k, v, weights))
        mixed = (weights @ v).transpose(1, 0, 2).reshape(len(x), -1)
        return self.project(
            self.sub_norm(mixed, f"blk.{layer}.attn_sub_norm"), layer, "attn_output"
        )

    def feed_forward(self, x: Array, layer: int) -> Array:
        normed = self.norm(x, f"blk.{layer}.ffn_norm")
        gate = self.activation(self.project(normed, layer, "ffn_gate"))
        gated = gate * self.project(normed, layer, "ffn_up")
        return self.project(self.sub_norm(gated, f"blk.{layer}.ffn_sub_norm"), layer, "ffn_down")

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.epsilon) * self.weights[name]

    def sub_norm(self, x: Array, name: str) -> Array:
        """Apply a sub-norm, which only bitnet has."""
        return self.norm(x, name) if name in self.weights else x

    def project(self, x: Array, layer: int, name: str) -> Array:
        return x @ self.weights[f"blk.{layer}.{name}"].T

    def heads(self, x: Array, layer: int, name: str, n_head: int) -> Array:
        """Return a projection as (head, token, dim)."""
        return self.project(x, layer, name).reshape(len(x), n_head, -1).transpose(1, 0, 2)

    def rotated(self, x: Array) -> Array:
        """Apply RoPE: to neighbouring values for llama, and to value i of both halves of a head for
        bitnet (NEOX).
        """
        _, n_tokens, dim = x.shape
        frequencies = self.rope_base ** (-np.arange(0, dim, 2) / dim)
        turns = np.exp(1j * np.outer(np.arange(n_tokens), frequencies))
        pairs = (slice(0, None, 2), slice(1, None, 2))
        if self.architecture == "bitnet":
            pairs = (slice(0, dim // 2), slice(dim // 2, None))
        turned = (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * turns
        result = np.empty_like(x)
        result[..., pairs[0]], result[..., pairs[1]] = turned.real, turned.imag
        return result


def log_probabilities_after(
    path: Path, text: list[int], first: int, hidden: dict[int, Array] | None = None
) -> Array:
    """Return log-probabilities from `first` on, (n, n_vocab), by a llama whose cache is f16."""
    model = ModelReference(path, "silu")
    model.stored = round_f16
    model.hidden = hidden or {}
    logits = model.logits(text)[first:]
    rows = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))
