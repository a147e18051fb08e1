"""Tell whether measurements of the same thing agree: on a busy machine they do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST = 0.2
"""Rounds that disagree by more than this tell of the machine rather than of what was measured."""


def disagreement(measured: Sequence[float]) -> float:
    """Return by what share the largest of some times or speeds exceeds the smallest, or 0."""
    return max(measured) / min(measured) - 1.0 if measured else 0.0


def disagreement_note(disagreements: Iterable[float]) -> str | None:
    """Return the sentence for a user where some rounds disagree too much to be trusted."""
    worst = max(disagreements, default=0.0)
    if worst <= MOST:
        return None
    return (
        f"rounds disagree by up to {worst:.0%}: something else kept the machine busy; measure "
        "again while it is idle before you compare speeds"
    )
