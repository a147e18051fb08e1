"""A test that leaves a file outside of its temporary folder fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, files_of_the_tree


@pytest.mark.parametrize(
    ("line", "code"), [("(tmp_path / 'x').touch()", 0), ("open('stray', 'w').close()", 1)]
)
def test_it_is_named(tmp_path: Path, line: str, code: int) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(f"def test_it(tmp_path):\n    {line}\n", encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", file],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert ("left files outside" in result.stdout) == bool(code)
    assert (str(here / "stray") in result.stdout) == bool(code)


def test_the_whole_tree_is_looked_at_but_for_what_tools_write() -> None:
    found = files_of_the_tree()
    assert {
        str(ROOT / "Makefile"),
        str(ROOT / "cpp" / "attention" / "attention.cpp"),
        __file__,
    } <= found
    assert not any("/.git/" in path or "/__pycache__/" in path for path in found)
