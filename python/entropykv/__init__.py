"""entropykv: a hard KV-cache budget for GGUF models in stock llama.cpp.

>>> from entropykv import Session
>>> with Session("model.gguf", n_ctx=8192, kv_budget=0.2) as session:
...     for token in session.generate(session.tokenize("Once upon a time"), max_tokens=50):
...         print(session.detokenize([token]), end="")

A public name is loaded when it is first asked for: `import entropykv` alone loads neither llama.cpp
nor numpy. __init__.pyi has all names, each with the module that defines it.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from entropykv import _version


def _read_homes() -> dict[str, tuple[str, str]]:
    """Return the module that defines each public name, and its name there, as the stub imports
    them.
    """
    stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


_HOMES = _read_homes()
__version__ = _version.VERSION
__all__ = [name for name in _HOMES if name != "_core"]


def __getattr__(name: str) -> object:
    """Return a public name from its module, which is loaded once the installed llama.cpp was
    checked; the errors are loaded without that check.

    Raises VersionError for another release of llama.cpp, each time, and AttributeError for a name
    that is not public.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, name_there = _HOMES[name]
    if home != "entropykv.errors" and "_core" not in globals():
        try:
            _version.check_llama_cpp()
        except ImportError:
            globals().pop("_core", None)  # A refused extension must be no attribute.
            raise
    if name != "_core":
        globals()[name] = getattr(importlib.import_module(home), name_there)
    return globals()[name]


def __dir__() -> list[str]:
    """List the public names, also those that were not asked for yet."""
    return sorted({*globals(), *__all__})
