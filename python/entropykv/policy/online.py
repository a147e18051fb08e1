"""Let budgets follow the text, by what every micro-batch of it shows about the KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.policy.division import LossCurve
from entropykv.policy.documents.kim_jung import LayerEntropies
from entropykv.policy.own_budgets import OwnBudgets
from entropykv.policy.plan import HeadwisePlan
from entropykv.policy.policy import Policy
from entropykv.policy.readings import StoreReadings
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.own_policy import OwnPolicy

KNOT_FACTORS = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2, 5 / 2, 3, 4, 6, 8)
"""Where losses are measured: entries beyond the floor, as factors of the mean budget's."""
LEAST_TOKENS = 32
"""Budgets change after so many tokens, not sooner: a few queries say little."""

Floats = npt.NDArray[np.float64]


def is_observed(n_tokens: int, n_ubatch: int) -> bool:
    """Tell whether a micro-batch is looked at: it has LEAST_TOKENS, or is as large as they get.

    Single tokens of an answer are not, unless the prompt, too, was read one by one.
    """
    return n_tokens >= min(LEAST_TOKENS, n_ubatch)


def changes_budgets(n_tokens: int, position: int, n_ubatch: int) -> bool:
    """Tell whether budgets change after a micro-batch at `position`.

    Each that is observed changes them, or one every LEAST_TOKENS where they are smaller than that.

    It hangs on places in the text alone, so that a session that was loaded keeps step.
    """
    crosses = position // LEAST_TOKENS < (position + n_tokens) // LEAST_TOKENS
    return crosses and is_observed(n_tokens, n_ubatch)


