"""Make and find files of frozen entries, and list what a directory holds."""

from __future__ import annotations

import os
from pathlib import Path

from entropykv.store.cold import ColdFile

MODEL = {"architecture": "llama", "n_vocab": 5}


def create(directory: Path) -> ColdFile:
    return ColdFile.create(directory, 8192, MODEL)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))
