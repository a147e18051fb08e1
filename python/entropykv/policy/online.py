"""Budgets that follow the text: what every micro-batch of it shows about the KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.policy.names import BudgetRule, Policy
from entropykv.policy.own_budgets import OwnBudgets
from entropykv.policy.plan import HeadwisePlan, by_layer
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.own_policy import OwnPolicy

KNOT_FACTORS = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2, 5 / 2, 3, 4, 6, 8)
"""Entries beyond the floor at which losses are measured, as factors of the mean budget's."""
LEAST_TOKENS = 32
"""Budgets change after so many tokens, not sooner: a few queries say little."""
LAYER_RANGE = (8, 128)
"""Budgets of the layers with the lowest and the highest entropy, as in the layer document."""
MOST_BITS = 32
"""Entropy of a row: it has fewer than 2^32 entries."""

Floats = npt.NDArray[np.float64]


def is_observed(n_tokens: int, n_ubatch: int) -> bool:
    """Whether a micro-batch is looked at: it has LEAST_TOKENS or more, or is as large as they get.

    Single tokens of an answer are not, unless the prompt, too, was read one by one.
    """
    return n_tokens >= min(LEAST_TOKENS, n_ubatch)


def changes_budgets(n_tokens: int, position: int, n_ubatch: int) -> bool:
    """Whether budgets change after a micro-batch at `position`: each that is observed changes them
    unless they are smaller than LEAST_TOKENS, where one every LEAST_TOKENS does.

    It hangs on places in the text alone, so that a session that was loaded keeps step.
    """
    crosses = position // LEAST_TOKENS < (position + n_tokens) // LEAST_TOKENS
    return crosses and is_observed(n_tokens, n_ubatch)


