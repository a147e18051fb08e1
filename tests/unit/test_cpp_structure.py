"""C++ folders include only folders below them, and every class has a unique name."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPP = ROOT / "cpp"
PACKAGE = ROOT / "python" / "entropykv"
PICTURE = ROOT / "docs" / "structure.md"

BY_INSTRUCTION_SET = {"kernels", "products", "platform"}
"""Folders whose files are compiled once per instruction set, so that a class may exist several
times.
"""

WRAPPED = {"DeviceStore", "FlatStore", "HeadwiseStore"}
"""Python classes that wrap the C++ class of the same name."""

FILES = sorted([*CPP.rglob("*.hpp"), *CPP.rglob("*.cpp")])
each_file = pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(CPP).as_posix())


@functools.cache
def folders() -> list[str]:
    """Return the folders in the picture of docs/structure.md, the highest first."""
    picture = PICTURE.read_text(encoding="utf-8").split("\ncpp/\n")[1].split("```")[0]
    return re.findall(r"^  ([a-z]+)/ ", picture, flags=re.MULTILINE)


def test_the_picture_has_all_folders() -> None:
    assert set(folders()) == {file.parent.name for file in FILES}


@each_file
def test_a_folder_includes_those_below_it(file: Path) -> None:
    order = folders()
    included = re.findall(
        r'^#include "(\w+)/', file.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    above = [name for name in included if order.index(name) < order.index(file.parent.name)]
    assert not above, f"{file.name} includes {above}, which docs/structure.md has above it"


def classes() -> Iterator[str]:
    """Yield the classes of all files, except nested ones and those that are private to a file."""
    for file in FILES:
        if file.parent.name not in BY_INSTRUCTION_SET:
            text = file.read_text(encoding="utf-8")
            # clang-format does not indent namespaces, and marks where one without a name ends.
            code = re.sub(r"(?ms)^namespace \{$.*?^\}  // namespace$", "", text)
            yield from re.findall(r"(?m)^(?:class|struct) (\w+)[^;{(]*\{", code)


def test_a_class_name_is_there_once() -> None:
    """A class name occurs once in C++ and Python together, unless one class wraps the other."""
    ours = Counter(classes())
    assert {"HeadStore", "Attention"} <= set(ours)
    theirs = {
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    assert {name for name, n in ours.items() if n > 1} == set()
    assert set(ours) & theirs == WRAPPED
