"""Find the llama-cpp-python to build against, and print what the build must know of it.

pip builds in an environment of its own, which hides the user's. The user's is what the extension
will run with, so that its llama-cpp-python decides, whatever release and backends it has. Only if
it has none in the range of pyproject.toml, the one of the build's environment is used.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_HIDES_THE_USERS = ("PYTHONPATH", "PYTHONNOUSERSITE")
"""Variables by which pip makes Python see the build's packages instead of the user's."""


@dataclass(frozen=True)
class LlamaCpp:
    """Describe an installed llama-cpp-python."""

    folder: str
    version: str
    ggml_version: str
    ggml_commit: str


def requirement() -> str:
    """Return the requirement of llama-cpp-python in pyproject.toml's dependencies."""
    found = re.search(r'"(llama-cpp-python[^"]*)"', PROJECT.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{PROJECT} names no llama-cpp-python")
    return found[1]


def installed() -> LlamaCpp | None:
    """Return the llama-cpp-python of the user's environment, or else of the build's; None if
    neither is in the range.
    """
    from packaging.requirements import Requirement  # noqa: PLC0415  (the build's, not the user's)

    served = Requirement(requirement()).specifier
    users = {name: text for name, text in os.environ.items() if name not in _HIDES_THE_USERS}
    for environment in (users, dict(os.environ)):
        found = _seen_with(environment)
        if found is not None and found.version in served:
            return found
    return None


def _seen_with(environment: dict[str, str]) -> LlamaCpp | None:
    # Python also searches the working directory, which must be empty.
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, str(Path(__file__).resolve()), "--here"]
        result = subprocess.run(  # noqa: S603
            command, env=environment, cwd=empty, capture_output=True, text=True, check=True
        )
    return LlamaCpp(**json.loads(result.stdout)) if result.stdout.strip() else None


def ggml_library(folder: Path) -> Path | None:
    """Return ggml's base library: libggml-base.so, libggml-base.dylib or ggml-base.dll.

    A folder of Windows also has ggml-base.lib, which only a linker reads.
    """
    names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll", "libggml-base.dll")
    found = [folder / name for name in names if (folder / name).is_file()]
    return found[0] if found else next(folder.glob("libggml-base.so.*"), None)


def _here() -> LlamaCpp | None:
    """Return the llama-cpp-python that this process would import, or None.

    It is not imported, because its libraries would stay loaded.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    library = ggml_library(folder / "lib")
    if library is None:
        return None
    ggml = ctypes.CDLL(str(library))
    ggml.ggml_version.restype = ggml.ggml_commit.restype = ctypes.c_char_p
    return LlamaCpp(
        folder.as_posix(),
        importlib.metadata.version("llama_cpp_python"),
        ggml.ggml_version().decode(),
        ggml.ggml_commit().decode(),
    )


if __name__ == "__main__":
    found = _here() if sys.argv[1:] == ["--here"] else installed()
    if found is not None and sys.argv[1:] == ["--cmake"]:
        print(*asdict(found).values(), sep=";", end="")
    elif found is not None:
        print(json.dumps(asdict(found)))
