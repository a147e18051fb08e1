"""The version of this package, and of the llama-cpp-python that its extension was built against."""

from importlib import metadata

from entropykv._build_info import LLAMA_CPP_PYTHON_VERSION
from entropykv.errors import VersionError

VERSION = metadata.version("entropykv")


def check() -> None:
    """Refuse a llama-cpp-python of another version than the extension was built against.

    The extension reads llama.cpp's structures, which change between versions: it must not be
    loaded at all then. Raises VersionError.
    """
    try:
        installed = metadata.version("llama_cpp_python")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed != LLAMA_CPP_PYTHON_VERSION:
        raise VersionError(
            f"entropykv {VERSION} was built against llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}, "
            f"but {installed} is installed; run `pip install "
            f"llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}` or build entropykv again"
        )
