"""Names of test modules are unique, and the map of tests/support lists every module."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SUPPORT = TESTS / "support"


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not path.stem.startswith("__"))


def test_no_two_modules_of_the_tests_have_the_same_name() -> None:
    """A name such as test_store.py belongs to one file only."""
    names = Counter(path.name for path in modules(TESTS))
    assert [name for name, count in names.items() if count > 1] == []


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring, without a full stop, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).rstrip(".:")


@pytest.mark.parametrize("path", modules(SUPPORT), ids=lambda path: path.stem)
def test_the_map_of_support_modules_says_what_each_gives(path: Path) -> None:
    """tests/support/README.md repeats the first sentence of every module's docstring."""
    name = path.relative_to(SUPPORT).as_posix()
    assert f"| `{name}` | {summary(path)} |" in (SUPPORT / "README.md").read_text(encoding="utf-8")


def test_the_map_of_support_modules_lists_nothing_that_is_gone() -> None:
    text = (SUPPORT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\S+\.py)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(
        path.relative_to(SUPPORT).as_posix() for path in modules(SUPPORT)
    )
