"""Write the tensors and the tokenizer of a tiny GGUF model; equal arguments give equal bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from gguf.quants import quantize

WEIGHT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
QUANTIZED_BLOCK = 32  # The number of values in a block of Q8_0 and of Q4_0.
RMS_EPSILON = 1e-5


# The standard deviation of each projection's outputs for an input of unit size. Attention logits
# are about QUERY * KEY; a product of 2 to 3 makes attention clearly uneven.
QUERY_SCALE = 1.6
KEY_SCALE = 1.6
VALUE_SCALE = 1.0
OUTPUT_SCALE = 0.7
FEED_FORWARD_SCALE = 1.0
DOWN_SCALE = 0.7
LOGIT_SCALE = 2.5
_SPACE = "\u2581"  # The character that stands for a space in sentencepiece.
_PIECES = (
    _SPACE,
    *"abcdefghijklmnopqrstuvwxyz.,",
    *("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ing", "the", "and", "ion"),
    *(_SPACE + text for text in ("t", "a", "o", "w", "th", "the", "an", "and", "of", "to", "in")),
)


MINIMUM_VOCABULARY = 3 + 256 + len(_PIECES)
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TinyRope:
    """Hold a model's settings of RoPE, except the base."""

    n_dims: int | None = None
    """The number of values of a head that are rotated; None: all."""
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies, one for each pair (llama3)."""
    short_factors: bool = False
    """True: `factors` are for short contexts; above `n_ctx_orig`, twice these (LongRoPE)."""
    yarn_factor: float | None = None
    n_ctx_orig: int = 0


@dataclass(frozen=True)
class TinyShape:
    """Hold the shape of a tiny model; sizes are in values, numbers of heads are per layer."""

    architecture: str
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    weight_type: str
    rope_freq_base: float

    def __post_init__(self) -> None:
        """Raise AssertionError for shapes that llama.cpp cannot load."""
        assert self.weight_type in WEIGHT_TYPES, self.weight_type
        assert self.n_head % self.n_head_kv == 0, "n_head must be a multiple of n_head_kv"
        assert self.head_dim % 2 == 0, "RoPE needs an even head size"
        assert self.n_vocab >= MINIMUM_VOCABULARY, f"n_vocab is at least {MINIMUM_VOCABULARY}"
        if self.weight_type.startswith("Q"):
            for name, size in (("n_head * head_dim", self.n_embd), ("n_ff", self.n_ff)):
                assert size % QUANTIZED_BLOCK == 0, f"{name} = {size} is no multiple of 32"

    @property
    def n_embd(self) -> int:
        """Return the size of the residual stream."""
        return self.n_head * self.head_dim


def add_tokenizer(writer: GGUFWriter, n_vocab: int) -> None:
    """Add a sentencepiece vocabulary: any text works, because every byte is a token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(_PIECES)
    n_unused = n_vocab - len(tokens)
    tokens += [f"<unused{index}>" for index in range(n_unused)]
    types += [TokenType.UNUSED] * n_unused
    n_plain = MINIMUM_VOCABULARY - len(_PIECES)
    scores = [0.0] * n_plain + [-float(len(_PIECES) - index) for index in range(len(_PIECES))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores + [0.0] * n_unused)
    writer.add_token_types([int(kind) for kind in types])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


