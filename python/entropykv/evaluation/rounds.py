"""Tell whether repeated measurements of the same thing agree; on a busy machine they do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST = 0.2
"""The largest acceptable disagreement; if rounds differ more, the machine was probably busy."""


def disagreement(measured: Sequence[float]) -> float:
    """Return by what share the largest of `measured` exceeds the smallest; 0 if there are none."""
    return max(measured) / min(measured) - 1.0 if measured else 0.0


def disagreement_note(disagreements: Iterable[float]) -> str | None:
    """Return a warning for the user if some rounds disagree by more than MOST, else None."""
    worst = max(disagreements, default=0.0)
    if worst <= MOST:
        return None
    return (
        f"rounds disagree by up to {worst:.0%}: something else kept the machine busy; measure "
        "again while it is idle before you compare speeds"
    )
