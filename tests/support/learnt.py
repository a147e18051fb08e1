"""Give a test a cache directory of its own, where what it learns is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from entropykv import system
from entropykv.profile.learnt import LearntFile, LearntPredictor

VARIABLES = ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME")
"""What cache directories depend on, on Linux, Windows and macOS."""


def own_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let this process and its children learn, and keep what they learn below `folder`; returns the
    folder of the files.
    """
    monkeypatch.delenv("ENTROPYKV_LEARN")
    for name in VARIABLES:
        monkeypatch.setenv(name, str(folder))
    return system.cache_folder() / "learnt"


def kept_in(folder: Path) -> LearntPredictor:
    """Return the only predictor that was kept in a folder."""
    (path,) = folder.glob("*.json")
    found = LearntFile(path).read()
    assert found is not None
    return found
