"""Let budgets follow the text according to a user's own policy."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from entropykv import _core
from entropykv.policy.plan import HeadwisePlan, own_shares
from entropykv.policy.readings import OnlineBudgets, StoreReadings
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.own_policy import BudgetToShare, Floats, MicroBatchSeen, OwnPolicy


class OwnBudgets(OnlineBudgets):
    """Get the shares from an OwnPolicy that observes the text; every text has a copy of
    the object.
    """

    tracks_entropies = True

    def __init__(
        self,
        own: OwnPolicy,
        store: StoreReadings,
        layers: Sequence[_core.LayerShape],
        n_ctx: int,
        profile: EntropyProfile | None,
    ) -> None:
        """Use `own` for the shares; see online_budgets()."""
        self._given = own
        self._store = store
        self._heads_per_layer = tuple(shape.n_head_kv for shape in layers)
        self._n_ctx = n_ctx
        self._profile = profile
        self.forget()

    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:  # noqa: ARG002
        """Pass what the store has measured in a micro-batch to the policy."""
        store = self._store
        self._policy.observe(
            MicroBatchSeen(
                n_tokens,
                self._heads_per_layer,
                store.row_entropies,
                store.positions,
                store.importance,
            )
        )

    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Return the shares of the policy after all its observations."""
        ask = BudgetToShare(
            self._n_ctx,
            plan.mean_entries,
            plan.floor_entries,
            self._heads_per_layer,
            plan.limits,
            self._profile,
        )
        return own_shares(self._policy, ask, plan.entries_per_page)

    def forget(self) -> None:
        """Start another text with a new copy of the user's object."""
        self._policy = copy.deepcopy(self._given)

    def state(self) -> Floats:
        """Return what the policy has recorded."""
        return self._policy.state()

    def problem(self, state: Floats) -> str | None:
        """Return why the policy cannot load a state; None if it can."""
        try:
            copy.deepcopy(self._given).load(state)
        except ValueError as error:
            return f"what policy {self._given.name} cannot continue from: {error}"
        return None

    def load(self, state: Floats) -> None:
        """Load a valid state."""
        self._policy = copy.deepcopy(self._given)
        self._policy.load(state)
