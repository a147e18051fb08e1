"""Check that this machine has what building needs and pip cannot install, and say in one sentence
what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LEAST_PYTHON = (3, 10)
DEBIAN = "on Debian and Ubuntu: apt install python3-dev python3-venv g++ make"


def missing() -> Iterator[str]:
    """Yield the name of each thing that this machine lacks."""
    if sys.version_info < LEAST_PYTHON:
        yield f"Python {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} (this one is {sys.version.split()[0]})"
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        yield "Python's venv and ensurepip"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        yield f"Python's C headers ({header})"
    if not any(map(shutil.which, [os.environ.get("CXX", "c++"), "g++", "clang++"])):
        yield "a C++17 compiler"


if __name__ == "__main__":
    found = list(missing())
    if found:
        sys.exit(f"entropykv cannot be built here without {', '.join(found)}; {DEBIAN}")
