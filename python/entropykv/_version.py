"""Provide the version of this package, and check that it was built for the installed llama.cpp."""

from __future__ import annotations

import ctypes
import importlib
from types import ModuleType

from entropykv import _build_info
from entropykv._build_info import GGML_COMMIT, GGML_VERSION, LLAMA_CPP_PYTHON_VERSION
from entropykv.errors import VersionError

VERSION = _build_info.VERSION

REBUILD = "build it again in its source directory: `pip install --force-reinstall --no-deps .`"
_BUILT = f"entropykv {VERSION} was built against llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}"


def check_llama_cpp() -> None:
    """Raise VersionError for a llama.cpp that differs from the one that the extension was built
    against.

    The extension reads and changes llama.cpp's structures, which differ between releases. If the
    release differs, neither llama_cpp nor the extension is loaded.

    llama_cpp is imported before the extension, so that both use one libllama. In a wheel, its names
    (libllama.so, libllama.so.0) are separate files, and only the one that llama_cpp loads can be
    found again by the other name.
    """
    _check_release()
    try:
        importlib.import_module("llama_cpp")
        core = importlib.import_module("entropykv._core")
    except ImportError as error:
        raise VersionError(f"{_BUILT}, but cannot be loaded with it ({error}); {REBUILD}") from None
    _check_library(core)


def _check_release() -> None:
    from importlib import metadata  # noqa: PLC0415  (it takes longer to load than all of --help)

    pinned = f"`pip install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}`"
    try:
        installed = metadata.version("llama_cpp_python")
    except metadata.PackageNotFoundError:
        raise VersionError(f"{_BUILT}, but none is installed; run {pinned}") from None
    if installed == LLAMA_CPP_PYTHON_VERSION:
        return
    served = next(r for r in metadata.requires("entropykv") or () if r.startswith("llama-cpp-py"))
    raise VersionError(
        f"{_BUILT}, but {installed} is installed; {REBUILD} (its sources serve {served}), or run "
        f"{pinned}"
    )


def _check_library(core: ModuleType) -> None:
    """Compare the loaded libraries with the headers, because a release may be built from other
    sources.
    """
    loaded = (core.ggml_version(), core.ggml_commit())
    built = (GGML_VERSION, GGML_COMMIT)
    if _release_of(*loaded) != _release_of(*built):
        raise VersionError(
            f"{_BUILT} with ggml {built[0]} ({built[1]}), but runs with ggml {loaded[0]} "
            f"({loaded[1]}); {REBUILD}"
        )
    # In another library, the names that differences() reads lie beyond the end of the table.
    for difference in (*core.differences(), *_different_structures(core)):
        raise VersionError(f"{_BUILT}, but in the one that it runs with {difference}; {REBUILD}")


def _release_of(version: str, commit: str) -> tuple[str, str]:
    """Return the release without the mark of a changed tree, which every source
    distribution has.
    """
    return version, commit.removesuffix("-dirty")


def _different_structures(core: ModuleType) -> list[str]:
    import llama_cpp  # noqa: PLC0415  (only a release that fits)

    found = []
    for name, size, field, offset in core.struct_layouts():
        structure = getattr(llama_cpp, name)
        theirs = (ctypes.sizeof(structure), getattr(structure, field).offset)
        if theirs != (size, offset):
            found.append(
                f"{name} has {theirs[0]} bytes with {field} at {theirs[1]} instead of {size} with "
                f"{field} at {offset}"
            )
    return found
