"""Sum up the losses of a model's KV heads in texts that are read twice, to make a profile.

Inside a budget, queries can no longer attend to entries that a head has dropped. But the chunk that
is being read is complete, and its repetition attends to what a model needs to reproduce it. Policy
`adaptive` measures anyway what a head would lose of that attention with fewer entries. The means
over several texts are loss curves, which later sessions start with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from entropykv.profile.curves import CurveRules, LossCurves

LENGTH = 2048
"""The length of text in tokens that the curves are scaled to; measurements are relative to a text's
length.
"""

Floats = npt.NDArray[np.float64]


class Lessons:
    """Hold sums over the tokens of all texts that were read twice."""

    def __init__(self, n_layer: int, n_head: int, n_head_kv: int) -> None:
        """Take the numbers of layers, and of query and KV heads per layer."""
        self._rules = CurveRules.for_length(LENGTH)
        self._shape = (n_layer, n_head_kv)
        self._losses = np.zeros((n_layer * n_head_kv, len(self._rules.keep)))
        self._entropies = np.zeros((n_layer, n_head))
        self.n_tokens = 0
        """How many tokens were read twice."""

    def add(
        self, n_tokens: int, end: int, knots: Floats, losses: Floats, entropies: Floats
    ) -> None:
        """Add the measurements of `n_tokens` tokens of a text; the last one is at position `end` -
        1.

        `losses`: (KV heads, knots), for `knots` entries beyond the protected ones; `entropies`: the
        mean over rows for every query head in bits, (n_layer, n_head).
        """
        inside = knots < end
        beyond = [*knots[inside].tolist(), float(end)]  # Keeping everything loses nothing.
        shares = np.array(self._rules.keep) / LENGTH * end
        for head, of_head in enumerate(losses[:, inside]):
            self._losses[head] += n_tokens * np.interp(shares, beyond, [*of_head.tolist(), 0.0])
        self._entropies += n_tokens * entropies
        self.n_tokens += n_tokens

    def entropies(self) -> Floats:
        """Return the mean entropy of every query head in bits, (n_layer, n_head)."""
        means: Floats = self._entropies / max(self.n_tokens, 1)
        return means

    def curves(self) -> LossCurves:
        """Return the loss curves; errors are relative to the largest one, and mass is not
        measured.
        """
        rules, shape = self._rules, (*self._shape, len(self._rules.keep))
        errors = np.sqrt(self._losses / (self._losses.max() or 1.0)).reshape(shape)
        return LossCurves(
            length=rules.length,
            queries=rules.queries,
            n_sinks=rules.n_sinks,
            recent_window=rules.recent_window,
            n_texts=1,
            keep=rules.keep,
            mass_lost=np.zeros(shape),
            output_error=errors,
        )


def uniform_heads(shapes: Sequence[tuple[int, int]]) -> tuple[int, int, int] | None:
    """Return the numbers of layers, and of query and KV heads per layer; None if layers differ.

    `shapes`: query and KV heads of every attention layer.
    """
    return (len(shapes), *shapes[0]) if len(set(shapes)) == 1 else None
