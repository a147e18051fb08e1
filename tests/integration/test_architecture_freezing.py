"""In models with windows, layers without a window freeze."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Session, SettingsError
from tests.architectures import MODELS
from tests.support.architecture_models import WINDOW, session_of, some, windowed_layers, written
from tests.support.architecture_reading import read
from tests.support.freeze_and_restore import freeze_and_restore, frozen_entries
from tests.support.logits import tokens_for


@pytest.fixture
def path(name: str, tmp_path: Path) -> Path:
    return written(MODELS[name], tmp_path)


every_kind = some(
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "jamba",
    "qwen3next",
    "bloom",
    "deepseek2",
    "kimi-linear",
)


@every_kind
def test_frozen_and_restored_is_as_never_interrupted(path: Path) -> None:
    rows: list[Any] = []
    for interrupts in (False, True):
        with session_of(path, freeze="ram", policy="uniform") as session:
            session.decode(tokens_for(150))
            if interrupts:
                freeze_and_restore_what_has_no_window(session)
            rows.append(read(session, tokens_for(70, seed=4), 64))
            for token in tokens_for(4, seed=5):
                if interrupts:
                    freeze_and_restore_what_has_no_window(session)
                rows.append(session.decode([token]))
    half = len(rows) // 2
    assert np.array_equal(np.concatenate(rows[:half]), np.concatenate(rows[half:]))


def freeze_and_restore_what_has_no_window(session: Session) -> None:
    if not windowed_layers(session):
        freeze_and_restore(session)
        return
    core = session._slot.store.core  # type: ignore[attr-defined]
    before = core.entries
    core.freeze_all(session.position - 1)
    for layer, heads in enumerate(session.cache.budgets()):
        for head in range(len(heads)):
            n_frozen = len(core.frozen_positions(layer, head))
            windowed = layer in windowed_layers(session)
            assert (n_frozen == 0) == windowed
            assert (core.count(layer, head) == 0) != windowed
    n_frozen_entries = core.frozen
    assert core.restore(session.position - 1) == n_frozen_entries
    assert (core.entries, core.frozen) == (before, 0)


@every_kind
@pytest.mark.parametrize("policy", ["rolling-freeze", "uniform"])
def test_freezing_inside_a_budget(policy: str, path: Path) -> None:
    with session_of(path, kv_budget=0.3, n_ctx=256, freeze="ram", policy=policy) as session:
        read(session, tokens_for(200), 50)
        rows = read(session, tokens_for(30, seed=5), 1)
        stats = session.stats()
        windowed = windowed_layers(session)
        frozen = iter(frozen_entries(session))
        for layer, heads in enumerate(session.cache.budgets()):
            for head in range(len(heads)):
                active = session.cache.entries(layer, head).tolist()
                both = sorted([*active, *next(frozen)])
                if layer not in windowed:
                    assert both == list(range(230))
                else:
                    assert set(both[-WINDOW + 1 :]) == set(range(231 - WINDOW, 230))
                    assert both == active
    assert np.isfinite(rows).all()
    assert stats.kv_bytes_peak <= stats.kv_bytes_budget
    assert stats.entries_frozen > 0
    assert stats.evictions == 0


@some("spark2_5")
def test_nothing_can_be_frozen_where_every_layer_has_a_window(name: str, tmp_path: Path) -> None:
    all_of_them = {"attention.sliding_window_pattern": (1, 1, 1, 1)}
    path = written(MODELS[name], tmp_path, **all_of_them)
    with session_of(path) as session:
        assert len(windowed_layers(session)) == 4
    with pytest.raises(SettingsError, match="nothing can be frozen"):
        session_of(path, freeze="ram", policy="uniform")
