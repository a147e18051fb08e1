"""Divide the budget of a pool among its live sequences, or give all of it to a single one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.policy.division import Claim, WholeTexts, divide, parts_by_weight
from entropykv.policy.plan import HeadwisePlan
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.session.sequence_slot import SequenceSlot
from entropykv.settings.options import Budget
from entropykv.store.protocol import Places, StoreContext

GROWTH_STEP = 64
"""Tokens by which a text is expected to grow, so that shares do not change with every token."""
LEAST_CHANGE = 1 / 16
"""Shares change only if a new measurement of losses would change one by at least this fraction."""

MOST_FLOORS = 64
"""The most numbers of pages whose floors are cached."""


class Shares(ABC):
    """Share the budget of a pool among its live sequences; unless defined otherwise, the parts are
    what the stores have from the start.
    """

    keeps_places: bool = False
    """True if sequences never wait for room; then each is live from the start."""
    grow_by_leaving: bool = False
    """True if the others get the share of a sequence that is swapped out."""

    @abstractmethod
    def are_possible(self, slots: Sequence[SequenceSlot], budget: Budget | None = None) -> bool:
        """Tell whether every sequence would get its protected entries.

        `budget` None: of the current budget. Raises BudgetError for an unusable one.
        """

    def learn(self, slots: Sequence[SequenceSlot]) -> bool:  # noqa: ARG002
        """Measure what sequences would lose with a smaller share; returns whether that has
        changed.
        """
        return False

    def give(self, slots: Sequence[SequenceSlot], least_change: float = 0.0) -> None:  # noqa: B027
        """Set the share of every sequence; those that shrink evict first."""

    def note_growth(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> None:  # noqa: B027
        """Prepare for the expected growth of a sequence's text."""

    @abstractmethod
    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> bool:
        """Tell whether note_growth() would let a sequence keep its whole text."""

    @abstractmethod
    def resize(self, budget: Budget, slots: Sequence[SequenceSlot]) -> None:
        """Share another budget; raises BudgetError if that is impossible."""


def shares_of(context: StoreContext, config: ResolvedConfig) -> Shares:
    """Return how the stores of a context share its budget."""
    if context.pages is not None:
        return PageShares(context.pages, config, context.layers)
    if context.places is not None:
        return EqualPlaces(context.places, config, context.layers)
    return WholeBudget()


