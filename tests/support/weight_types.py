"""Write model files with weights of every type."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
from gguf import GGUFReader

FILE_TYPES = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q5_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0,
    "Q5_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_1,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "Q5_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_S,
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "IQ4_XS": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "TQ1_0": llama_cpp.LLAMA_FTYPE_MOSTLY_TQ1_0,
    "TQ2_0": llama_cpp.LLAMA_FTYPE_MOSTLY_TQ2_0,
}


def quantised(original: Path, folder: Path, weight_type: str) -> Path:
    """Write a model with all matrices in one type, by llama.cpp's own quantiser."""
    target = folder / f"{weight_type}.gguf"
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[weight_type]
    parameters.pure = True
    parameters.nthread = 1
    source = bytes(original)
    assert llama_cpp.llama_model_quantize(source, bytes(target), ctypes.byref(parameters)) == 0
    tensors = GGUFReader(target).tensors
    assert {t.tensor_type.name for t in tensors if len(t.shape) == 2} == {weight_type}
    return target