class OnlineBudgets(Protocol):
    """Keep what was seen of a text, and say which budgets follow from it."""

    tracks_entropies: bool
    """Whether the store must measure the entropies of attention rows."""

    def expect(self, plan: HeadwisePlan) -> None:
        """Take the plan whose budgets will be shared."""

    def knots(self, growth: float) -> list[int]:
        """Return at how many entries beyond the floor the store must measure losses; maybe none.

        It is asked before every micro-batch after which budgets change. `growth`: how many times as
        long the text will be once all of it is read: 1 or more.
        """

    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:
        """Take in what an observed micro-batch has shown: see is_observed()."""

    def observe_again(self) -> None:
        """Take in what an echo has shown of text that was observed before."""

    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Return entries of every KV head, all layers in order; None before anything was seen."""

    def loss_curve(self, plan: HeadwisePlan) -> LossCurve | None:
        """Return what the text loses with fewer pages; the same object until it changes.

        None where it is not known.
        """

    def forget(self) -> None:
        """Forget what was seen, since another text begins."""

    def state(self) -> Floats:
        """Return all that was seen, for session files."""

    def problem(self, state: Floats) -> str | None:
        """Return what is wrong with a state; None where nothing is."""

    def load(self, state: Floats) -> None:
        """Go on from a state without problems."""


def online_budgets(
    policy: Policy,
    store: StoreReadings,
    layers: Sequence[_core.LayerShape],
    n_ctx: int,
    profile: EntropyProfile | None = None,
) -> OnlineBudgets | None:
    """Return the online budgets of a policy, or None where budgets do not follow the text."""
    if policy.own is not None:
        follows = type(policy.own).observe is not OwnPolicy.observe
        return OwnBudgets(policy.own, store, layers, n_ctx, profile) if follows else None
    if policy.rule.by_layer:
        return LayerEntropies(store, layers, n_ctx, policy.rule)
    if policy.rule.by_losses:
        return MeasuredLosses(store, layers, n_ctx)
    return None


class MeasuredLosses:
    """Share for the least summed loss, by what heads would have lost in the last micro-batch.

    The loss of dropping an entry is its score: with `mass+values` the squared norm of what it gave
    to the outputs, relative to theirs. Between numbers of entries that were measured it is taken to
    be linear. The idea is that of Ada-KV (Feng et al. 2024, arXiv:2407.11550), across layers too.
    """

    tracks_entropies = False

    def __init__(
        self, store: StoreReadings, layers: Sequence[_core.LayerShape], n_ctx: int
    ) -> None:
        """Read losses from a store; see online_budgets()."""
        self._store = store
        self._n_ctx = n_ctx
        self._n_heads = sum(shape.n_head_kv for shape in layers)
        self._next_knots: list[int] = []
        self._asked: list[int] = []
        """Where the store measures: at the knots, and at those that stand for them later."""
        self._growth = 1.0
        self._next_floor = self._floor = 0
        """Entries of every KV head that knots are beyond: those of the next losses, and of now."""
        self._curve: LossCurve | None = None
        self._knots: Floats
        self._losses: Floats
        """Of every KV head at the knots, what was dropped before included, once all is read."""
        self._losses_of_held: Floats
        self.forget()

    def expect(self, plan: HeadwisePlan) -> None:
        """Ask for losses at multiples of what the plan's mean budget leaves beyond the floor.

        Nothing where every KV head may keep the whole context: nobody will lose anything.
        """
        beyond = max(1, plan.mean_entries - plan.floor_entries)
        factors = KNOT_FACTORS if plan.mean_entries < self._n_ctx else ()
        self._next_knots = sorted({int(factor * beyond) for factor in factors})
        self._next_floor = plan.floor_entries

    def knots(self, growth: float) -> list[int]:
        """Return the knots of expect(), and those that stand for them in a longer text.

        Of a text that will be longer, a KV head can keep a smaller part than of what there is. What
        it will lose then is foreseen: what it would lose if it kept as small a part now. So heads
        that lose much have their room before the text has outgrown equal budgets.
        """
        later = {int(knot / growth) for knot in self._next_knots}
        self._asked, self._growth = sorted({*self._next_knots, *later}), growth
        return self._asked

    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:  # noqa: ARG002
        """Take over the losses, if any were measured."""
        if not budgets_change:
            return
        self._knots = np.array(self._next_knots, np.float64)
        later = np.floor(self._knots / self._growth)
        self._losses = self._of_store(of_held=False)[:, np.searchsorted(self._asked, later)]
        now = np.searchsorted(self._asked, self._knots)
        self._losses_of_held = self._of_store(of_held=True)[:, now]
        self._floor, self._curve = self._next_floor, None

    @property
    def measured(self) -> tuple[Floats, Floats]:
        """Return the last knots, and the losses there: [KV head of all layers][knot]."""
        return self._knots, self._losses_of_held

    def _of_store(self, *, of_held: bool) -> Floats:
        losses = self._store.losses(of_held) if self._next_knots else np.empty(0)
        return losses.reshape(self._n_heads, len(self._asked))

    def observe_again(self) -> None:
        """Take over the losses by the new scores."""
        self.observe(0, budgets_change=True)

    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Return shares for the least summed loss."""
        if not self._knots.size:
            return None
        most = max(1, self._n_ctx - plan.floor_entries)
        inside = self._knots < most
        knots = [*self._knots[inside].tolist(), float(most)]
        nothing = np.zeros((self._n_heads, 1))
        losses = np.concatenate([self._losses[:, inside], nothing], axis=1)
        losses /= losses.max() or 1.0  # only ratios count, and sums of |q.k| have no limit
        return _core.share_by_curves(
            plan.mean_entries,
            self._n_ctx,
            min(plan.floor_entries, plan.mean_entries),
            plan.entries_per_page,
            knots,
            losses.ravel().tolist(),
            plan.limits,
        )

    def loss_curve(self, plan: HeadwisePlan) -> LossCurve | None:
        """Join the losses of all KV heads, as they were measured, of what is held alone.

        What was dropped before would have a text that has dropped much take pages from others that
        lose more by what they still hold. Files of sessions do not have these losses.
        """
        if self._curve is None and self._losses_of_held.shape[1] > 1:
            floors = np.minimum(self._floor, plan.limits)
            per_page = np.array(plan.entries_per_page)
            self._curve = LossCurve.of_heads(floors, per_page, self._knots, self._losses_of_held)
        return self._curve

    def forget(self) -> None:
        """Forget what was measured, since another text begins."""
        self._knots, self._curve = np.empty(0), None
        self._losses = self._losses_of_held = np.empty((self._n_heads, 0))

    def state(self) -> Floats:
        """Return the knots, then the losses of every head."""
        return np.concatenate([self._knots, self._losses.ravel()])

    def problem(self, state: Floats) -> str | None:
        """Find knots that do not ascend from 0, or losses that cannot be."""
        n_knots, rest = divmod(state.size, self._n_heads + 1)
        knots, losses = state[:n_knots], state[n_knots:]
        ascend = n_knots == 0 or (knots[0] == 0.0 and bool(np.all(np.diff(knots) >= 1.0)))
        if rest or not ascend or not np.all((losses >= 0.0) & np.isfinite(losses)):
            return "losses that cannot be"
        return None

    def load(self, state: Floats) -> None:
        """Take over knots and losses."""
        n_knots = state.size // (self._n_heads + 1)
        self._knots = state[:n_knots].copy()
        self._losses = state[n_knots:].reshape(self._n_heads, n_knots).copy()
        self._losses_of_held = np.empty((self._n_heads, 0))
        self._floor, self._curve = self._next_floor, None