class WholeBudget(Shares):
    """Give the whole budget to the only sequence of a pool of one.

    Its store owns the pages, and can be of any kind.
    """

    keeps_places = True

    def are_possible(
        self,
        slots: Sequence[SequenceSlot],  # noqa: ARG002
        budget: Budget | None = None,  # noqa: ARG002
    ) -> bool:
        """Return True, because the store itself checks its budget."""
        return True

    def note_growth(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> None:  # noqa: ARG002
        """Let the store plan for the expected length of the text."""
        if slot.store.sharing is not None:
            slot.store.sharing.expect(slot.expected)

    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> bool:  # noqa: ARG002
        """Return False, because the store itself knows what it holds whole."""
        return False

    def resize(self, budget: Budget, slots: Sequence[SequenceSlot]) -> None:
        """Set the budget of the store."""
        for slot in slots:
            slot.store.resize(budget)


class EqualPlaces(Shares):
    """Give every sequence an equal part of the budget, whoever else is live.

    Device stores have rows for it: the first one that takes a place allocates those of all, and the
    last one that leaves frees them. For a larger budget, they are allocated anew.
    """

    def __init__(
        self, places: Places, config: ResolvedConfig, layers: Sequence[_core.LayerShape]
    ) -> None:
        """Check that an equal part holds the protected entries; raises BudgetError.

        `places`: those of the stores; `layers`: the model's attention layers.
        """
        self._places = places
        self._config = config
        self._layers = layers
        self._budget = config.options.budget
        config.equal_share(self._budget, layers)
        self._n_places = config.options.n_sequences or 1

    def are_possible(
        self,
        slots: Sequence[SequenceSlot],
        budget: Budget | None = None,  # noqa: ARG002
    ) -> bool:
        """Tell whether there are so many places; the stores check their budgets."""
        return len(slots) <= self._n_places

    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> bool:  # noqa: ARG002
        """Tell whether an equal part holds the whole expected text."""
        return max(slot.expected, slot.position) <= slot.store.reach().whole

    def resize(self, budget: Budget, slots: Sequence[SequenceSlot]) -> None:
        """Give all sequences an equal part of another budget, those that are swapped out, too."""
        self._config.equal_share(budget, self._layers)
        held = [slot.pooled.n_entries for slot in slots]
        self._places.resize(budget)
        self._budget = budget
        for slot, n_held in zip(slots, held, strict=True):
            slot.given_up += n_held - slot.pooled.n_entries


class PageShares(Shares):
    """Divide the pages of a pool by what its sequences need; see policy/division.py."""

    grow_by_leaving = True

    def __init__(
        self, core: _core.SequencePool, config: ResolvedConfig, layers: Sequence[_core.LayerShape]
    ) -> None:
        """Share the pages of `core`; `layers`: the model's attention layers."""
        self._core = core
        self._config = config
        self._layers = layers
        self._all = config.headwise_plan(Budget("fraction", 1.0), layers)
        self._pages = config.pool_pages(config.options.budget, layers)
        core.set_pages(self._pages)
        self._pages_of: dict[int, int] = {}
        self._floors: dict[int, int] = {}
        """The floors of equal parts, by their pages."""

    def are_possible(self, slots: Sequence[SequenceSlot], budget: Budget | None = None) -> bool:
        """Tell whether every equal part would hold the protected entries."""
        pages = self._pages if budget is None else self._config.pool_pages(budget, self._layers)
        try:
            for part in set(parts_by_weight(pages, [slot.weight for slot in slots])):
                self._plan(part)
        except BudgetError:
            return False
        return True

    def learn(self, slots: Sequence[SequenceSlot]) -> bool:
        """Measure what sequences would lose with fewer pages; returns whether that has changed."""
        news = False
        for slot in slots:
            curve = slot.measured_curve
            news = news or curve is not slot.loss_curve
            slot.loss_curve = curve
        return news

    def give(self, slots: Sequence[SequenceSlot], least_change: float = 0.0) -> None:
        """Set the share of every sequence; those that shrink evict first.

        `least_change`: nothing is done if no share would change by this fraction of it.
        """
        if not slots:
            return
        shares = self._divide(slots)
        former = [slot.pooled.share_pages for slot in slots]
        changes = [new - old for new, old in zip(shares, former, strict=True)]
        pairs = zip(changes, former, strict=True)
        if all(abs(change) < least_change * old for change, old in pairs):
            return
        for i in sorted(range(len(slots)), key=lambda i: changes[i]):
            slot = slots[i]
            whole = self._whole_length(slot, shares[i])
            slot.shared_for = whole or self._length(slot)
            held = slot.pooled.n_entries
            slot.pooled.take_share(shares[i], whole)
            slot.given_up += held - slot.pooled.n_entries

    def note_growth(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> None:
        """Share again if a text becomes longer than the shares have planned for."""
        if slot.expected > slot.shared_for:
            self.give(slots)

    def resize(self, budget: Budget, slots: Sequence[SequenceSlot]) -> None:
        """Share another number of pages."""
        pages = self._config.pool_pages(budget, self._layers)
        if not self.are_possible(slots, budget):
            self.give(slots)
            raise BudgetError(
                f"a KV budget of {budget} does not hold {len(slots)} conversations; close "
                "some, or give a larger one"
            )
        former, self._pages = self._pages, pages
        if pages >= former:
            self._core.set_pages(pages)
        self.give(slots)
        self._core.set_pages(pages)

    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> bool:
        """Tell whether give() would let a sequence keep its whole text."""
        shares = self._divide(slots)
        i = slots.index(slot)
        return self._whole_length(slot, shares[i]) is not None

    def _whole_length(self, slot: SequenceSlot, share: int) -> int | None:
        """Return the longest text that a share holds whole; None if it does not hold the current
        one.
        """
        whole = WholeTexts(share, self._config.n_ctx, self._pages_for)
        return whole.length_for(max(slot.expected, slot.position, 1), self._length(slot))

    def _divide(self, slots: Sequence[SequenceSlot]) -> list[int]:
        parts = parts_by_weight(self._pages, [slot.weight for slot in slots])
        claims = [self._claim(slot, part) for slot, part in zip(slots, parts, strict=True)]
        return divide(self._pages, claims)

    def _length(self, slot: SequenceSlot) -> int:
        """Return the expected length of a text in tokens."""
        n_tokens = max(slot.expected, slot.position, 1)
        return min(-(-n_tokens // GROWTH_STEP) * GROWTH_STEP, self._config.n_ctx)

    def _claim(self, slot: SequenceSlot, part: int) -> Claim:
        curve = slot.measured_curve
        floor = part if curve is None else self._floor(part)
        return Claim(self._pages_for(self._length(slot)), floor, slot.weight, curve)

    def _pages_for(self, n_tokens: int) -> int:
        if n_tokens not in self._pages_of:
            self._pages_of[n_tokens] = self._all.pages_of(n_tokens)
        return self._pages_of[n_tokens]

    def _floor(self, part: int) -> int:
        """Return the pages of the sinks and recent windows of an equal part."""
        if part not in self._floors:
            if len(self._floors) >= MOST_FLOORS:
                self._floors.clear()
            plan = self._plan(part)
            self._floors[part] = plan.pages_of(plan.floor_entries)
        return self._floors[part]

    def _plan(self, pages: int) -> HeadwisePlan:
        budget = Budget("bytes", max(1, pages * self._all.page_bytes))
        return self._config.headwise_plan(budget, self._layers)
