"""Write I2_S files as Microsoft's fork does, from its tables of the layout.

This module uses no code of the product: codes are put into their bytes one element at a time.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

I2_S = 36
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
CODES = np.array([0, 1, 2], dtype=np.uint8)  # These codes stand for -1, 0 and +1.

Int8s = npt.NDArray[np.int8]


def pack_i2s(ternary: Int8s, scale: float, layout: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor, (rows, columns), in a layout (x86, arm64 or rows4): its codes,
    the F32 scale, and 28 arbitrary bytes.
    """
    flat = np.arange(ternary.size)
    if layout == "rows4":
        rows, columns = np.divmod(flat, ternary.shape[1])
        where, shift = rows // 4 * ternary.shape[1] + columns, 6 - 2 * (rows % 4)
    else:
        n_bytes = {"x86": 32, "arm64": 16}[layout]
        block, element = np.divmod(flat, 4 * n_bytes)
        where, shift = block * n_bytes + element % n_bytes, 6 - 2 * (element // n_bytes)
    codes = CODES[ternary.ravel() + 1].astype(np.int64) << shift
    packed = np.zeros(ternary.size // 4, dtype=np.int64)
    np.add.at(packed, where, codes)
    tail = struct.pack("<f", scale) + b"\xa5" * 28
    return np.concatenate([packed.astype(np.uint8), np.frombuffer(tail, dtype=np.uint8)])


@dataclass(frozen=True)
class I2sModel:
    """Hold a random 1.58-bit model; equal arguments give equal weights.

    `arch`: bitnet and its other names, llama, qwen2 or qwen3. `extra`: optional tensors, such as a
    separate output head, biases or factors of RoPE.
    """

    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    n_embd: int = 256
    n_ff: int = 512
    n_vocab: int = 300
    seed: int = 0
    arch: str = "bitnet-b1.58"
    ternary: dict[str, Int8s] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    extra: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Draw random weights; about a third of them are zero, and scales are not exact in F16."""
        random = np.random.default_rng(self.seed)
        for layer in range(self.n_layer):
            for name in PROJECTIONS:
                rows, columns = self.shape(name)
                values = random.integers(-1, 2, (rows, columns)).astype(np.int8)
                self.ternary[f"blk.{layer}.{name}"] = values
                scale = np.float32(random.uniform(0.8, 1.6) / np.sqrt(columns))
                self.scales[f"blk.{layer}.{name}"] = float(scale)

    def shape(self, projection: str) -> tuple[int, int]:
        n_kv = self.n_embd // self.n_head * self.n_head_kv
        return {
            "attn_k": (n_kv, self.n_embd),
            "attn_v": (n_kv, self.n_embd),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
        }.get(projection, (self.n_embd, self.n_embd))

    @property
    def graph(self) -> str:
        """Return the architecture of stock llama.cpp that computes the model."""
        return "bitnet" if self.arch.startswith("bitnet") else self.arch

    @property
    def norm_sizes(self) -> dict[str, int]:
        """Return the names and sizes of a layer's norms."""
        head_dim = self.n_embd // self.n_head
        sizes = {"attn_norm": self.n_embd, "ffn_norm": self.n_embd}
        if self.graph == "bitnet":
            sizes |= {"attn_sub_norm": self.n_embd, "ffn_sub_norm": self.n_ff}
        if self.graph == "qwen3":
            sizes |= {"attn_q_norm": head_dim, "attn_k_norm": head_dim}
        return sizes

    @property
    def embedding(self) -> npt.NDArray[np.float16]:
        random = np.random.default_rng(self.seed + 1)
        values = random.standard_normal((self.n_vocab, self.n_embd)) * 2.5 / np.sqrt(self.n_embd)
        return values.astype(np.float16)

    def norm(self, size: int) -> npt.NDArray[np.float32]:
        random = np.random.default_rng(self.seed + size)
        return (1.0 + 0.1 * random.standard_normal(size)).astype(np.float32)

    def write(
        self,
        path: Path,
        layout: str = "x86",
        *,
        head: npt.NDArray[np.float16] | None = None,
        activation: str | None = None,
        pre: str | None = None,
    ) -> Path:
        """Write the file; `head` is an output.weight. Layout "tq2_0" writes a file that stock
        llama.cpp loads.
        """
        stock = layout == "tq2_0"
        writer = GGUFWriter(path, self.graph if stock else self.arch)
        self._add_metadata(writer)
        if pre:
            writer.add_tokenizer_pre(pre)
        if activation:
            writer.add_string("entropykv.activation", activation)
        data = self._plain_tensors()
        if head is not None:
            data["output.weight"] = head
        for name, values in data.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        # The layers of a large model share their arrays, which are packed once.
        packed: dict[int, npt.NDArray[np.uint8]] = {}
        for name, ternary in self.ternary.items():
            weight = f"{name}.weight"
            if stock:
                kind = GGMLQuantizationType.TQ2_0
                data[weight] = quantize(ternary.astype(np.float32), kind)
                data[f"{name}.scale"] = np.array([self.scales[name]], dtype=np.float32)
                writer.add_tensor_info(
                    weight, data[weight].shape, np.dtype(np.uint8), data[weight].nbytes, kind
                )
                scale = data[f"{name}.scale"]
                writer.add_tensor_info(f"{name}.scale", scale.shape, scale.dtype, scale.nbytes)
            else:
                if id(ternary) not in packed:
                    packed[id(ternary)] = pack_i2s(ternary, self.scales[name], layout)
                data[weight] = packed[id(ternary)]
                n_bytes, anything = data[weight].nbytes, np.dtype(np.int8)
                writer.add_tensor_info(weight, ternary.shape, anything, n_bytes, I2_S)  # type: ignore[arg-type]
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in data.values():
            writer.write_tensor_data(values)
        writer.close()
        return path

    def _plain_tensors(self) -> dict[str, npt.NDArray[np.generic]]:
        data: dict[str, npt.NDArray[np.generic]] = {"token_embd.weight": self.embedding}
        data["output_norm.weight"] = self.norm(self.n_embd)
        for layer in range(self.n_layer):
            for name, size in self.norm_sizes.items():
                data[f"blk.{layer}.{name}.weight"] = self.norm(size)
        return data | self.extra

    def _add_metadata(self, writer: GGUFWriter) -> None:
        writer.add_name("tiny I2_S")
        writer.add_vocab_size(self.n_vocab)
        writer.add_context_length(512)
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_layer)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_rope_dimension_count(self.n_embd // self.n_head)
        writer.add_rope_freq_base(500000.0)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_file_type(40)
        writer.add_tokenizer_model("gpt2")
        tokens, merges = byte_level_vocabulary(self.n_vocab)
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        types = [TokenType.NORMAL] * (len(tokens) - 2) + [TokenType.CONTROL] * 2
        writer.add_token_types([int(kind) for kind in types])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(len(tokens) - 2)
        writer.add_eos_token_id(len(tokens) - 1)
        writer.add_pad_token_id(len(tokens) - 1)
        writer.add_chat_template("{% for m in messages %}User: {{ m['content'] }}{% endfor %}")


def byte_level_vocabulary(n_vocab: int) -> tuple[list[str], list[str]]:
    """Return n_vocab tokens (bytes, pairs of letters, unused and control tokens) and merges."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    tokens = [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(others))]
    merges = []
    letters = [chr(byte) for byte in range(ord("a"), ord("z") + 1)]
    for first in letters:
        for second in letters:
            if len(tokens) < n_vocab - 2:
                tokens.append(first + second)
                merges.append(f"{first} {second}")
    tokens += [f"<unused{index}>" for index in range(n_vocab - 2 - len(tokens))]
    return [*tokens, "<|begin|>", "<|end|>"], merges
