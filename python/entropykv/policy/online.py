"""Let budgets follow the text: share the budget again by what every micro-batch shows about the KV
heads.

What is dropped never returns. So if a KV head gets a larger budget than it holds entries, only
tokens that are still to come can fill it. Budgets are therefore attainable: no KV head gets more
than it holds now and will read until budgets change again; meanwhile, the other KV heads keep the
rest. See AttainableBudgets.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.policy.division import LossCurve
from entropykv.policy.plan import HeadwisePlan, own_shares, shares_by_curves
from entropykv.profile.curves import LossCurves
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.own_policy import BudgetToShare, MicroBatchSeen, OwnPolicy

Floats = npt.NDArray[np.float64]

KNOT_FACTORS = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2, 5 / 2, 3, 4, 6, 8)
"""The numbers of entries beyond the floor at which losses are measured, as multiples of the entries
that the mean budget has beyond the floor.
"""
LEAST_TOKENS = 32
"""Budgets change at most once in this many tokens, because fewer queries show little."""
_MOST_ENTRIES = 2**31 - 1
GROWTH = 1.5
"""By what factor a text is assumed to become longer than it is now.

Budgets for its present length would move to other KV heads as it grows, which by then have dropped
the entries that they should hold.
"""


def is_observed(n_tokens: int, n_ubatch: int) -> bool:
    """Tell whether a micro-batch is observed: it has LEAST_TOKENS tokens, or is as large as
    possible.

    Single tokens of an answer are not observed, unless the prompt is also read one by one.
    """
    return n_tokens >= min(LEAST_TOKENS, n_ubatch)


def changes_budgets(n_tokens: int, position: int, n_ubatch: int) -> bool:
    """Tell whether what a micro-batch at `position` shows changes budgets.

    One of LEAST_TOKENS tokens or more always does; if all micro-batches are smaller, one of the
    largest size that crosses a multiple of LEAST_TOKENS does. The result depends only on positions
    in the text, so that a loaded session behaves equally.
    """
    crosses = position // LEAST_TOKENS < (position + n_tokens) // LEAST_TOKENS
    return crosses and is_observed(n_tokens, n_ubatch)


class StoreReadings(Protocol):
    """Define how measurements of the last micro-batch are read; the headwise store of the extension
    implements it.
    """

    def row_entropies(self, layer: int) -> npt.NDArray[np.float32]:
        """Return the entropies of attention rows in bits, (n_tokens, query heads).

        Entropies are measured if OnlineBudgets.tracks_entropies is true.
        """

    def losses(self, of_held: bool = False) -> npt.NDArray[np.float64]:
        """Return losses at OnlineBudgets.knots(), a flat array [KV head of all layers][knot].

        `of_held`: without the losses from entries that were dropped before.
        """

    def count(self, layer: int, kv_head: int) -> int:
        """Return how many entries a KV head keeps."""

    def positions(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending, (n,)."""

    def importance(self, layer: int, kv_head: int) -> npt.NDArray[np.float32]:
        """Return the importance of entries that a KV head keeps, (n,), in order of positions."""


class OnlineBudgets(ABC):
    """Record what a text shows, and derive budgets from it.

    The default methods are for budgets that need no losses.
    """

    tracks_entropies: bool
    """True if the store must measure the entropies of attention rows."""

    def expect(self, plan: HeadwisePlan) -> None:  # noqa: B027
        """Prepare to measure for a plan, whose budget will be shared from now on."""

    def knots(self, growth: float) -> list[int]:  # noqa: ARG002
        """Return the numbers of entries beyond the floor at which the store must measure losses;
        may be empty.

        It is called before every micro-batch after which budgets change. `growth`: by what factor
        the part of the text beyond the floor will grow until all of it is read, 1 or more.
        """
        return []

    @abstractmethod
    def observe(self, n_tokens: int, *, budgets_change: bool) -> None:
        """Record what an observed micro-batch of n_tokens has shown: see is_observed().
        `budgets_change`: the budget will be shared by it: see changes_budgets().
        """

    def observe_again(self) -> None:  # noqa: B027
        """Record what an echo has shown of text that was observed before."""

    @abstractmethod
    def budgets(self, plan: HeadwisePlan) -> list[int] | None:
        """Return the budget of every KV head in entries, in the order of layers; None if that is
        not known before anything was observed.
        """

    def loss_curve(self, plan: HeadwisePlan) -> LossCurve | None:  # noqa: ARG002
        """Return what the text loses with fewer pages; the same object until it changes.

        Returns None if that is not known.
        """
        return None

    @abstractmethod
    def forget(self) -> None:
        """Forget all records, because another text begins."""

    @abstractmethod
    def state(self) -> Floats:
        """Return everything that was recorded, for session files, (n,)."""

    @abstractmethod
    def problem(self, state: Floats) -> str | None:
        """Return words for what makes a state invalid; None if it is valid."""

    @abstractmethod
    def load(self, state: Floats) -> None:
        """Load a valid state."""


class AttainableBudgets(OnlineBudgets):
    """Hold online budgets that know how many entries every KV head can hold before budgets are
    shared again.
    """

    attainable = True
    """True if no KV head may get a larger budget than the entries that it can hold."""

    def __init__(self, store: StoreReadings, layers: Sequence[_core.LayerShape]) -> None:
        """Begin without a text; `layers`: the attention layers of the store."""
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
    times as long as it is now, within the context.

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
