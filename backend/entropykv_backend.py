"""The build backend: scikit-build-core, against the llama-cpp-python that is already installed.

Without this file pip would build llama.cpp a second time, in the build's own environment, and the
newest release of the range instead of the one that the user has pinned.
"""

from __future__ import annotations

from typing import Any

from scikit_build_core import build as scikit
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from installed_llama_cpp import installed, requirement

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what the environment of a build needs: llama-cpp-python only if the user has none."""
    return [*scikit.get_requires_for_build_wheel(config_settings), *_llama_cpp_python()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return the same for `pip install -e`."""
    return [*scikit.get_requires_for_build_editable(config_settings), *_llama_cpp_python()]


def _llama_cpp_python() -> list[str]:
    return [] if installed() else [requirement()]
