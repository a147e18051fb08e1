"""Run `entropykv eval` in the process of the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from entropykv.cli import main


class Command:
    """Run `entropykv eval` on one model in this process."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._options = ["eval", "-m", str(model), "-t", "1"]
        self._json = folder / "result.json"

    def code(self, *options: object) -> int:
        return main([*self._options, *map(str, options), "--json", str(self._json)])

    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._json.read_text(encoding="utf-8"))
        return content

    def rows(self, *options: object) -> list[dict[str, Any]]:
        assert self.code(*options) == 0
        rows: list[dict[str, Any]] = self.result()["rows"]
        return rows


PHRASES = ["the and of ", "to in on at. ", "The end, then another. ", "Is it an ocean? ", "of the "]


def words(seed: int, n: int) -> str:
    return "".join(np.random.default_rng(seed).choice(PHRASES, n // 3))


SHORT = ("--prompt", 120, "--continuation", 20, "--greedy", 10)


def write_texts(folder: Path) -> list[Path]:
    """Write three different texts of about 400 words each, and return their paths."""
    files = [folder / f"{number}.txt" for number in range(3)]
    for number, file in enumerate(files):
        file.write_text(words(number, 400), encoding="utf-8")
    return files
