"""Provide sessions of a tiny model that freeze, and the invariants of such sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entropykv import BudgetError, Freezing, Session
from tests.support.freeze_and_restore import frozen_entries
from tests.support.saved_sessions import all_entries


def session_of(path: Path, **options: Any) -> Session:
    defaults = {"n_ctx": 512, "kv_budget": 96, "n_ubatch": 64, "n_threads": 1, "freeze": "ram"}
    return Session(path, **{**defaults, "policy": "uniform", **options})


def where(place: str, directory: Path) -> str:
    return "ram" if place == "ram" else f"disk:{directory}"


def cold_file(directory: Path) -> Path:
    (path,) = directory.glob("*.cold")
    return path


def least_limit(path: Path, **options: Any) -> int:
    """Return the smallest freeze limit in bytes, which the error for a smaller one names."""
    with pytest.raises(BudgetError, match=r"--freeze-limit \d+B or more") as refused:
        session_of(path, freeze=Freezing(limit=1), **options)
    return int(str(refused.value).split("--freeze-limit ")[1].split("B")[0])


def check_all_is_there(session: Session) -> None:
    """Assert that active, frozen and evicted entries are all that was read, without duplicates."""
    stats = session.stats()
    assert stats.entries_kept + stats.frozen_entries + stats.evictions == stats.entries_full
    for active, frozen in zip(all_entries(session), frozen_entries(session), strict=True):
        assert not set(active) & set(frozen)
        if stats.evictions == 0:
            assert sorted([*active, *frozen]) == list(range(session.position))
