"""Read the code blocks of a page of the guide, and run them as a reader would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from entropykv.model.shipped import DEMOS
from tests.support.running_server import Server

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"
SHOWN_URL = "http://127.0.0.1:8000"
"""The address of the server in the guide, which the test replaces by one with a free port."""

TEXT_BYTES = 1800
"""The bytes of a text that fit into the context of the shipped model."""

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Hold one code block of a page, and the reason if it is not run."""

    language: str
    code: str
    reason: str | None

    @property
    def served(self) -> list[str] | None:
        """Return the arguments of `entropykv serve` if the block starts a server, else None."""
        words = shlex.split(self.code) if self.language == "bash" else []
        return words[2:] if words[:2] == ["entropykv", "serve"] else None


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the code blocks of a page in order."""
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(match["language"], match["code"], match["reason"])


class Reader:
    """Run the blocks of a page in a folder that has a model and a text."""

    def __init__(self, folder: Path, model: Path = DEMOS["bitnet"].path) -> None:
        """Put the files that the guide names into the folder."""
        self._folder = folder
        self._server: Server | None = None
        (folder / "model.gguf").symlink_to(model)
        (folder / "models").mkdir()
        (folder / "models" / "bitnet.gguf").symlink_to(model)
        text = (ROOT / "examples" / "lighthouse.txt").read_bytes()[:TEXT_BYTES]
        (folder / "long.txt").write_bytes(text)
        for name in ("book.txt", "a.txt", "b.txt"):
            (folder / name).write_bytes(text)
        command = folder / "bin" / "entropykv"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m entropykv.cli "$@"\n')
        command.chmod(0o755)

    def type(self, block: Block) -> None:
        """Run a block to its end, or start the server that it names; a failure shows the output."""
        if block.served is not None:
            self.close()
            files = ("-m", "--models-dir")
            words = zip(["", *block.served], block.served, strict=False)
            given = [self._folder / word if before in files else word for before, word in words]
            self._server = Server(*given, "-t", 1, model=None, usual=())
            return
        code = block.code.replace(SHOWN_URL, self._server.url if self._server else SHOWN_URL)
        shell = ["bash", "-euo", "pipefail", "-c"]
        result = subprocess.run(
            [*(shell if block.language == "bash" else [sys.executable, "-c"]), code],
            cwd=self._folder,
            env={**os.environ, "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{code}\n{result.stdout}"

    def close(self) -> None:
        """Stop the server, if one runs."""
        if self._server is not None:
            self._server.end()
        self._server = None
