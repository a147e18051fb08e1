"""Skip tests of models or images that an older release of llama.cpp cannot load or run.

Nothing is skipped in the release that the table of architectures was written for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from entropykv._build_info import LLAMA_CPP_PYTHON_VERSION
from entropykv.errors import UnsupportedModelError
from entropykv.llamacpp.projector import load_mtmd
from entropykv.model.architectures import checked_architectures
from tests.architectures import Architecture, write_architecture

IS_CHECKED = checked_architectures().llama_cpp_python == LLAMA_CPP_PYTHON_VERSION
"""True if the running release is that of the table of architectures."""

ENDS_THE_PROCESS = dict.fromkeys(
    ("0.3.30", "0.3.31", "0.3.32", "0.3.33", "0.3.34"), ("deepseek32",)
)
"""By release, the models for which llama.cpp itself ends the process in an assertion."""


def need_images() -> None:
    """Skip a test of images if this release calls libmtmd in a way that is not known."""
    try:
        load_mtmd()
    except UnsupportedModelError as error:
        if IS_CHECKED:
            raise
        pytest.skip(str(error))


def write_known(path: Path, model: Architecture) -> None:
    """Write a model; skip the test if this release does not know its architecture."""
    if model.name in ENDS_THE_PROCESS.get(LLAMA_CPP_PYTHON_VERSION, ()):
        pytest.skip(f"llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}: {model.name} ends the process")
    try:
        write_architecture(path, model)
    except ValueError as error:
        if not IS_CHECKED and "unknown model architecture" in str(error):
            pytest.skip(f"llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}: {error}")
        raise
