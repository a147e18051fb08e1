"""Read a Hugging Face checkpoint of a 1.58-bit model: a directory with config.json and safetensors.

Ternary weights may be stored in three ways: packed in uint8 with a weight_scale, as master weights
that transformers quantises while it runs, or as dense weights that are kept unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, TensorNameMap, get_tensor_name_map

from entropykv.convert.decoder import (
    HEAD,
    ROPE_FACTORS,
    check_tensors,
    drop_tied_head,
)
from entropykv.convert.hf_config import HfCheckpoint
from entropykv.convert.hf_tokenizer import check_tokenizer
from entropykv.convert.permuted import permuted
from entropykv.convert.safetensors import StoredTensor, read_safetensors
from entropykv.convert.source import (
    ArrayTensor,
    FileTensor,
    Source,
    Tensor,
    TernaryTensor,
    as_floats,
    checked_scale,
)
from entropykv.convert.ternary import (
    Floats,
    Ternary,
    absmean_inverse,
    is_ternary,
    quantize_absmean,
    unpack_hf,
)
from entropykv.errors import EntropyKVError, ModelFileError, UnsupportedModelError, reason_of

# gguf maps transformers' tensor names to llama.cpp's; these names of 1bitLLM are missing there.
_ALIASES = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}
_NAMES_OF = {"bitnet": MODEL_ARCH.BITNET, "llama": MODEL_ARCH.LLAMA, "qwen3": MODEL_ARCH.QWEN3}
_SKIPPED = (".weight_scale", ".rotary_emb.inv_freq")
_KINDS = {
    "F32": GGMLQuantizationType.F32,
    "F16": GGMLQuantizationType.F16,
    "BF16": GGMLQuantizationType.BF16,
}
# If config.json names no activation, transformers computes that of this table.
_ACTIVATION_OF = {"bitnet": "relu2", "llama": "silu", "qwen3": "silu"}
_AGAIN = "download it again"


@dataclass(frozen=True)
class PackedTensor(TernaryTensor):
    """Read a packed uint8 weight of transformers, which has a weight_scale beside it.

    `divides` is true if the model divides by the stored scale, as transformers' BitLinear does;
    AutoBitLinear multiplies by it.
    """

    name: str
    shape: tuple[int, int]
    stored: StoredTensor
    stored_scale: FileTensor
    divides: bool

    def rows(self, first: int, count: int) -> Ternary:
        """Unpack `count` rows, (count, columns), from row `first` on: two bits of every byte hold
        one quarter of the rows. Raises ModelFileError for values other than -1, 0 and 1.
        """
        n_packed = self.stored.shape[0]
        parts = []
        while count > 0:
            quarter, start = divmod(first, n_packed)
            taken = min(count, n_packed - start)
            parts.append(unpack_hf(self.stored.rows(start, taken), quarter))
            first, count = first + taken, count - taken
        ternary = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not is_ternary(ternary):
            raise ModelFileError(
                f"{self.stored.path}: is damaged (tensor {self.name} has values other than "
                f"-1, 0 and 1); {_AGAIN}"
            )
        return ternary

    def scale(self) -> np.float32:
        """Return the factor of the ternary values."""
        scale = checked_scale(self.stored.path, self.name, self.stored_scale.floats().item())
        return np.float32(1.0) / scale if self.divides else scale


@dataclass(frozen=True)
class MasterTensor(TernaryTensor):
    """Quantise a master weight by its mean absolute value, as the model itself does when
    it runs.
    """

    name: str
    master: FileTensor
    shape: tuple[int, int]
    _inverse: list[np.float32] = field(default_factory=list)

    def rows(self, first: int, count: int) -> Ternary:
        """Read `count` rows from `first` on, and quantise them; returns (count, columns)."""
        return quantize_absmean(self.master.float_rows(first, count), self.inverse())

    def inverse(self) -> np.float32:
        """Return the factor that weights are multiplied by before rounding; reads the whole tensor
        once. Raises ModelFileError for weights that are not finite.
        """
        if not self._inverse:
            total = math.fsum(map(self._absolute_sum, self.master.float_chunks()))
            self._inverse.append(absmean_inverse(np.float32(total / math.prod(self.shape))))
        return self._inverse[0]

    def scale(self) -> np.float32:
        """Return the mean absolute value, rounded to the type of the weight as
        transformers does.
        """
        return _rounded(np.float32(1.0) / self.inverse(), self.master.kind)

    def _absolute_sum(self, weights: Floats) -> float:
        if not np.isfinite(weights).all():
            raise ModelFileError(
                f"{self.master.path}: is damaged (tensor {self.name} is not finite); {_AGAIN}"
            )
        return float(np.abs(weights).sum(dtype=np.float64))


def _rounded(value: np.float32, kind: GGMLQuantizationType) -> np.float32:
    if kind == GGMLQuantizationType.F16:
        return np.float32(np.float16(value))
    if kind == GGMLQuantizationType.BF16:  # Round to the nearest value; ties go to the even one.
        bits = np.array([value]).view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)
        rounded: Floats = as_floats((bits >> 16).astype("<u2").view(np.uint8), kind)
        return np.float32(rounded[0])
    return value


def read_hf(path: Path, *, dense: bool = False) -> Source:
    """Read config.json and the headers of the safetensors; weights are read later, row by row.

    Weights that are not packed stay as they are if `dense`; otherwise they are taken for master
    weights, and quantised. Raises ModelFileError for a damaged checkpoint, and
    UnsupportedModelError for another kind of model.
    """
    try:
        checkpoint = HfCheckpoint.open(path)
        checkpoint.check_attention()
        check_tokenizer(path)
        shape = checkpoint.shape
        stored = read_safetensors(path)
        tensors = dict(_tensors(checkpoint, stored, dense))
        factors = checkpoint.rope.factors()
        if factors is not None:
            tensors[ROPE_FACTORS] = ArrayTensor(factors.shape, factors)
        _settle_head(checkpoint, tensors)
        drop_tied_head(path, shape, tensors)
        check_tensors(path, shape, tensors)
        return Source(
            path=path,
            architecture=str(checkpoint.config.get("model_type", shape.architecture)),
            target_architecture=shape.architecture,
            activation=str(checkpoint.config.get("hidden_act", _ACTIVATION_OF[shape.architecture])),
            tensors=tensors,
            n_bytes=sum(tensor.n_bytes for tensor in stored.values()),
            keeps_types=not dense,
            add_metadata=checkpoint.add_metadata,
        )
    except EntropyKVError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{path}: is damaged ({reason_of(error)}); {_AGAIN}") from error


def _tensors(
    checkpoint: HfCheckpoint, stored: dict[str, StoredTensor], dense: bool
) -> Iterator[tuple[str, Tensor]]:
    shape = checkpoint.shape
    projections = shape.projections()
    names = get_tensor_name_map(_NAMES_OF[shape.architecture], shape.n_layer)
    taken = set()
    for hf_name, tensor in stored.items():
        if hf_name.endswith(_SKIPPED):
            continue
        if hf_name.endswith("_proj.norm.weight"):
            raise UnsupportedModelError(
                f"{tensor.path}: has a norm in every projection ({hf_name}), which no graph of "
                "llama.cpp has; use a checkpoint without, such as the published BitNet b1.58"
            )
        name = _gguf_name(names, hf_name)
        if name in taken:
            raise ModelFileError(f"{tensor.path}: has two tensors {name}; {_AGAIN}")
        taken.add(name)
        if name.removesuffix(".weight") in projections or (name == HEAD and tensor.dtype == "U8"):
            scale = stored.get(hf_name.removesuffix("weight") + "weight_scale")
            weight = _projection(checkpoint, hf_name, tensor, scale, dense)
        else:
            weight = _file_tensor(hf_name, tensor)
        is_llama = shape.architecture == "llama"
        yield name, permuted(name, weight, shape.head_dim) if is_llama else weight


def _settle_head(checkpoint: HfCheckpoint, tensors: dict[str, Tensor]) -> None:
    """Remove an output head that transformers would not use; raises ModelFileError if a needed head
    is missing.
    """
    if checkpoint.target_architecture == "bitnet":
        return
    if checkpoint.config.get("tie_word_embeddings", False):
        tensors.pop(HEAD, None)
    elif HEAD not in tensors:
        raise ModelFileError(
            f"{checkpoint.path}: lacks tensor lm_head.weight, although tie_word_embeddings is "
            f"false in config.json; {_AGAIN}"
        )


def _gguf_name(names: TensorNameMap, hf_name: str) -> str:
    """Return llama.cpp's name of a tensor, or `hf_name` if gguf knows none."""
    alias = hf_name
    for theirs, known in _ALIASES.items():
        alias = alias.replace(f".{theirs}.", f".{known}.")
    if alias == "lm_head.weight":  # gguf has no name for the head of bitnet.
        return HEAD
    return names.get_name(alias, try_suffixes=(".weight", ".bias")) or hf_name


