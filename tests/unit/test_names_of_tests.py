"""Names of test modules are unique, the map of tests/support lists every module, and tests leave no
files behind.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT, files_of_the_tree

TESTS = Path(__file__).parents[1]
SUPPORT = TESTS / "support"


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not path.stem.startswith("__"))


def test_no_two_modules_of_the_tests_have_the_same_name() -> None:
    names = Counter(path.name for path in modules(TESTS))
    assert [name for name, count in names.items() if count > 1] == []


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring, without a full stop, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).rstrip(".:")


@pytest.mark.parametrize("path", modules(SUPPORT), ids=lambda path: path.stem)
def test_the_map_of_support_modules_says_what_each_gives(path: Path) -> None:
    """tests/support/README.md repeats the first paragraph of every module's docstring."""
    name = path.relative_to(SUPPORT).as_posix()
    assert f"| `{name}` | {summary(path)} |" in (SUPPORT / "README.md").read_text(encoding="utf-8")


def test_the_map_of_support_modules_lists_nothing_that_is_gone() -> None:
    text = (SUPPORT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\S+\.py)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(
        path.relative_to(SUPPORT).as_posix() for path in modules(SUPPORT)
    )


def test_only_a_file_outside_of_the_temporary_folder_is_named(tmp_path: Path) -> None:
    files = [tmp_path / "test_inside.py", tmp_path / "test_outside.py"]
    lines = "(tmp_path / 'x').touch()", "open('stray', 'w').close()"
    for file, line in zip(files, lines, strict=True):
        file.write_text(f"def test_it(tmp_path):\n    {line}\n", encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *files],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "2 passed, 1 error" in result.stdout
    assert f"left files outside of their temporary folders: {here / 'stray'}\n" in result.stdout


def test_the_whole_tree_is_looked_at_but_for_what_tools_write() -> None:
    found = files_of_the_tree()
    assert {
        str(ROOT / "Makefile"),
        str(ROOT / "cpp" / "attention" / "attention.cpp"),
        __file__,
    } <= found
    assert not any("/.git/" in path or "/__pycache__/" in path for path in found)
