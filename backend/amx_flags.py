"""Print the CMAKE_ARGS that llama-cpp-python must be built with here: usually none.

GCC before 11.5, 12.4, 13.3 and 14 drops most of the tile configuration that ggml's AMX products
load (its bug 114098), so that stock llama.cpp crashes with the first prompt on CPUs with AMX. There
it is built without AMX.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

FIXED = {11: 5, 12: 4, 13: 3}
"""The minor version of GCC from which on a major version has the fix; older majors never have it,
newer ones always.
"""
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


def has_amx(cpuinfo: str) -> bool:
    """Tell whether the text of /proc/cpuinfo names AMX."""
    return " amx_tile" in cpuinfo


def is_affected(predefined: str) -> bool:
    """Tell whether a compiler with these predefined macros (`c++ -dM -E`) drops the tile
    configuration.
    """
    words = [line.split() for line in predefined.splitlines()]
    macros = {define[1]: define[2] for define in words if len(define) > 2}
    if "__clang__" in macros or "__GNUC__" not in macros:
        return False
    major, minor = int(macros["__GNUC__"]), int(macros["__GNUC_MINOR__"])
    return major < min(FIXED) or minor < FIXED.get(major, 0)


def predefined_macros() -> str:
    """Return the predefined macros of the compiler that CMake takes; empty if it cannot be run."""
    compiler = [*shlex.split(os.environ.get("CXX", "c++")), "-dM", "-E", "-x", "c++", os.devnull]
    try:
        return subprocess.run(compiler, capture_output=True, text=True, check=True).stdout  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""


if __name__ == "__main__":
    cpuinfo = Path("/proc/cpuinfo")
    if (
        cpuinfo.is_file()
        and has_amx(cpuinfo.read_text(encoding="utf-8"))
        and is_affected(predefined_macros())
    ):
        print(f"-DCMAKE_C_FLAGS='{NO_AMX}' -DCMAKE_CXX_FLAGS='{NO_AMX}'")
