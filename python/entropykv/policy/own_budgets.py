"""Let budgets follow the text by a policy of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from entropykv import _core
from entropykv.policy.division import LossCurve
from entropykv.policy.plan import HeadwisePlan, own_shares
from entropykv.policy.readings import StoreReadings
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.own_policy import BudgetToShare, Floats, MicroBatchSeen, OwnPolicy


class OwnBudgets:
    """Ask an OwnPolicy that observes for shares; every text has a copy of it."""

    tracks_entropies = True

    def __init__(
        self,
        own: OwnPolicy,
        store: StoreReadings,
        layers: Sequence[_core.LayerShape],
        n_ctx: int,
        profile: EntropyProfile | None,
    ) -> None:
        """Ask `own` for shares; see online_budgets()."""
        self._given = own
        self._store = store
        self._heads_per_layer = tuple(shape.n_head_kv for shape in layers)
        self._n_ctx = n_ctx
        self._profile = profile
        self.forget()

    def expect(self, plan: HeadwisePlan) -> None:
        """Prepare nothing: entropies are tracked, whatever the budgets are."""

    def knots(self, growth: float) -> list[int]:  # noqa: ARG002
        """Return nothing: no losses are asked for."""
        return []

    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:  # noqa: ARG002
        """Show the policy what the store knows of a micro-batch."""
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

    def observe_again(self) -> None:
        """Show nothing of an echo: entropies of a text are those of its own queries."""

    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Return what the policy shares after all that it was shown."""
        ask = BudgetToShare(
            self._n_ctx,
            plan.mean_entries,
            plan.floor_entries,
            self._heads_per_layer,
            plan.limits,
            self._profile,
        )
        return own_shares(self._policy, ask, plan.entries_per_page)

    def loss_curve(self, plan: HeadwisePlan) -> LossCurve | None:  # noqa: ARG002
        """Return nothing: what a policy weighs need not be a loss."""
        return None

    def forget(self) -> None:
        """Begin another text with a copy of what the user gave."""
        self._policy = copy.deepcopy(self._given)

    def state(self) -> Floats:
        """Return what the policy has noted."""
        return self._policy.state()

    def problem(self, state: Floats) -> str | None:
        """Say what is wrong with a state: its policy cannot go on from it."""
        try:
            copy.deepcopy(self._given).load(state)
        except ValueError as error:
            return f"what policy {self._given.name} cannot go on from: {error}"
        return None

    def load(self, state: Floats) -> None:
        """Go on from a state without problems."""
        self._policy = copy.deepcopy(self._given)
        self._policy.load(state)
