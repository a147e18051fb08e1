"""Read a Hugging Face checkpoint of a BitNet model: a directory with config.json and safetensors.

Three storages of the ternary weights are known: packed uint8 with weight_scale, master weights
that transformers quantises while it runs, and dense weights that are kept as they are.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from entropykv.convert.hf_config import Checkpoint
from entropykv.convert.safetensors import StoredTensor, read_safetensors
from entropykv.convert.source import (
    ARCHITECTURE,
    FileTensor,
    Source,
    Tensor,
    TernaryTensor,
    as_floats,
    check_tensors,
    checked_scale,
    drop_tied_head,
)
from entropykv.convert.ternary import Floats, Ternary, is_ternary, quantize_absmean, unpack_hf
from entropykv.errors import EntropyKVError, ModelFileError, UnsupportedModelError

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "self_attn.inner_attn_ln": "attn_sub_norm",  # 1bitLLM
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.ffn_layernorm": "ffn_sub_norm",  # 1bitLLM
}
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.(.+)\.weight")
_KINDS = {
    "F32": GGMLQuantizationType.F32,
    "F16": GGMLQuantizationType.F16,
    "BF16": GGMLQuantizationType.BF16,
}
_AGAIN = "download it again"


@dataclass(frozen=True)
class PackedTensor(TernaryTensor):
    """A uint8 weight with a weight_scale.

    `divides`: transformers' BitLinear divides by the stored scale, AutoBitLinear multiplies.
    """

    name: str
    shape: tuple[int, int]
    stored: StoredTensor
    stored_scale: FileTensor
    divides: bool

    def ternary(self) -> Ternary:
        """Unpack the weight."""
        ternary = unpack_hf(self.stored.raw().reshape(self.stored.shape))
        if not is_ternary(ternary):
            raise ModelFileError(
                f"{self.stored.path}: is damaged (tensor {self.name} has values other than "
                f"-1, 0 and 1); {_AGAIN}"
            )
        return ternary

    def scale(self) -> np.float32:
        """What the ternary weight is multiplied with."""
        scale = checked_scale(self.stored.path, self.name, self.stored_scale.floats().item())
        return np.float32(1.0) / scale if self.divides else scale


@dataclass(frozen=True)
class MasterTensor(TernaryTensor):
    """A weight that is quantised by its mean absolute value when the model runs."""

    name: str
    master: FileTensor
    shape: tuple[int, int]
    _scale: list[np.float32] = field(default_factory=list)

    def ternary(self) -> Ternary:
        """Quantise the weight."""
        weights = self.master.floats()
        if not np.isfinite(weights).all():
            raise ModelFileError(
                f"{self.master.path}: is damaged (tensor {self.name} is not finite); {_AGAIN}"
            )
        ternary, scale = quantize_absmean(weights)
        self._scale[:] = [_rounded(scale, self.master.kind)]
        return ternary

    def scale(self) -> np.float32:
        """The mean, rounded to the type of the weight, as in transformers."""
        if not self._scale:
            self.ternary()
        return self._scale[0]


def _rounded(value: np.float32, kind: GGMLQuantizationType) -> np.float32:
    if kind == GGMLQuantizationType.F16:
        return np.float32(np.float16(value))
    if kind == GGMLQuantizationType.BF16:  # to nearest, ties to even
        bits = np.array([value]).view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)
        rounded: Floats = as_floats((bits >> 16).astype("<u2").view(np.uint8), kind)
        return np.float32(rounded[0])
    return value


def read_hf(path: Path, *, dense: bool = False) -> Source:
    """Read config.json and the headers of the safetensors; weights are read later.

    `dense` keeps weights that are not packed as they are; else they are master weights, which are
    quantised. Raises ModelFileError and UnsupportedModelError.
    """
    try:
        checkpoint = Checkpoint.open(path)
        stored = read_safetensors(path)
        tensors = _tensors(checkpoint, stored, dense)
        drop_tied_head(path, tensors)
        check_tensors(path, checkpoint.shape, tensors)
        return Source(
            path=path,
            architecture=ARCHITECTURE,
            activation=str(checkpoint.config.get("hidden_act", "relu2")),
            shape=checkpoint.shape,
            tensors=tensors,
            n_bytes=sum(tensor.n_bytes for tensor in stored.values()),
            keeps_types=False,
            add_metadata=checkpoint.add_metadata,
        )
    except EntropyKVError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelFileError(f"{path}: is damaged ({reason}); {_AGAIN}") from error


def _tensors(
    checkpoint: Checkpoint, stored: dict[str, StoredTensor], dense: bool
) -> dict[str, Tensor]:
    projections = checkpoint.shape.projections()
    tensors: dict[str, Tensor] = {}
    for hf_name, tensor in stored.items():
        if hf_name.endswith((".weight_scale", ".rotary_emb.inv_freq")):
            continue
        name = _llama_name(hf_name)
        if name in tensors:
            raise ModelFileError(f"{tensor.path}: has two tensors {name}; {_AGAIN}")
        if name.removesuffix(".weight") in projections:
            scale = stored.get(hf_name.removesuffix("weight") + "weight_scale")
            tensors[name] = _projection(checkpoint, hf_name, tensor, scale, dense)
        else:
            tensors[name] = _file_tensor(hf_name, tensor)
    return tensors


def _llama_name(hf_name: str) -> str:
    match = _LAYER.fullmatch(hf_name)
    if match and match[2] in _LAYER_NAMES:
        return f"blk.{int(match[1])}.{_LAYER_NAMES[match[2]]}.weight"
    return _GLOBAL_NAMES.get(hf_name, hf_name)


def _file_tensor(name: str, tensor: StoredTensor) -> FileTensor:
    if tensor.dtype not in _KINDS:
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {name} has type {tensor.dtype}; "
            f"convert it to one of {', '.join(_KINDS)}"
        )
    return FileTensor(tensor.path, tensor.offset, _KINDS[tensor.dtype], tensor.shape)


def _projection(
    checkpoint: Checkpoint,
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
    online = quantization.get("quantization_mode", "offline") == "online"
    if scale is not None or (quantization and not online):
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {name} is not packed although quantization_config says so; "
            "use a checkpoint with packed weights, or with master weights and no "
            "quantization_config"
        )
    return weights if dense else MasterTensor(name, weights, (rows, columns))
