"""Define when frozen entries are restored because the output becomes uncertain, and how many.

The ladder itself is in session/recovery.py: Metinov et al., "Adaptive Soft Rolling KV Freeze with
Entropy-Guided Recovery", section 3.6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from entropykv.errors import SettingsError
from entropykv.settings.options import check_declared, option


class Rung(IntEnum):
    """Name how much is restored from cold storage; each rung restores more than the one before."""

    NONE = 0
    SOFT = 1
    """Restore frozen entries that would stay frozen for more than one further step."""
    WINDOW = 2
    """Restore all entries that were frozen within the last Recovery.window steps."""
    FULL = 3
    """Restore all frozen entries, and forget their timers."""
    REWALK = 4
    """Restore everything as FULL does, then generate the last tokens again."""


RUNGS = {rung.name.lower(): rung for rung in Rung if rung}
"""The rungs by the names that options have for them."""
WITHOUT_REWALK = tuple(name for name, rung in RUNGS.items() if rung is not Rung.REWALK)
"""The rungs where tokens that were written cannot be taken back."""


@dataclass(frozen=True)
class Recovery:
    """Hold when the ladder is climbed, and how far; raises SettingsError for impossible values.

    A token is a spike if the entropy of the distribution after it, or -log2 of its top probability,
    smoothed over about `smooth` tokens, is more than `deviations` deviations above its running
    mean. Nothing counts before `warm_up` tokens. Mean and deviation give a new token the weight 1 /
    `memory` (exponential decay; a plain mean for the first tokens). A value above the limit counts
    as the limit, so that a spike hardly changes them, whereas a new level soon does.

    Each spike climbs one rung, up to `highest`, but not within `refractory` tokens after a climb,
    so that its effect can show. After every `calm` tokens without a spike, the ladder descends by
    one rung. `window`: the last steps whose frozen entries a window reset restores. `rewalk`: how
    many tokens a rewalk generates again, and therefore are held back; 0 never generates any again.
    """

    deviations: float = option(
        3.0,
        "deviations above the running mean that count as a spike",
        "--recovery-deviations",
        metavar="D",
        kind=float,
    )
    smooth: int = option(4, "tokens over which uncertainty is smoothed", least=1)
    warm_up: int = option(16, "tokens before which nothing counts", least=2)
    memory: int = option(128, "tokens whose mean and deviation count", least=2)
    refractory: int = option(4, "tokens after a climb during which no other climb is made", least=0)
    calm: int = option(32, "tokens without a spike after which the ladder goes down", least=1)
    window: int = option(
        64,
        "newest steps that a window reset restores",
        "--recovery-window",
        metavar="N",
        kind=int,
        least=1,
    )
    rewalk: int = option(
        8, "tokens that a rewalk writes again", "--rewalk", metavar="K", kind=int, least=0
    )
    highest: Rung = Rung.REWALK

    def __post_init__(self) -> None:
        """Check every value."""
        if not 0.0 < self.deviations < math.inf:
            raise SettingsError(
                f"deviations cannot be {self.deviations}; use a number above 0, such as 3"
            )
        check_declared(self)
        if not isinstance(self.highest, Rung) or self.highest is Rung.NONE:
            rungs = ", ".join(f"Rung.{rung.name}" for rung in Rung if rung)
            raise SettingsError(f"highest cannot be {self.highest!r}; use one of {rungs}")

    @property
    def top(self) -> Rung:
        """Return the highest rung in use; a REWALK of 0 tokens does not count."""
        return self.highest if self.rewalk else min(self.highest, Rung.FULL)

    @property
    def held_back(self) -> int:
        """Return how many tokens a rewalk may replace; they are held back until they are
        certain.
        """
        return self.rewalk if self.top is Rung.REWALK else 0
