"""Folders of Python and C++ use only folders below them, and every class has a unique name."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "entropykv"
PICTURE = ROOT / "docs" / "structure.md"

FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def rows() -> list[list[str]]:
    """Return the folders in the picture of docs/structure.md by row, the highest row first.

    The lowest row, which is left out, has the modules that are in no folder.
    """
    picture = PICTURE.read_text(encoding="utf-8").split("python/entropykv/\n")[1].split("cpp/\n")[0]
    found = [re.match(r"  ((?:[a-z_]+/ ?)+)", line) for line in picture.splitlines()]
    return [match[1].replace("/", "").split() for match in found if match]


def place(name: str) -> tuple[int, int]:
    """Return the row of a folder and its place in that; modules in no folder are at the bottom."""
    for row, folders in enumerate(rows()):
        if name in folders:
            return row, folders.index(name)
    return len(rows()), 0


def imported(file: Path) -> Iterator[str]:
    """Yield the folders of the package that a file imports, also in functions and for types."""
    for node in ast.walk(parsed(file)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            head, *rest = name.split(".")
            if head == "entropykv" and rest and (PACKAGE / rest[0]).is_dir():
                yield rest[0]


def test_the_picture_has_all_folders() -> None:
    drawn = set(itertools.chain.from_iterable(rows()))
    there = {file.relative_to(PACKAGE).parts[0] for file in FILES if file.parent != PACKAGE}
    assert there <= drawn
    assert all((PACKAGE / folder).is_dir() for folder in drawn)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_a_folder_imports_those_below_it(file: Path) -> None:
    """A folder imports only folders below it, and in its own row only those to its right."""
    parts = file.relative_to(PACKAGE).parts
    if parts == ("__init__.py",):
        return  # The package's own module imports everything that is public.
    own = parts[0] if len(parts) > 1 else ""
    above = [other for other in imported(file) if other != own and place(other) <= place(own)]
    assert not above, f"{'/'.join(parts)} imports {above}, which docs/structure.md has above it"


def test_no_test_module_imports_from_another() -> None:
    tests = ROOT / "tests"
    modules = [node for folder in ("unit", "integration") for node in (tests / folder).glob("*.py")]
    for file in modules:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not re.match(r"tests\.(unit|integration)\.", node.module), file


def test_a_module_s_name_tells_where_a_class_is() -> None:
    """The name of a public class occurs once, so that it says where the class is."""
    modules = [parsed(file) for file in FILES]
    names = [each.name for m in modules for each in m.body if isinstance(each, ast.ClassDef)]
    public = [name for name in names if not name.startswith("_")]
    assert {name for name in public if public.count(name) > 1} == set()


def modules_imported(file: Path, known: Collection[str]) -> Iterator[str]:
    """Yield the modules of the package that a file imports, also within functions and for types."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Return, in alphabetical order, the modules that import themselves through others."""
    reached = {name: set(others) for name, others in imports.items()}
    for between, behind in reached.items():
        for others in reached.values():
            if between in others:
                others.update(behind)
    return sorted(name for name, others in reached.items() if name in others)


PROGRAMS = sorted(
    file
    for name in ("benchmarks", "calibration", "examples")
    for file in (ROOT / name).rglob("*.py")
)
"""The programs beside the package, which nobody imports, so that a missing name would show only
when somebody runs them.
"""


def file_of(module: str, importer: Path) -> Path | None:
    """Return the file of a module of this project that a program imports, or its stub, if it has
    one; None for other modules.
    """
    for root in (importer.parent, ROOT, PACKAGE.parent):
        path = root.joinpath(*module.split("."))
        for stem, suffix in itertools.product((path, path / "__init__"), (".pyi", ".py")):
            file = stem.with_name(stem.name + suffix)
            if file.is_file():
                return file
    return None


def defined_in(file: Path) -> set[str]:
    """Return the names that a module defines or imports outside of functions, and the modules of a
    package.
    """
    names = {path.stem for path in file.parent.glob("*")} if file.stem == "__init__" else set()
    nodes = list(parsed(file).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If | ast.Try):
            nodes += [*node.body, *node.orelse]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        else:
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_program_imports_only_names_that_are_there(file: Path) -> None:
    for node in ast.walk(parsed(file)):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        source = file_of(node.module, file)
        if source is None:
            assert node.module.split(".")[0] not in {"entropykv", "benchmarks"}, node.module
            continue
        missing = {alias.name for alias in node.names} - defined_in(source)
        assert not missing, f"{node.module} lacks {', '.join(sorted(missing))}"


def test_no_modules_import_each_other() -> None:
    """Modules do not import each other in a circle, in which a reader would find no beginning."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    paths = {file: file.relative_to(PACKAGE.parent).with_suffix("").parts for file in FILES}
    known = {".".join(parts).removesuffix(".__init__"): file for file, parts in paths.items()}
    del known["entropykv"]  # This module imports everything that is public.
    imports = {name: {*modules_imported(file, known)} & {*known} for name, file in known.items()}
    assert circles(imports) == []


CPP = ROOT / "cpp"

BY_INSTRUCTION_SET = {"kernels", "products", "platform"}
"""Folders whose files are compiled once per instruction set, so a class may exist several times."""

WRAPPED = {"DeviceStore", "FlatStore", "HeadwiseStore"}
"""Python classes that wrap the C++ class of the same name."""

CPP_FILES = sorted([*CPP.rglob("*.hpp"), *CPP.rglob("*.cpp")])
each_file = pytest.mark.parametrize("file", CPP_FILES, ids=lambda f: f.relative_to(CPP).as_posix())


@functools.cache
def folders() -> list[str]:
    """Return the folders in the picture of docs/structure.md, the highest first."""
    picture = PICTURE.read_text(encoding="utf-8").split("\ncpp/\n")[1].split("```")[0]
    return re.findall(r"^  ([a-z]+)/ ", picture, flags=re.MULTILINE)


def test_the_picture_has_all_folders_of_cpp() -> None:
    assert set(folders()) == {file.parent.name for file in CPP_FILES}


@each_file
def test_a_folder_includes_those_below_it(file: Path) -> None:
    order = folders()
    included = re.findall(
        r'^#include "(\w+)/', file.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    above = [name for name in included if order.index(name) < order.index(file.parent.name)]
    assert not above, f"{file.name} includes {above}, which docs/structure.md has above it"


def test_differences_compares_all_numbers_of_ggml_that_are_used() -> None:
    """The C++ function differences() compares every operation and type of ggml that cpp/llama
    names with the loaded library, in which they may have other numbers.
    """
    named = re.compile(r"GGML_(?:GLU_)?(?:OP|TYPE)_(?!COUNT)[A-Z0-9_]+")
    texts = {file.name: file.read_text(encoding="utf-8") for file in CPP_FILES}
    of_ops = re.findall(r"ENTROPYKV_OP\((\w+)\)", texts["built_for.cpp"])
    compared = {*named.findall(texts["built_for.cpp"]), *(f"GGML_OP_{op}" for op in of_ops)}
    used = {name for text in texts.values() for name in named.findall(text)}
    assert "GGML_OP_ROPE" in used
    assert used - compared == set()


def classes() -> Iterator[str]:
    """Yield the C++ classes that are neither nested, private to a file, nor by instruction set."""
    for file in CPP_FILES:
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
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ClassDef)
    }
    assert {name for name, n in ours.items() if n > 1} == set()
    assert set(ours) & theirs == WRAPPED
