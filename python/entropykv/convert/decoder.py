"""List the tensors, with their shapes, that llama.cpp's graphs expect in a converted model.

In the graphs of bitnet, llama and qwen3, llama.cpp applies a `.scale` tensor to each of the seven
projections. Its graphs of qwen2 and gemma ignore the scales of the feed-forward layer. Therefore a
qwen2 model is written as llama, which computes the same, and a gemma model cannot be converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from entropykv.convert.source import EMBEDDING, FileTensor, Tensor
from entropykv.errors import ModelFileError, UnsupportedModelError

HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
_AGAIN = "download or convert it again"

_BIASES = {
    "bitnet": (),
    "llama": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    "qwen3": ("attn_q", "attn_k", "attn_v"),
}


@dataclass(frozen=True)
class DecoderShape:
    """Hold the sizes of a model, in elements; `architecture` is the one that the converted file
    declares. Shapes are (rows, columns) or (columns,).
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return the shape, (outputs, inputs), of every ternary tensor by its name, which lacks the
        ending `.weight`.
        """
        n_embd, n_ff = self.n_embd, self.n_ff
        n_embd_q, n_embd_kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        block = {
            "attn_q": (n_embd_q, n_embd),
            "attn_k": (n_embd_kv, n_embd),
            "attn_v": (n_embd_kv, n_embd),
            "attn_output": (n_embd, n_embd_q),
            "ffn_gate": (n_ff, n_embd),
            "ffn_up": (n_ff, n_embd),
            "ffn_down": (n_embd, n_ff),
        }
        return {
            f"blk.{layer}.{name}": shape
            for layer in range(self.n_layer)
            for name, shape in block.items()
        }

    def norms(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every norm that the graph needs, by name."""
        block = {"attn_norm": self.n_embd, "ffn_norm": self.n_embd}
        if self.architecture == "bitnet":
            block |= {"attn_sub_norm": self.n_embd, "ffn_sub_norm": self.n_ff}
        if self.architecture == "qwen3":
            block |= {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim}
        shapes: dict[str, tuple[int, ...]] = {"output_norm.weight": (self.n_embd,)}
        for layer in range(self.n_layer):
            for name, size in block.items():
                shapes[f"blk.{layer}.{name}.weight"] = (size,)
        return shapes

    def required(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the graph needs, by name."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.n_vocab, self.n_embd)}
        weights = {f"{name}.weight": shape for name, shape in self.projections().items()}
        return shapes | self.norms() | weights

    def optional(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that the graph uses only if a file has them, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, _) in self.projections().items():
            shapes[f"{name}.scale"] = (1,)
            if name.split(".")[2] in _BIASES[self.architecture]:
                shapes[f"{name}.bias"] = (rows,)
        if self.architecture != "bitnet":
            shapes[HEAD] = (self.n_vocab, self.n_embd)
        if self.architecture == "llama":
            shapes[ROPE_FACTORS] = (self.head_dim // 2,)
        return shapes


def drop_tied_head(path: Path, shape: DecoderShape, tensors: dict[str, Tensor]) -> None:
    """Remove an output head that equals the embedding; llama.cpp then uses the embedding as the
    head.

    Raises UnsupportedModelError for a separate head if the graph has no tensor for one.
    """
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if head is None:
        return
    if (
        isinstance(head, FileTensor)
        and isinstance(embedding, FileTensor)
        and _equal(head, embedding)
    ):
        del tensors[HEAD]
    elif shape.architecture == "bitnet":
        raise UnsupportedModelError(
            f"{path}: has an untied head (its output.weight is not its token_embd.weight), which "
            "llama.cpp's bitnet graph cannot run; use a checkpoint with tied embeddings"
        )


def _equal(one: FileTensor, other: FileTensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.kind == other.kind:
        pairs = zip(one.raw_chunks(), other.raw_chunks(), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)
    chunks = zip(one.float_chunks(), other.float_chunks(), strict=True)
    return all(np.array_equal(a, b) for a, b in chunks)


def check_tensors(path: Path, shape: DecoderShape, tensors: dict[str, Tensor]) -> None:
    """Raise ModelFileError for a tensor that is missing or has another shape than the graph's, and
    UnsupportedModelError for one that the graph does not have.
    """
    required, optional = shape.required(), shape.optional()
    for name, tensor in tensors.items():
        wanted = required.get(name, optional.get(name))
        if wanted is None:
            raise UnsupportedModelError(
                f"{path}: has a tensor {name}, for which llama.cpp's {shape.architecture} graph "
                "has no place; use a model of the published BitNet, Llama or Qwen shape"
            )
        if tensor.shape != wanted:
            raise ModelFileError(
                f"{path}: tensor {name} has shape {list(tensor.shape)} where its other sizes ask "
                f"for {list(wanted)}; {_AGAIN}"
            )
    for name in required:
        if name not in tensors:
            raise ModelFileError(f"{path}: lacks tensor {name}; {_AGAIN}")
