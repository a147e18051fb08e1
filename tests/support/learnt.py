"""Give a test a cache directory of its own, and show what a session learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from entropykv import Session, system
from entropykv.profile.learnt import LearntFile, LearntPredictor
from entropykv.session import second_readings
from entropykv.session.second_readings import PredictorFit
from entropykv.store.headwise import HeadwiseStore

VARIABLES = ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME")
"""The environment variables that name cache directories on Linux, Windows and macOS."""


def own_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let this process and its children learn, and keep predictors below `folder`.

    Returns the folder of the files.
    """
    monkeypatch.delenv("ENTROPYKV_LEARN")
    for name in VARIABLES:
        monkeypatch.setenv(name, str(folder))
    return system.cache_folder() / "learnt"


def need_texts(monkeypatch: pytest.MonkeyPatch, n_texts: int) -> None:
    """Let a predictor be complete after `n_texts` texts."""
    monkeypatch.setattr(second_readings, "LEAST_TEXTS", n_texts)


def kept_in(folder: Path) -> LearntPredictor:
    """Return the only predictor that was kept in a folder."""
    (path,) = folder.glob("*.json")
    found = LearntFile(path).read()
    assert found is not None
    return found


def store_of(session: Session) -> HeadwiseStore:
    store = session._slot.store
    assert isinstance(store, HeadwiseStore)
    return store


def fit_of(session: Session) -> PredictorFit:
    assert session.cache.predictor_fit is not None
    return session.cache.predictor_fit
