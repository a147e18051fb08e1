"""Freeze entries, restore them, and list them."""

from __future__ import annotations

from entropykv import Session


def frozen_entries(session: Session) -> list[list[int]]:
    core = session._slot.store.core  # type: ignore[attr-defined]
    return [
        core.frozen_positions(layer, head).tolist()
        for layer, heads in enumerate(session.cache.budgets())
        for head in range(len(heads))
    ]


def freeze_and_restore(session: Session) -> None:
    """Freeze all entries of a session, and restore them."""
    core = session._slot.store.core  # type: ignore[attr-defined]
    n = core.entries
    core.freeze_all(session.position - 1)
    assert (core.entries, core.frozen) == (0, n)
    assert core.restore(session.position - 1) == n
    assert (core.entries, core.frozen) == (n, 0)
