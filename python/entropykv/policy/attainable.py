"""Limit budgets to what KV heads can hold: AttainableBudgets, and CurveBudgets, which follow a
profile.

What is dropped never returns. So if a KV head gets a larger budget than it holds entries, only
tokens that are still to come can fill it. Budgets are therefore attainable: no KV head gets more
than it holds now and will read until budgets change again; meanwhile, the other KV heads keep the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entropykv import _core
from entropykv.policy.plan import HeadwisePlan, shares_by_curves
from entropykv.policy.readings import Floats, OnlineBudgets, StoreReadings
from entropykv.profile.curves import LossCurves

_MOST_ENTRIES = 2**31 - 1
GROWTH = 1.5
"""By what factor a text is assumed to become longer than it is now.

Budgets for its present length would move to other KV heads as it grows, which by then have dropped
the entries that they should hold.
"""


class AttainableBudgets(OnlineBudgets):
    """Hold online budgets that know how many entries every KV head can hold before budgets are
    shared again.
    """

    attainable = True
    """True if no KV head may get a larger budget than the entries that it can hold."""

    def __init__(self, store: StoreReadings, layers: Sequence[_core.LayerShape]) -> None:
        """Count what the KV heads of a store hold."""
        self._store = store
        self._heads = [(i, h) for i, shape in enumerate(layers) for h in range(shape.n_head_kv)]
        self._n_heads = len(self._heads)
        self.most: list[int] = []
        """For every KV head of all layers, the most entries that it can hold before budgets are
        shared again; empty before they were shared.
        """
        self.is_due = True
        """True if the budget must be shared again before the next tokens are read."""
        self.length = 0
        """The length of the text in tokens, with the tokens that are known to follow; 0 without a
        text.
        """

    def expect_tokens(self, n_tokens: int, length: int) -> None:
        """Give no KV head more than the entries that it holds now and n_tokens more, until this is
        called again.

        `length`: that of the text in tokens, with the tokens that are known to follow.
        """
        self.most = [held + n_tokens for held in self._held()]
        self.length = length

    def holds(self, n_tokens: int) -> bool:
        """Tell whether no KV head can hold more than n_tokens entries before budgets are shared
        again.
        """
        return max(self.most, default=0) <= n_tokens

    def follows_length(self, plan: HeadwisePlan) -> bool:  # noqa: ARG002
        """Tell whether budgets would change with the length of the text alone; by default not."""
        return False

    def forget(self) -> None:
        """Forget what heads can hold, because another text begins."""
        self.most, self.is_due, self.length = [], True, 0

    def _held(self) -> list[int]:
        return [self._store.count(layer, head) for layer, head in self._heads]

    def _most_to_save(self) -> list[int]:
        """Return `most` for a saved state. If the budget must be shared before the next tokens, the
        numbers are those of the held entries instead, as negative ones.
        """
        return [-held for held in self._held()] if self.is_due else self.most

    def _are_possible(self, most: Floats) -> bool:
        """Tell whether the numbers can be the result of _most_to_save(), or are none at all."""
        are_counts = np.all(np.abs(most) <= _MOST_ENTRIES) and np.all(most % 1.0 == 0.0)
        one_sign = np.all(most >= 0.0) or np.all(most <= 0.0)
        return bool(most.size in (0, self._n_heads) and are_counts and one_sign)

    def _load_most(self, most: Floats) -> None:
        self.most = [abs(int(n)) for n in most]
        self.is_due = bool(np.all(most <= 0.0))


class CurveBudgets(AttainableBudgets):
    """Share the budget so that the loss by the curves of a profile is least, for a text GROWTH
    times as long as it is now.

    The plan shares for a text that fills the context; a shorter one needs budgets that differ less.
    """

    tracks_entropies = False

    def __init__(
        self, store: StoreReadings, layers: Sequence[_core.LayerShape], curves: LossCurves
    ) -> None:
        """Follow the curves of a profile; see online_budgets()."""
        super().__init__(store, layers)
        self._curves = curves

    def holds(self, n_tokens: int) -> bool:
        """Tell whether some KV head can hold something, and none more than n_tokens.

        It is false for an empty store, whose budgets are therefore those of the plan, which
        `entropykv plan` shows.
        """
        return 0 < max(self.most, default=0) <= n_tokens

    def follows_length(self, plan: HeadwisePlan) -> bool:
        """Tell whether budgets would change with the length of the text alone: until the assumed
        length is that of the plan.
        """
        return self._assumed_length(plan) < plan.longest

    def _assumed_length(self, plan: HeadwisePlan) -> int:
        length = max(int(GROWTH * self.length), plan.mean_entries + 1)
        return min(length, plan.longest) if self.length else plan.longest

    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:
        """Record nothing: the curves are known."""

    def budgets(self, plan: HeadwisePlan) -> list[int]:
        """Return the budget of every KV head in entries, for the smallest loss within its limit."""
        return shares_by_curves(
            self._curves,
            plan.mean_entries,
            self._assumed_length(plan),
            plan.floor_entries,
            plan.entries_per_page,
            plan.limits,
        )

    def state(self) -> Floats:
        """Return the length of the text, and the result of _most_to_save(): (1 + KV heads,)."""
        return np.array([self.length, *self._most_to_save()], np.float64)

    def problem(self, state: Floats) -> str | None:
        """Return why a state is invalid: an impossible length, or impossible numbers of entries;
        None if it is valid.
        """
        length, most = state[:1], state[1:]
        is_length = (
            length.size == 1 and 0.0 <= length[0] <= _MOST_ENTRIES and length[0] % 1.0 == 0.0
        )
        if is_length and most.size > 0 and self._are_possible(most):
            return None
        return "numbers of entries that cannot be"

    def load(self, state: Floats) -> None:
        """Load the length and numbers of entries."""
        self.length = int(state[0])
        self._load_most(state[1:])
