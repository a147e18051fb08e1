"""Draw figures into the file that --plot names."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entropykv.errors import SettingsError

SUFFIXES = (".png", ".svg")


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise SettingsError if no plot can be written to the path."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise SettingsError(f"{path}: a plot is a {' or '.join(SUFFIXES)} file; name it so")
    if not Path(path).resolve().parent.is_dir() or Path(path).is_dir():
        raise SettingsError(f"{path}: cannot be written; give a file in an existing directory")
    check_matplotlib()


def check_matplotlib() -> None:
    """Raise SettingsError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("plots need matplotlib; install it with: pip install 'entropykv[plot]'")


def draw(figure: Callable[[], Any], path: str | os.PathLike[str]) -> None:
    """Write a figure of report/figures.py; raises SettingsError if the file cannot be written."""
    check_plot(path)
    try:
        figure().savefig(path, dpi=120)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give a file that can be written") from None
