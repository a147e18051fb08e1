"""Share budgets per layer by the entropy of its attention in this text: Kim and Jung 2025.

Heekyum Kim and Yuchul Jung: *Entropy-Guided KV Caching for Efficient LLM Inference*. Mathematics
2025, 13(15), 2366, https://doi.org/10.3390/math13152366. Layer l gets k_l = floor(B * I_l / sum I),
where I_l is the mean entropy of its heads. Half of k_l keeps the positions with most attention from
all queries and heads of the layer, the other half sinks and the newest tokens: own_windows() in
policy/plan.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entropykv import _core
from entropykv.policy.online import Floats, OnlineBudgets, StoreReadings
from entropykv.policy.plan import HeadwisePlan, by_layer
from entropykv.policy.policy import BudgetRule

LAYER_RANGE = (8, 128)
"""The budgets in entries of the layers with the lowest and the highest entropy, as in the paper."""
MOST_BITS = 32
"""The largest possible entropy of a row in bits, since it has fewer than 2^32 entries."""


class LayerEntropies(OnlineBudgets):
    """Compute budgets per layer from the mean entropy of its query heads in the text so far.

    Budgets are computed from the entropies up to the micro-batch after which they last changed. By
    the rule LAYER_ENTROPY, they are in proportion to the entropy; by the rule LAYER_RANGE, they lie
    between a least and a largest budget. In either case they are scaled to the total budget, which
    is a hard limit.
    """

    tracks_entropies = True

    def __init__(
        self,
        store: StoreReadings,
        layers: Sequence[_core.LayerShape],
        n_ctx: int,
        rule: BudgetRule,
    ) -> None:
        """Read entropies from a store. `rule`: LAYER_ENTROPY or LAYER_RANGE; see
        online_budgets().
        """
        self._store = store
        self._layers = layers
        self._n_ctx = n_ctx
        self._in_range = rule is BudgetRule.LAYER_RANGE
        self._seen: Floats
        self._followed: Floats
        self.forget()

    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:
        """Add the entropies of a micro-batch; budgets follow them at once if `budgets_change`."""
        layers = range(len(self._layers))
        means = [self._store.row_entropies(layer).mean(dtype=np.float64) for layer in layers]
        self._seen += n_tokens * np.array([1.0, *means])
        if budgets_change:
            self._followed = self._seen.copy()

    def observe_again(self) -> None:
        """Let budgets follow all entropies that were added. An echo adds none: only the queries of
        the text itself count.
        """
        self._followed = self._seen.copy()

    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Return the budget of every KV head in entries, layer by layer; the heads of a layer get
        the same. None before anything was observed.
        """
        rows, sums = self._followed[0], self._followed[1:]
        if rows == 0:
            return None
        weights = layer_weights(sums / rows, in_range=self._in_range)
        of_heads = [
            weight
            for weight, shape in zip(weights, self._layers, strict=True)
            for _ in range(shape.n_head_kv)
        ]
        shares = _core.share_budget(
            plan.mean_entries,
            self._n_ctx,
            plan.floor_entries,
            plan.entries_per_page,
            of_heads,
            plan.limits,
        )
        return [min(layer) for layer in by_layer(shares, self._layers) for _ in layer]

    def forget(self) -> None:
        """Forget all entropies, because another text begins."""
        self._seen = np.zeros(1 + len(self._layers))
        self._followed = self._seen.copy()

    def state(self) -> Floats:
        """Return the number of rows and the sum of entropies of each layer: first for all rows,
        then for those that the budgets follow: (2 * (1 + layers),).
        """
        return np.concatenate([self._seen, self._followed])

    def problem(self, state: Floats) -> str | None:
        """Return why sums do not fit the layers or are impossible; None if they are valid."""
        right_size = state.size == self._seen.size + self._followed.size
        if not right_size or not np.isfinite(state).all():
            return "entropies that cannot be"
        seen, followed = np.split(state, 2)
        for sums in (seen, followed):
            if not np.all((sums >= 0.0) & (sums <= MOST_BITS * sums[0])):
                return "entropies that cannot be"
        return None if np.all(followed <= seen) else "entropies that cannot be"

    def load(self, state: Floats) -> None:
        """Load what state() returned."""
        self._seen, self._followed = (half.copy() for half in np.split(state, 2))


def layer_weights(entropies: Floats, *, in_range: bool) -> list[float]:
    """Return weights of layers by their mean entropies in bits, (layers,): the entropies, or if
    `in_range`, numbers within LAYER_RANGE; equal weights if all entropies are 0.
    """
    weights = entropies
    if in_range:
        low, high = entropies.min(), entropies.max()
        span = (entropies - low) / (high - low) if high > low else np.ones_like(entropies)
        weights = LAYER_RANGE[0] + (LAYER_RANGE[1] - LAYER_RANGE[0]) * span
    return (weights if weights.sum() > 0.0 else np.ones_like(weights)).tolist()  # type: ignore[no-any-return]