class TinyWriter:
    def __init__(
        self,
        path: str | os.PathLike[str],
        shape: TinyShape,
        seed: int,
        activation: str | None,
        rope: TinyRope | None = None,
        uneven: bool = False,
        key_bias: float = 0.0,
    ) -> None:
        self.shape = shape
        self.uneven = uneven
        self.key_bias = key_bias
        self.rope = rope or TinyRope()
        self.activation = activation
        self.random = np.random.default_rng(seed)
        self.writer = GGUFWriter(path, shape.architecture)

    def write(self) -> None:
        self._add_metadata()
        add_tokenizer(self.writer, self.shape.n_vocab)
        self._add_tensors()
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _add_metadata(self) -> None:
        writer, shape = self.writer, self.shape
        writer.add_name(f"tiny {shape.architecture}")
        writer.add_block_count(shape.n_layer)
        writer.add_context_length(shape.n_ctx_train)
        writer.add_embedding_length(shape.n_embd)
        writer.add_feed_forward_length(shape.n_ff)
        writer.add_head_count(shape.n_head)
        writer.add_head_count_kv(shape.n_head_kv)
        self._add_rope()
        writer.add_layer_norm_rms_eps(RMS_EPSILON)
        writer.add_layer_norm_eps(RMS_EPSILON)
        writer.add_vocab_size(shape.n_vocab)
        if self.activation is not None:
            writer.add_string("entropykv.activation", self.activation)

    def _add_rope(self) -> None:
        writer, rope, head_dim = self.writer, self.rope, self.shape.head_dim
        writer.add_rope_dimension_count(rope.n_dims or head_dim)
        writer.add_rope_freq_base(self.shape.rope_freq_base)
        factors = np.asarray(rope.factors, dtype=np.float32)
        if rope.yarn_factor is not None:
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope.yarn_factor)
        if rope.n_ctx_orig:
            writer.add_rope_scaling_orig_ctx_len(rope.n_ctx_orig)
        if rope.short_factors:
            writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
            writer.add_tensor("rope_factors_short.weight", factors)
            writer.add_tensor("rope_factors_long.weight", factors * 2.0)
        elif rope.factors:
            writer.add_tensor("rope_freqs.weight", factors)

    def _add_tensors(self) -> None:
        shape = self.shape
        embedding_scale = 1.0
        if shape.architecture == "bitnet":  # The embedding is also the output head.
            embedding_scale = LOGIT_SCALE / np.sqrt(shape.n_embd)
        embedding = self._normal((shape.n_vocab, shape.n_embd), embedding_scale)
        self._add_matrix("token_embd", embedding)
        for layer in range(shape.n_layer):
            self._add_layer(f"blk.{layer}.")
        self._add_norm("output_norm", shape.n_embd)
        # Models of bitnet and gemma use the embedding as the output head.
        if shape.architecture not in ("bitnet", "gemma"):
            self._add_projection("output", shape.n_vocab, shape.n_embd, LOGIT_SCALE)

    def _add_layer(self, prefix: str) -> None:
        shape = self.shape
        n_embd, n_embd_kv, n_ff = shape.n_embd, shape.n_head_kv * shape.head_dim, shape.n_ff
        self._add_norm(prefix + "attn_norm", n_embd)
        queries = self._normal((n_embd, n_embd), QUERY_SCALE / np.sqrt(n_embd))
        if self.uneven:
            queries[: n_embd if prefix == "blk.0." else n_embd // 2] *= 0.05
        self._add_matrix(prefix + "attn_q", queries)
        self._add_projection(prefix + "attn_k", n_embd_kv, n_embd, KEY_SCALE)
        if self.key_bias:
            self._add_key_bias(prefix + "attn_k")
        self._add_projection(prefix + "attn_v", n_embd_kv, n_embd, VALUE_SCALE)
        self._add_projection(prefix + "attn_output", n_embd, n_embd, OUTPUT_SCALE)
        self._add_norm(prefix + "ffn_norm", n_embd)
        self._add_projection(prefix + "ffn_gate", n_ff, n_embd, FEED_FORWARD_SCALE)
        self._add_projection(prefix + "ffn_up", n_ff, n_embd, FEED_FORWARD_SCALE)
        self._add_projection(prefix + "ffn_down", n_embd, n_ff, DOWN_SCALE)
        if shape.architecture == "bitnet":
            self._add_norm(prefix + "attn_sub_norm", n_embd)
            self._add_norm(prefix + "ffn_sub_norm", n_ff)
        if shape.architecture == "hunyuan-dense":
            self._add_norm(prefix + "attn_q_norm", shape.head_dim)
            self._add_norm(prefix + "attn_k_norm", shape.head_dim)

    def _add_key_bias(self, name: str) -> None:
        """Add a bias that is large in the slowest pair of every KV head."""
        shape = self.shape
        bias = np.full((shape.n_head_kv, shape.head_dim), 0.1, np.float32)
        bias[:, -2:] = self.key_bias
        self.writer.add_tensor(f"{name}.bias", bias.reshape(-1))

    def _add_norm(self, name: str, size: int) -> None:
        weights = 1.0 + self._normal((size,), 0.1)
        self.writer.add_tensor(f"{name}.weight", weights.astype(np.float32))

    def _add_projection(self, name: str, n_out: int, n_in: int, scale: float) -> None:
        self._add_matrix(name, self._normal((n_out, n_in), scale / np.sqrt(n_in)))

    def _add_matrix(self, name: str, weights: FloatArray) -> None:
        kind = GGMLQuantizationType[self.shape.weight_type]
        self.writer.add_tensor(f"{name}.weight", quantize(weights, kind), raw_dtype=kind)

    def _normal(self, shape: Sequence[int], scale: float) -> FloatArray:
        return (self.random.standard_normal(shape) * scale).astype(np.float32)


class TinyGpt2Writer(TinyWriter):
    def _add_tensors(self) -> None:
        shape = self.shape
        self._add_matrix("token_embd", self._normal((shape.n_vocab, shape.n_embd), 1.0))
        self._add_matrix("position_embd", self._normal((shape.n_ctx_train, shape.n_embd), 1.0))
        for layer in range(shape.n_layer):
            self._add_layer(f"blk.{layer}.")
        self._add_norm_with_bias("output_norm")
        self._add_projection("output", shape.n_vocab, shape.n_embd, LOGIT_SCALE)

    def _add_layer(self, prefix: str) -> None:
        n_embd, n_ff = self.shape.n_embd, self.shape.n_ff
        self._add_norm_with_bias(prefix + "attn_norm")
        self._add_norm_with_bias(prefix + "ffn_norm")
        for name, n_out, n_in in (
            ("attn_qkv", 3 * n_embd, n_embd),
            ("attn_output", n_embd, n_embd),
            ("ffn_up", n_ff, n_embd),
            ("ffn_down", n_embd, n_ff),
        ):
            self._add_projection(prefix + name, n_out, n_in, OUTPUT_SCALE)
            self._add_bias(prefix + name, n_out)

    def _add_norm_with_bias(self, name: str) -> None:
        self._add_norm(name, self.shape.n_embd)
        self._add_bias(name, self.shape.n_embd)

    def _add_bias(self, name: str, size: int) -> None:
        self.writer.add_tensor(f"{name}.bias", self._normal((size,), 0.1))
