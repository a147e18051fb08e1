"""Write the types of options for type checkers: `python -m tests.support.option_types`.

Type checkers and editors read keyword arguments and settings as text. The sections between two
comments in settings/cache_options.py and server/options.py are written from the declarations of
CacheOptions, Freezing and Recovery; a test compares both.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import WITHOUT_REWALK, Freezing, Recovery
from entropykv.settings.options import Option, declared, of_group

PACKAGE = Path(__file__).parents[2] / "python" / "entropykv"
BEGIN = "# What follows is written by `python -m tests.support.option_types`.\n"
END = "# End of what is written.\n"
_DOORS = (
    ("CacheArguments(TypedDict", "can be set for a loaded model, besides the budget", [""]),
    ("SessionArguments(CacheArguments", "Session accepts", ["loading", "drafts"]),
    ("PoolArguments(SessionArguments", "Pool accepts: all", ["pool"]),
)
_OF_LLAMA = ("n_ubatch", "n_gpu_layers")
"""Settings that llama_cpp.server has, too, with defaults of its own."""


def arguments() -> str:
    """Return Python classes that list keyword arguments, with the types of CacheOptions' fields."""
    types = {field.name: field.type for field in fields(CacheOptions)}
    parts = []
    for name, what, groups in _DOORS:
        names = itertools.chain(*(of_group(CacheOptions, group) for group in groups))
        lines = [f"    {each}: {types[each]}\n" for each in names]
        doc = f'    """List the fields of CacheOptions that {what}."""'
        parts.append(f"class {name}, total=False):\n{doc}\n\n{''.join(lines)}")
    return "\n\n".join(parts)


def settings() -> str:
    """Return the Python class of the server's settings of the cache."""
    lines = [
        "class CacheSettings(ModelSettings):",
        '    """Hold the options of the cache as settings of the server: see CacheOptions."""\n',
    ]
    for name, said, default in _of_server():
        kind = said.kind.__name__
        if name == "recovery":  # A rewalk would change an answer that was already sent.
            kind = f"Literal[{', '.join(map(repr, WITHOUT_REWALK))}]".replace("'", '"')
        optional = f"Optional[{kind}]" if default is None else kind
        lines.append(f'    {name}: {optional} = _declared("{name}")')
    return "\n".join(lines) + "\n"


def _of_server() -> Iterator[tuple[str, Option, object]]:
    for said in declared(CacheOptions).values():
        if said.server_name not in _OF_LLAMA:
            yield said.server_name, said, said.server_default
    for owner in (Freezing, Recovery):
        for said in declared(owner).values():
            if said.flags and said.name != "rewalk":
                yield said.name, said, None


SECTIONS = {"settings/cache_options.py": arguments, "server/options.py": settings}


def rewritten(name: str) -> str:
    """Return the text of a module with its generated section replaced."""
    text = (PACKAGE / name).read_text(encoding="utf-8")
    section = f"{BEGIN}\n\n{SECTIONS[name]()}\n\n{END}"
    pattern = re.escape(BEGIN) + ".*" + re.escape(END)
    return re.sub(pattern, lambda _: section, text, flags=re.DOTALL)


def main() -> None:
    """Write the sections into the modules."""
    for name in SECTIONS:
        (PACKAGE / name).write_text(rewritten(name), encoding="utf-8")


if __name__ == "__main__":
    main()
