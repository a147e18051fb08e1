"""Count the climbs of the recovery ladder."""

from __future__ import annotations

from dataclasses import dataclass

from entropykv.session.recovery import Climb


@dataclass
class ClimbCounts:
    """Hold the number of climbs of each rung."""

    soft: int = 0
    window: int = 0
    full: int = 0
    rewalk: int = 0
    restored: int = 0
    """The number of entries that all climbs restored."""

    def note(self, climb: Climb) -> None:
        """Add a climb to the counts."""
        name = climb.rung.name.lower()
        setattr(self, name, getattr(self, name) + 1)
        self.restored += climb.restored