def _file_tensor(name: str, tensor: StoredTensor) -> FileTensor:
    if tensor.dtype not in _KINDS:
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {name} has type {tensor.dtype}; "
            f"convert it to one of {', '.join(_KINDS)}"
        )
    return FileTensor(tensor.path, tensor.offset, _KINDS[tensor.dtype], tensor.shape)


def _projection(
    checkpoint: HfCheckpoint,
    name: str,
    tensor: StoredTensor,
    scale: StoredTensor | None,
    dense: bool,
) -> Tensor:
    quantization = checkpoint.quantization
    if len(tensor.shape) != 2:
        raise ModelFileError(f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}")
    rows, columns = tensor.shape
    if tensor.dtype == "U8":
        if scale is None or math.prod(scale.shape) != 1:
            raise ModelFileError(f"{tensor.path}: tensor {name} has no weight_scale; {_AGAIN}")
        divides = quantization.get("linear_class", "bitlinear") == "bitlinear"
        shape = (4 * rows, columns)
        return PackedTensor(name, shape, tensor, _file_tensor(name, scale), divides)
    weights = _file_tensor(name, tensor)
    if quantization and scale is None and checkpoint.keeps_dense(name.removesuffix(".weight")):
        return weights
    online = quantization.get("quantization_mode", "offline") == "online"
    if scale is not None or (quantization and not online):
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {name} is not packed although quantization_config says so; "
            "use a checkpoint with packed weights, or with master weights and no "
            "quantization_config"
        )
    return weights if dense else MasterTensor(name, weights, (rows, columns))
