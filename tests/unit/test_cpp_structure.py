"""C++ folders include only folders below them, and every class has a unique name."""

from __future__ import annotations

import ast
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
"""Folders whose files are compiled once per instruction set, so that a class can exist several
times.
"""

WRAPPED = {"DeviceStore", "FlatStore", "HeadwiseStore"}
"""Python classes that wrap the C++ class of the same name."""

FILES = sorted([*CPP.rglob("*.hpp"), *CPP.rglob("*.cpp")])
each_file = pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(CPP).as_posix())


def code_of(file: Path) -> str:
    """Return the lines of a file without comments and quoted text."""
    text = file.read_text(encoding="utf-8")
    return re.sub(
        r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'',
        lambda match: "\n" * match[0].count("\n"),
        re.sub(r"^#.*$", "", text, flags=re.MULTILINE),
        flags=re.DOTALL,
    )


ACCESS = {"public", "private", "protected"}
CONTAINER = re.compile(r"\b(namespace|class|struct|union|extern)\b")


def kind_of(statement: str) -> str:
    """Tell what a brace after a statement opens: a container, a function, or values."""
    statement = statement.strip()
    statement = re.sub(r"\btemplate\s*<[^{}]*?>\s*(?=[\w\[])", "", statement)
    if CONTAINER.match(statement):
        return "container"
    if statement.startswith("enum") or "(" not in statement:
        return "values"
    before = statement.split("(")[0]
    return "values" if "=" in before and "operator" not in before else "function"


class Definition:
    """Hold a function or class of a file, and the one that contains it."""

    def __init__(self, kind: str, statement: str, container: Definition | None) -> None:
        """Start at an opening brace."""
        self.kind = kind
        self.statement = " ".join(statement.split())
        self.container = container

    @property
    def name(self) -> str | None:
        """Return the name of a class, or None."""
        match = re.match(r"(?:.*?\s)??(?:class|struct)\s+(\w+)", self.statement)
        return match[1] if match and self.kind == "container" else None


def definitions(code: str) -> list[Definition]:
    """Return functions and containers; nothing inside a function is returned separately."""
    reader = Reader()
    for character in code:
        reader.take(character)
    return reader.done


class Reader:
    """Read code character by character, and collect the definitions in its braces."""

    def __init__(self) -> None:
        """Begin with the first line."""
        self.done: list[Definition] = []
        self._open: list[Definition] = []
        self._statement = ""
        self._depth = 0
        """How many braces are open within a function."""

    def take(self, character: str) -> None:
        """Take the next character."""
        if self._open and self._open[-1].kind != "container":
            self._take_inside(character)
        elif character == "{":
            self._begin()
        elif character == "}":
            self._end()
        elif (
            character == ":" and self._statement in {"public", "private", "protected"}
        ) or character == ";":
            self._statement = ""
        elif self._statement or not character.isspace():
            self._statement += character

    def _take_inside(self, character: str) -> None:
        if character == "}" and self._depth == 0:
            self._end()
        else:
            self._depth += (character == "{") - (character == "}")

    def _begin(self) -> None:
        container = self._open[-1] if self._open else None
        self._open.append(Definition(kind_of(self._statement), self._statement, container))
        self._statement = ""

    def _end(self) -> None:
        self.done.append(self._open.pop())
        self._statement = ""


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


def classes() -> Iterator[tuple[Path, Definition]]:
    """Yield the classes of all files."""
    for file in FILES:
        for found in definitions(code_of(file)):
            if found.name:
                yield file, found


def test_a_class_name_is_there_once() -> None:
    """A class name occurs once in C++ and Python together, unless one class wraps the other."""
    ours = Counter(
        found.name
        for file, found in classes()
        if file.parent.name not in BY_INSTRUCTION_SET and is_of_a_namespace(found)
    )
    assert {"HeadStore", "Attention"} <= set(ours)
    theirs = {
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    assert {name for name, n in ours.items() if n > 1} == set()
    assert set(ours) & theirs == WRAPPED


def is_of_a_namespace(found: Definition) -> bool:
    """Tell whether a class is at namespace level, neither within a class nor private to a file."""
    container = found.container
    while container is not None:
        if container.name or container.statement == "namespace":
            return False
        container = container.container
    return True
