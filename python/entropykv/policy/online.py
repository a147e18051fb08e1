"""Let budgets follow the text: share the budget again by what every micro-batch shows about the KV
heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from entropykv import _core
from entropykv.policy.attainable import AttainableBudgets, CurveBudgets
from entropykv.policy.division import LossCurve
from entropykv.policy.plan import HeadwisePlan, own_shares
from entropykv.policy.policy import BudgetRule, Policy
from entropykv.policy.readings import Floats, OnlineBudgets, StoreReadings
from entropykv.policy.sources.kim_jung import LayerEntropies
from entropykv.profile.curves import LossCurves
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.own_policy import BudgetToShare, MicroBatchSeen, OwnPolicy

KNOT_FACTORS = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2, 5 / 2, 3, 4, 6, 8)
"""The numbers of entries beyond the floor at which losses are measured, as multiples of the entries
that the mean budget has beyond the floor.
"""
LEAST_TOKENS = 32
"""Budgets change at most once in this many tokens, because fewer queries show little."""


def is_observed(n_tokens: int, n_ubatch: int) -> bool:
    """Tell whether a micro-batch is observed: it has LEAST_TOKENS tokens, or is as large as
    possible.

    Single tokens of an answer are not observed, unless the prompt is also read one by one.
    """
    return n_tokens >= min(LEAST_TOKENS, n_ubatch)


def changes_budgets(n_tokens: int, position: int, n_ubatch: int) -> bool:
    """Tell whether what a micro-batch at `position` shows changes budgets.

    One of LEAST_TOKENS tokens or more always does; if all micro-batches are smaller, one that
    crosses a multiple of LEAST_TOKENS does. The result depends only on positions in the text, so
    that a loaded session behaves equally.
    """
    crosses = position // LEAST_TOKENS < (position + n_tokens) // LEAST_TOKENS
    return crosses and is_observed(n_tokens, n_ubatch)


def online_budgets(
    policy: Policy,
    store: StoreReadings,
    layers: Sequence[_core.LayerShape],
    n_ctx: int,
    profile: EntropyProfile | None = None,
    *,
    freezes: bool = False,
) -> OnlineBudgets | None:
    """Return the online budgets of a policy, or None if its budgets do not follow the text.

    `profile`: the one that the policy uses, if any. `freezes`: evicted entries are frozen and may
    return, so that budgets need not be limited to what a KV head holds.
    """
    if policy.own is not None:
        follows = type(policy.own).observe is not OwnPolicy.observe
        return OwnBudgets(policy.own, store, layers, n_ctx, profile) if follows else None
    if policy.rule.by_layer:
        return LayerEntropies(store, layers, n_ctx, policy.rule)
    if policy.rule.by_losses:
        curves = profile.curves if profile is not None and policy.rule.by_curves else None
        return MeasuredLosses(store, layers, n_ctx, curves, attainable=not freezes)
    follows = policy.rule is BudgetRule.PROFILE_CURVES and not freezes
    if follows and profile is not None and profile.curves is not None:
        return CurveBudgets(store, layers, profile.curves)
    return None


class MeasuredLosses(AttainableBudgets):
    """Share for the smallest total loss, by what heads would have lost in the last micro-batch.

    The loss of dropping an entry is its score; with `mass+values`, this is the squared norm of the
    entry's contribution to the outputs, relative to the squared norm of the outputs. Losses are
    interpolated linearly between the measured numbers of entries. Ada-KV (Feng et al. 2024,
    arXiv:2407.11550) shares so within a layer; here, layers share, too.

    Loss curves of a profile, if given, count as much as the losses of the text: the curves and the
    losses are each scaled so that all KV heads together lose 1 without entries beyond the floor. So
    a head gets room if either the text or the profile says that it needs some.
    """

    tracks_entropies = False

    def __init__(
        self,
        store: StoreReadings,
        layers: Sequence[_core.LayerShape],
        n_ctx: int,
        curves: LossCurves | None = None,
        *,
        attainable: bool = True,
    ) -> None:
        """Read losses from a store; see online_budgets(). `attainable`: no KV head gets more than
        it can hold.
        """
        super().__init__(store, layers)
        self.attainable = attainable
        self.curves = curves
        """The loss curves of a profile that count, too; None if there are none."""
        self._n_ctx = n_ctx
        self._next_knots: list[int] = []
        self._asked: list[int] = []
        """The numbers of entries beyond the floor at which the store measures: the knots, and the
        smaller numbers that stand for them in a longer text.
        """
        self._growth = 1.0
        self._next_floor = self._floor = 0
        """The floor of every KV head in entries, which knots count from: for the next measurement,
        and for the current losses.
        """
        self._curve: LossCurve | None = None
        self._curve_knots: list[float] = []
        """The knots for which `_expected()` was computed last; the result is kept beside them."""
        self._curve_losses: Floats = np.empty((self._n_heads, 0))
        self._knots: Floats
        self._losses: Floats
        """The losses of every KV head at the knots, [KV head][knot], including dropped entries,
        estimated for the end of the text.
        """
        self._losses_of_held: Floats
        self.forget()

    def expect(self, plan: HeadwisePlan) -> None:
        """Measure losses at multiples of the entries that the plan's mean budget leaves beyond the
        floor.

        Nothing is measured if every KV head may keep the whole context, because nothing will be
        lost.
        """
        beyond = max(1, plan.mean_entries - plan.floor_entries)
        factors = KNOT_FACTORS if plan.mean_entries < self._n_ctx else ()
        self._next_knots = sorted({int(factor * beyond) for factor in factors})
        self._next_floor = plan.floor_entries

    def knots(self, growth: float) -> list[int]:
        """Return the knots of expect(), and the smaller numbers of entries that stand for them in a
        longer text.

        Of a longer text, a KV head can keep only a smaller fraction than of the text so far. Its
        later loss is estimated as the loss that it would have now with an equally small fraction.
        Therefore heads that lose much get their room before the text has outgrown equal budgets.
        """
        later = {int(knot / growth) for knot in self._next_knots}
        self._asked, self._growth = sorted({*self._next_knots, *later}), growth
        return self._asked

    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:  # noqa: ARG002
        """Record the measured losses if the micro-batch changes budgets."""
        if not budgets_change:
            return
        self._knots = np.array(self._next_knots, np.float64)
        later = np.floor(self._knots / self._growth)
        self._losses = self._of_store(of_held=False)[:, np.searchsorted(self._asked, later)]
        now = np.searchsorted(self._asked, self._knots)
        self._losses_of_held = self._of_store(of_held=True)[:, now]
        self._floor, self._curve = self._next_floor, None
        self.is_due = True

    def _of_store(self, *, of_held: bool) -> Floats:
        losses = self._store.losses(of_held) if self._next_knots else np.empty(0)
        return losses.reshape(self._n_heads, len(self._asked))

    def observe_again(self) -> None:
        """Record the losses by the scores after an echo."""
        self.observe(0, budgets_change=True)

    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Return the budget of every KV head in entries, for the smallest total loss within the
        limits of the plan; None before losses were measured.
        """
        if not self._knots.size:
            return None
        most = max(1, self._n_ctx - plan.floor_entries)
        inside = self._knots < most
        knots = [*self._knots[inside].tolist(), float(most)]
        nothing = np.zeros((self._n_heads, 1))
        losses = np.concatenate([self._losses[:, inside], nothing], axis=1)
        if self.curves is not None:
            losses = _of_whole(losses) + self._expected(self.curves, knots)
        losses /= losses.max() or 1.0  # Only ratios matter, and sums of |q.k| have no limit.
        return _core.share_by_curves(
            plan.mean_entries,
            self._n_ctx,
            min(plan.floor_entries, plan.mean_entries),
            plan.entries_per_page,
            knots,
            losses.ravel().tolist(),
            plan.limits,
        )

    def _expected(self, curves: LossCurves, knots: list[float]) -> Floats:
        """Return the losses by the curves, [KV head][knot], scaled by _of_whole(); at the last knot
        everything is kept.

        The losses are kept for the next time, because knots change only with the budget.
        """
        if self._curve_knots != knots:
            theirs, flat = curves.knots(self._n_ctx, int(knots[-1]))
            losses = np.array(flat).reshape(self._n_heads, len(theirs))
            at_knots = np.array([np.interp(knots, theirs, of_head) for of_head in losses])
            self._curve_knots, self._curve_losses = knots, _of_whole(at_knots)
        return self._curve_losses

    def loss_curve(self, plan: HeadwisePlan) -> LossCurve | None:
        """Return the joint curve of all KV heads by the losses that were measured of held entries;
        None before any were measured.

        If dropped entries counted, a text that has dropped many would take pages from others that
        lose more of what they still hold. Session files do not contain these losses.
        """
        if self._curve is None and self._losses_of_held.shape[1] > 1:
            floors = np.minimum(self._floor, plan.limits)
            per_page = np.array(plan.entries_per_page)
            self._curve = LossCurve.of_heads(floors, per_page, self._knots, self._losses_of_held)
        return self._curve

    def forget(self) -> None:
        """Forget all measurements, because another text begins."""
        super().forget()
        self._knots, self._curve = np.empty(0), None
        self._losses = self._losses_of_held = np.empty((self._n_heads, 0))

    def state(self) -> Floats:
        """Return the knots, the losses of every head at them, and the result of _most_to_save(),
        which is missing if budgets are not limited to what KV heads can hold: (n,).
        """
        most = self._most_to_save() if self.attainable else []
        return np.concatenate([self._knots, self._losses.ravel(), most])

    def problem(self, state: Floats) -> str | None:
        """Return why knots, losses or entries are invalid: knots must ascend from 0; None if they
        are valid.
        """
        n_knots, n_most = divmod(state.size, self._n_heads + 1)
        knots, losses = state[:n_knots], state[n_knots : state.size - n_most]
        ascend = n_knots == 0 or (knots[0] == 0.0 and bool(np.all(np.diff(knots) >= 1.0)))
        if not ascend or not np.all((losses >= 0.0) & np.isfinite(losses)):
            return "losses that cannot be"
        most = state[state.size - n_most :]
        if not self._are_possible(most):
            return "losses that cannot be"
        return None

    def load(self, state: Floats) -> None:
        """Load knots, losses and entries.

        Without entries, budgets are not limited to what KV heads can hold.
        """
        n_knots, n_most = divmod(state.size, self._n_heads + 1)
        self._knots = state[:n_knots].copy()
        losses, most = np.split(state[n_knots:], [state.size - n_knots - n_most])
        self._losses = losses.reshape(self._n_heads, n_knots).copy()
        self._losses_of_held = np.empty((self._n_heads, 0))
        self._floor, self._curve = self._next_floor, None
        self._load_most(most)
        if not n_most:
            self.most = [self._n_ctx] * self._n_heads


def _of_whole(losses: Floats) -> Floats:
    """Scale losses, [KV head][knot], so that all heads together lose 1 at the first knot."""
    scaled: Floats = losses / (losses[:, 0].sum() or 1.0)
    return scaled


class OwnBudgets(OnlineBudgets):
    """Get the budgets from an OwnPolicy that observes the text; every text has its own copy of the
    object.
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
        """Pass to the user's policy what the store has measured in a micro-batch."""
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
        """Return the budgets in entries by the policy after all that it has observed; raises
        SettingsError for invalid results of share().
        """
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
        """Return what the policy has recorded, (n,)."""
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
