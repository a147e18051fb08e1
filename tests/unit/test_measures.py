"""The tables of measures and of KV types are consistent, and unknown names are refused."""

from __future__ import annotations

import pytest

from entropykv import _core
from entropykv.errors import SettingsError
from entropykv.policy.policy import MEASURES, Importance
from entropykv.settings.options import KV_TYPES

UNKNOWN = 99
SHAPE = _core.LayerShape(2, 1, 32, 32)


def store_by(kind: _core.ScoreKind) -> _core.HeadwiseStore:
    importance = _core.ImportanceSettings(kind)
    return _core.HeadwiseStore([SHAPE], "f16", importance, 4, 4, 16, 64, 1)


def test_every_measure_has_a_row() -> None:
    for measure in _core.measures():
        assert measure.kind == getattr(_core.ScoreKind, measure.name)
        assert measure.summary
        store_by(measure.kind)
    by_position = [measure.name for measure in _core.measures() if measure.by_position]
    assert by_position == ["streaming", "recency"]
    assert {measure.name for measure in _core.measures()} == {*MEASURES, *by_position}


def test_what_a_measure_means_is_not_guessed() -> None:
    """Properties of measures that Python also knows equal those of the C++ table."""
    facts = {m.name: (m.adds_up, m.of_echoes) for m in _core.measures()}
    assert facts == {
        "streaming": (False, False),
        "recency": (False, False),
        "mass": (True, False),
        "attention": (True, False),
        "products": (True, False),
        "reconstruct": (False, True),
        "predicted": (False, False),
    }
    assert [m.name for m in _core.measures() if m.predicts] == ["predicted"]
    assert Importance("products", ()).threshold == 0.5
    assert Importance("attention", ()).threshold == 1.0


def test_an_unknown_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="a measure of importance that does not exist"):
        store_by(_core.ScoreKind(UNKNOWN))
    with pytest.raises(SettingsError, match="there is no measure 'weight' of importance"):
        Importance.parse("weight")


@pytest.mark.parametrize("name", [m.name for m in _core.measures() if not m.by_position])
def test_the_flat_store_ranks_by_position_alone(name: str) -> None:
    with pytest.raises(ValueError, match="ranks entries by position alone"):
        _core.plan_flat_eviction([0, 1, 2], 2, getattr(_core.ScoreKind, name), 1, 1)


def test_an_unknown_type_is_refused() -> None:
    for kv_type in KV_TYPES:
        assert _core.page_geometry([SHAPE], kv_type)[0] > 0
    with pytest.raises(ValueError, match="kv_type must be f16 or q8_0 or q8_0/iq4_nl, not q4_0"):
        _core.page_geometry([SHAPE], "q4_0")
