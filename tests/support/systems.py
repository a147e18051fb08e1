"""Find what tests need and this system lacks: modules such as fcntl, functions, and files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from entropykv import system

OF_POSIX = ("fcntl", "grp", "pty", "pwd", "resource", "termios")
"""Modules that Windows lacks."""
ABSENT = frozenset(name for name in OF_POSIX if importlib.util.find_spec(name) is None)
"""The modules of OF_POSIX that this system lacks: none on Linux and macOS."""


def is_there(need: str) -> bool:
    """Tell whether this system has what a test needs.

    A need is a path (`/proc/self/fd`), a name in a module (`os.mkfifo`), a function of the C
    library with brackets (`mallopt()`), or `permissions`: whether the mode of a file can refuse it
    to this user. Tests that send any signal to another process need `signal.SIGKILL`, because
    Windows cannot send any; ending.ask_to_end() needs nothing.
    """
    if need == "permissions":
        return hasattr(os, "geteuid") and os.geteuid() != 0
    if need.startswith("/"):
        return os.path.exists(need)
    if need.endswith("()"):
        return system.c_function(need[:-2]) is not None
    module, _, name = need.rpartition(".")
    return importlib.util.find_spec(module or name) is not None and (
        not module or hasattr(importlib.import_module(module), name)
    )


def absent_imports(path: Path, absent: Collection[str] = ABSENT) -> list[str]:
    """Return the modules that a file imports at its top level, and that this system lacks."""
    if not absent or path.suffix != ".py":
        return []
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return sorted(found & {*absent})


def left_out(folder: Path, absent: Collection[str] = ABSENT) -> Iterator[str]:
    """Yield one line for each test module in a folder that this system cannot import."""
    if absent:
        for path in sorted(folder.rglob("test_*.py")):
            missing = absent_imports(path, absent)
            if missing:
                name = path.relative_to(folder).as_posix()
                yield f"not run: {name}, because this system has no {', '.join(missing)}"
