"""Read texts from given files, or those that entropykv ships."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from entropykv.errors import CalibrationError
from entropykv.files import read_text

_SHIPPED = Path(__file__).parents[1] / "calibration" / "texts"


@dataclass(frozen=True)
class Text:
    """Hold a text to read, and the name of its source."""

    name: str
    content: str


def read_texts(files: Sequence[Path] | None = None) -> list[Text]:
    """Read the given files, or those that entropykv ships; raises CalibrationError that names an
    unreadable file.
    """
    paths = sorted(_SHIPPED.glob("*.txt")) if files is None else list(files)
    if not paths:
        raise CalibrationError(
            f"there are no texts in {_SHIPPED}; install entropykv again or give texts with --text"
        )
    return [Text(path.name, _read(path)) for path in paths]


def _read(path: Path) -> str:
    text = read_text(path, CalibrationError)
    if not text.strip():
        raise CalibrationError(f"{path}: is empty; give a text file")
    return text
