"""Make headwise stores by hand, without a model."""

from __future__ import annotations

from entropykv import _core
from tests.support.reference import Rules

MAX_TOKENS = 96
MAX_ENTRIES = 400
N_SINKS = 3
RECENT = 6
# Three layers whose entries differ in size, so that their pages hold 16 entries and more.
SHAPES = ((4, 2, 32, 32), (2, 1, 48, 64), (3, 3, 16, 20))
LAYERS = [_core.LayerShape(*shape) for shape in SHAPES]
HEADS = [(layer, head) for layer, shape in enumerate(SHAPES) for head in range(shape[1])]


def pages_of(budgets: list[int], kv_type: str) -> int:
    _, per_page = _core.page_geometry(LAYERS, kv_type)
    return sum(
        _core.pages_for(budget, per_page[layer])
        for (layer, _), budget in zip(HEADS, budgets, strict=True)
    )


def importance_of(rules: Rules) -> _core.ImportanceSettings:
    return _core.ImportanceSettings(
        getattr(_core.ScoreKind, rules.score),
        decay=rules.decay,
        observation_window=rules.observation_window,
        by_values=rules.by_values,
        expected_lookups=rules.expected_lookups,
    )
