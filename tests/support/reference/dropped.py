"""What a KV head has dropped, as far as its losses know it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.support.reference.values import Floats


@dataclass
class DroppedScores:
    """Scores of dropped entries, each as it was when nothing had decayed yet."""

    undecayed: Floats = field(default_factory=lambda: np.zeros(0))
    decayed_by: float = 1.0

    def add(self, scores: Floats) -> None:
        """Entries of these scores were dropped; one that is worth nothing is forgotten."""
        self.undecayed = np.append(self.undecayed, scores[scores > 0.0] / self.decayed_by)

    def decay(self, factor: float) -> None:
        """All scores shrink by a factor; by 0, to nothing."""
        self.decayed_by *= factor
        if factor == 0.0:
            self.undecayed, self.decayed_by = np.zeros(0), 1.0

    def scores(self) -> Floats:
        """Return the scores now, those of an octave all as their mean."""
        octaves = np.floor(np.log2(self.undecayed))
        means = [self.undecayed[octaves == octave].mean() for octave in octaves]
        return np.array(means) * self.decayed_by
