"""A reader who types the commands of the guide gets no error."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.guide import GUIDE, Reader, blocks_of

PAGES = sorted(GUIDE.glob("*.md"))


def stem(page: Path) -> str:
    return page.stem


WITH_TEMPLATE = "embed"
"""The page whose programs need a model with a chat template; other pages use the smallest model."""


NOT_RUN = {"documents-at-a-server", "gpu", "hub", "images", "install"}
"""Pages whose commands would change the environment, or need what this machine lacks: a GPU, the
hub, a model with a projector, object storage.
"""


def follow(page: Path, reader: Reader) -> None:
    """Run the commands of a page in their order."""
    for block in blocks_of(page):
        if block.reason is None:
            reader.type(block)


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != WITH_TEMPLATE], ids=stem)
def test_what_a_page_says_can_be_typed(page: Path, tmp_path: Path) -> None:
    with closing(Reader(tmp_path)) as reader:
        follow(page, reader)


def test_programs_with_a_chat_template_can_be_run(smollm2: Path, tmp_path: Path) -> None:
    with closing(Reader(tmp_path, smollm2)) as reader:
        follow(GUIDE / f"{WITH_TEMPLATE}.md", reader)


def test_most_pages_have_something_that_is_run() -> None:
    run = {page.stem for page in PAGES if any(block.reason is None for block in blocks_of(page))}
    assert {page.stem for page in PAGES} - run == NOT_RUN


def test_a_command_that_fails_is_shown(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nentropykv run -m missing.gguf\n```\n", encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    with closing(Reader(folder)) as reader, pytest.raises(AssertionError, match=r"missing\.gguf"):
        reader.type(next(blocks_of(page)))
