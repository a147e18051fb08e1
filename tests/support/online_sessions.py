"""List policies whose budgets follow the text, and check the invariants of their sessions."""

from __future__ import annotations

import pytest

from entropykv import Session

ONLINE = ("adaptive", "layer", "layer-range")
BY_LAYER = ("layer", "layer-range")
each_policy = pytest.mark.parametrize("policy", ONLINE)


def check(session: Session) -> None:
    """Assert that budgets hold, and that a policy by layer keeps equal entries in a layer."""
    stats = session.stats()
    assert stats.kv_bytes_now <= stats.kv_bytes_peak
    assert stats.kv_bytes_now <= stats.kv_bytes_budget
    for layer, budgets in enumerate(session.cache.budgets()):
        kept = [session.cache.entries(layer, head).tolist() for head in range(len(budgets))]
        assert all(len(k) <= budget for k, budget in zip(kept, budgets, strict=True))
        if session.config.policy.name in BY_LAYER:
            assert len(set(budgets)) == 1
            assert all(positions == kept[0] for positions in kept)


def are_equal(session: Session) -> bool:
    return len({budget for layer in session.cache.budgets() for budget in layer}) == 1
