"""Find out which tensors a model needs, from llama.cpp's own loader."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import _ctypes_extensions as extensions

from entropykv.llamacpp.model import captured_log, last_error

_LIBRARY = extensions.load_shared_library("ggml-base", Path(llama_cpp.__file__).parent / "lib")


class _GgufInitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class _TensorHead(ctypes.Structure):
    """Define the first fields of ggml_tensor."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_LIBRARY, name)
    function.restype, function.argtypes = result, arguments
    return function


_gguf_init_from_file = _function(
    "gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _GgufInitParams
)
_gguf_free = _function("gguf_free", None, ctypes.c_void_p)
_get_name = _function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)


def tensors_of(metadata: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Return name and shape (numpy's order: slowest first) of every tensor that the loader creates.

    `metadata` is a GGUF file without tensors. llama.cpp creates a model from it and asks for the
    contents of one tensor after the other, including optional ones. Raises ValueError with
    llama.cpp's reason if the metadata is incomplete.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    @llama_cpp.llama_model_set_tensor_data_t  # type: ignore[untyped-decorator]
    def note(tensor: int, _user_data: int) -> None:
        sizes = list(_TensorHead.from_address(tensor).ne)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        shapes[_get_name(tensor).decode()] = tuple(reversed(sizes))

    gguf = _gguf_init_from_file(os.fsencode(metadata), _GgufInitParams(no_alloc=True))
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    llama_cpp.llama_backend_init()
    try:
        with captured_log() as log:
            model = llama_cpp.llama_model_init_from_user(gguf, note, None, parameters)
    finally:
        _gguf_free(gguf)
    if not model:
        raise ValueError(last_error(log))
    llama_cpp.llama_model_free(model)
    return shapes
