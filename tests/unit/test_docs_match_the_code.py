"""Texts of the repository have links that work, and describe the code as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from entropykv.cli.llama_flags import FLAGS
from entropykv.model.architectures import checked_architectures
from tests.support.guide import GUIDE, blocks_of

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md")]
"""Pages that mkdocs does not check; it checks links within docs/."""
INSIDE = [*ROOT.glob("docs/**/*.md")]
MOST_WORDS = 600
REASON = re.compile(r"^<!-- not run: .+ -->$", re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", INSIDE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_the_docs_lead_to_files_of_the_repository(page: Path) -> None:
    """Links of the docs lead to files, because readers of the repository see no generated pages."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://", "#")):
            assert (page.parent / link.partition("#")[0]).exists(), link


def test_pages_of_the_guide_are_short() -> None:
    words = {
        page.name: len(page.read_text(encoding="utf-8").split()) for page in GUIDE.glob("*.md")
    }
    assert {name: n for name, n in words.items() if n > MOST_WORDS} == {}


def test_files_that_the_code_names_are_there() -> None:
    sources = [*ROOT.glob("python/**/*.py"), *ROOT.glob("cpp/**/*.[ch]pp")]
    named = {
        name
        for file in sources
        for name in re.findall(r"docs/[\w/.-]+\.md", file.read_text(encoding="utf-8"))
    }
    assert named
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def test_what_the_guide_does_not_run_has_a_reason() -> None:
    """Every reason not to run a block stands directly before a block, where it has an effect."""
    for page in GUIDE.glob("*.md"):
        reasons = [block for block in blocks_of(page) if block.reason is not None]
        assert len(reasons) == len(REASON.findall(page.read_text(encoding="utf-8"))), page.name


def test_decisions_are_listed() -> None:
    records = {path.name for path in (ROOT / "docs/decisions").glob("0*.md")}
    index = (ROOT / "docs/decisions/index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((0[\w-]+\.md)\)", index)) == records


def test_the_version_stands_once() -> None:
    """The newest section of the changelog is that of pyproject.toml's version."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.findall(r'^version = "(.+)"$', project, flags=re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([\d.]+)", changes, flags=re.MULTILINE)[:1] == version


def test_pages_of_the_reference_come_from_the_code() -> None:
    """The generated pages of the reference list what the code has; another process makes them."""
    pytest.importorskip("mkdocs")
    script = (
        "import sys; sys.path.insert(0, 'docs'); import generated_pages as pages; "
        "print(pages.options_page()); print(pages.formats_page()); "
        "print(pages.flags_page()); print(pages.architectures_page())"
    )
    result = subprocess.run(
        [sys.executable, "-B", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "## entropykv serve" in result.stdout
    assert "`--kv-budget` `B`" in result.stdout
    assert "| `head_entropies` | object |" in result.stdout
    assert "| llama-server | `entropykv serve` |" in result.stdout
    assert all(f"`{' '.join(flag.names)}`" in result.stdout for flag in FLAGS)
    assert all(f"| {row.architecture} " in result.stdout for row in checked_architectures().rows)
    assert "after `make docs`. `entropykv run`" not in result.stdout
