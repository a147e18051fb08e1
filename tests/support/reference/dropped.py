"""Remember the scores of entries that a KV head has dropped, as its losses need them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.support.reference.values import Floats


@dataclass
class DroppedScores:
    """Hold the scores of dropped entries, each as it was before any decay."""

    undecayed: Floats = field(default_factory=lambda: np.zeros(0))
    decayed_by: float = 1.0

    def add(self, scores: Floats) -> None:
        """Add the scores of newly dropped entries; zero scores are left out."""
        self.undecayed = np.append(self.undecayed, scores[scores > 0.0] / self.decayed_by)

    def decay(self, factor: float) -> None:
        """Multiply all scores by a factor; 0 forgets them."""
        self.decayed_by *= factor
        if factor == 0.0:
            self.undecayed, self.decayed_by = np.zeros(0), 1.0

    def scores(self) -> Floats:
        """Return the current scores; those of one octave are all returned as their mean."""
        octaves = np.floor(np.log2(self.undecayed))
        means = [self.undecayed[octaves == octave].mean() for octave in octaves]
        return np.array(means) * self.decayed_by
