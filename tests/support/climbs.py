"""Count how often the recovery ladder was climbed."""

from __future__ import annotations

from dataclasses import dataclass

from entropykv.session.recovery import Climb


@dataclass
class ClimbCounts:
    """Count the climbs of every rung."""

    soft: int = 0
    window: int = 0
    full: int = 0
    rewalk: int = 0
    restored: int = 0
    """How many entries these climbs restored."""

    def note(self, climb: Climb) -> None:
        """Count a climb."""
        name = climb.rung.name.lower()
        setattr(self, name, getattr(self, name) + 1)
        self.restored += climb.restored
