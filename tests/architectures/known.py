"""Which architectures a release of llama.cpp knows: older ones lack some."""

from __future__ import annotations

from pathlib import Path

import pytest
from entropykv._build_info import LLAMA_CPP_PYTHON_VERSION

from entropykv.errors import ModelFileError
from entropykv.llamacpp.model import Model
from entropykv.model.architectures import checked_architectures


def skip_where_unknown(path: Path) -> None:
    """Skip a test of a model whose architecture this release does not know.

    Nothing is skipped in the release that the table of architectures was written for.
    """
    if checked_architectures().llama_cpp_python == LLAMA_CPP_PYTHON_VERSION:
        return
    try:
        Model(path, n_gpu_layers=0, verbose=False).close()
    except ModelFileError as error:
        if "unknown model architecture" in str(error):
            pytest.skip(f"llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}: {error}")
        raise