class OnlineBudgets(Protocol):
    """What was seen of a text, and the budgets that follow from it."""

    def expect(self, plan: HeadwisePlan) -> None:
        """Measure what budgets of this plan will need."""

    def prepare(self, *, budgets_change: bool) -> None:
        """Say, before every micro-batch, whether budgets will change after it."""

    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:
        """Take in what an observed micro-batch has shown: is_observed(); as prepare() was told."""

    def observe_again(self) -> None:
        """Take in what an echo has shown of text that was observed before."""

    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Entries of every KV head, all layers in order; None before anything was seen."""

    def forget(self) -> None:
        """Begin another text."""

    def state(self) -> Floats:
        """All that was seen, for session files."""

    def problem(self, state: Floats) -> str | None:
        """What is wrong with a state."""

    def load(self, state: Floats) -> None:
        """Go on from a state without problems."""


def online_budgets(
    policy: Policy,
    store: _core.HeadwiseStore,
    layers: Sequence[_core.LayerShape],
    n_ctx: int,
    profile: EntropyProfile | None = None,
) -> OnlineBudgets | None:
    """Return those of a policy whose budgets follow the text; `profile`: for an own policy."""
    if policy.own is not None:
        follows = type(policy.own).observe is not OwnPolicy.observe
        return OwnBudgets(policy.own, store, layers, n_ctx, profile) if follows else None
    if policy.rule.by_layer:
        return LayerEntropies(store, layers, n_ctx, policy.rule)
    if policy.rule.by_losses:
        return MeasuredLosses(store, layers, n_ctx, policy.rule)
    return None


class MeasuredLosses:
    """Least summed loss, by what heads would have lost in the last micro-batch.

    The loss of dropping an entry is its score: with `mass+values` the squared norm of what it gave
    to the outputs, relative to theirs. Between numbers of entries that were measured it is taken to
    be linear. The idea is that of Ada-KV (Feng et al. 2024, arXiv:2407.11550), across layers too.
    """

    def __init__(
        self,
        store: _core.HeadwiseStore,
        layers: Sequence[_core.LayerShape],
        n_ctx: int,
        rule: BudgetRule,
    ) -> None:
        """See online_budgets()."""
        self._store = store
        self._n_ctx = n_ctx
        heads = [shape.n_head_kv for shape in layers]
        self._n_heads = sum(heads)
        self._layers = heads if rule is BudgetRule.LOSSES_WITHIN_LAYER else None
        self._next_knots: list[int] = []
        self._knots: Floats
        self._losses: Floats
        self.forget()

    def expect(self, plan: HeadwisePlan) -> None:
        """Measure at multiples of what the plan's mean budget leaves beyond the floor.

        Nothing where every KV head may keep the whole context: nobody will lose anything.
        """
        beyond = max(1, plan.mean_entries - plan.floor_entries)
        factors = KNOT_FACTORS if plan.mean_entries < self._n_ctx else ()
        self._next_knots = sorted({int(factor * beyond) for factor in factors})

    def prepare(self, *, budgets_change: bool) -> None:
        """Measure where budgets will change: it takes time."""
        self._store.measure_losses(self._next_knots if budgets_change else [])

    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:  # noqa: ARG002
        """Take over the losses, if any were measured."""
        if not budgets_change:
            return
        self._knots = np.array(self._next_knots, np.float64)
        losses = self._store.losses() if self._next_knots else np.empty(0)
        self._losses = losses.reshape(self._n_heads, self._knots.size)

    def observe_again(self) -> None:
        """Take over the losses by the new scores."""
        self.observe(0, budgets_change=True)

    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Shares for the least summed loss."""
        if not self._knots.size:
            return None
        most = max(1, self._n_ctx - plan.floor_entries)
        inside = self._knots < most
        knots = [*self._knots[inside].tolist(), float(most)]
        nothing = np.zeros((self._n_heads, 1))
        losses = np.concatenate([self._losses[:, inside], nothing], axis=1)
        losses /= losses.max() or 1.0  # only ratios count, and sums of |q.k| have no limit
        shares: list[int] = []
        for n_heads, mean in self._groups(plan):
            heads = slice(len(shares), len(shares) + n_heads)
            shares += _core.share_by_curves(
                mean,
                self._n_ctx,
                min(plan.floor_entries, mean),
                plan.entries_per_page[heads],
                knots,
                losses[heads].ravel().tolist(),
                plan.limits[heads],
            )
        return shares

    def _groups(self, plan: HeadwisePlan) -> list[tuple[int, int]]:
        """KV heads that share a budget, and the mean of it."""
        if self._layers is None:
            return [(self._n_heads, plan.mean_entries)]
        means = [sum(layer) // len(layer) for layer in plan.budgets]  # equal, but for windows
        return list(zip(self._layers, means, strict=True))

    def forget(self) -> None:
        """Nothing was measured."""
        self._knots = np.empty(0)
        self._losses = np.empty((self._n_heads, 0))

    def state(self) -> Floats:
        """Knots, then the losses of every head."""
        return np.concatenate([self._knots, self._losses.ravel()])

    def problem(self, state: Floats) -> str | None:
        """Knots that do not ascend from 0, or losses that cannot be."""
        n_knots, rest = divmod(state.size, self._n_heads + 1)
        knots, losses = state[:n_knots], state[n_knots:]
        ascend = n_knots == 0 or (knots[0] == 0.0 and bool(np.all(np.diff(knots) >= 1.0)))
        if rest or not ascend or not np.all((losses >= 0.0) & np.isfinite(losses)):
            return "losses that cannot be"
        return None

    def load(self, state: Floats) -> None:
        """Knots and losses."""
        n_knots = state.size // (self._n_heads + 1)
        self._knots = state[:n_knots].copy()
        self._losses = state[n_knots:].reshape(self._n_heads, n_knots).copy()


class LayerEntropies:
    """Budgets per layer by the mean entropy of its query heads in all that observe() took in, up to
    the micro-batch after which they last changed.

    The layer document (Mathematics 2025, 13, 2366): in proportion to it, or between a least and a
    largest budget; here both are scaled to the budget's total, which is hard.
    """

    def __init__(
        self,
        store: _core.HeadwiseStore,
        layers: Sequence[_core.LayerShape],
        n_ctx: int,
        rule: BudgetRule,
    ) -> None:
        """See online_budgets()."""
        self._store = store
        self._layers = layers
        self._n_ctx = n_ctx
        self._in_range = rule is BudgetRule.LAYER_RANGE
        self._seen: Floats
        self._followed: Floats
        store.track_entropy(True)
        self.forget()

    def expect(self, plan: HeadwisePlan) -> None:
        """Entropies are always the same."""

    def prepare(self, *, budgets_change: bool) -> None:
        """Entropies are tracked in any case."""

    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:
        """Add the entropies of the micro-batch's rows."""
        layers = range(len(self._layers))
        means = [self._store.row_entropies(layer).mean(dtype=np.float64) for layer in layers]
        self._seen += n_tokens * np.array([1.0, *means])
        if budgets_change:
            self._followed = self._seen.copy()

    def observe_again(self) -> None:
        """Follow all that was seen: entropies of a text are those of its own queries."""
        self._followed = self._seen.copy()

    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Shares by layer; the heads of a layer get the same."""
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
        """No rows were seen."""
        self._seen = np.zeros(1 + len(self._layers))
        self._followed = self._seen.copy()

    def state(self) -> Floats:
        """Number of rows, then the sum of every layer's mean entropy over them: of all that were
        seen, and of those that the budgets follow.
        """
        return np.concatenate([self._seen, self._followed])

    def problem(self, state: Floats) -> str | None:
        """Sums that are not one for every layer, or cannot be."""
        right_size = state.size == self._seen.size + self._followed.size
        if not right_size or not np.isfinite(state).all():
            return "entropies that cannot be"
        seen, followed = np.split(state, 2)
        for sums in (seen, followed):
            if not np.all((sums >= 0.0) & (sums <= MOST_BITS * sums[0])):
                return "entropies that cannot be"
        return None if np.all(followed <= seen) else "entropies that cannot be"

    def load(self, state: Floats) -> None:
        """Rows and sums, both times."""
        self._seen, self._followed = (half.copy() for half in np.split(state, 2))


def layer_weights(entropies: Floats, *, in_range: bool) -> list[float]:
    """What layers get in proportion, from their mean entropies in bits; equal where all are 0."""
    weights = entropies
    if in_range:
        low, high = entropies.min(), entropies.max()
        span = (entropies - low) / (high - low) if high > low else np.ones_like(entropies)
        weights = LAYER_RANGE[0] + (LAYER_RANGE[1] - LAYER_RANGE[0]) * span
    return (weights if weights.sum() > 0.0 else np.ones_like(weights)).tolist()  # type: ignore[no-any-return]
