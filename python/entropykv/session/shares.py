"""Share the budget of a pool among its live sequences: of one that has all of it, or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.policy.division import Claim, WholeTexts, divide, equal_parts
from entropykv.policy.plan import HeadwisePlan
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.session.sequence_slot import SequenceSlot
from entropykv.settings.options import Budget

STRETCH = 64
"""Tokens by which a text is expected to grow: shares do not change with every token."""
LEAST_CHANGE = 1 / 16
"""Of a sequence's share: what has become clear of losses changes no shares by less."""

MOST_FLOORS = 64
"""Equal parts whose floors are known at a time."""


class Shares(Protocol):
    """Say what every live sequence of a pool may hold, and give it to their stores."""

    keeps_places: bool
    """True where nobody else waits for the place of a sequence, which is live from the start."""

    def are_possible(self, slots: Sequence[SequenceSlot], budget: Budget | None = None) -> bool:
        """Tell whether every sequence would get what no eviction takes.

        `budget` None: of the one that is shared now. BudgetError for one of no use.
        """

    def learn(self, slots: Sequence[SequenceSlot]) -> bool:
        """Take in what sequences would lose with a smaller share; whether that is news."""

    def give(self, slots: Sequence[SequenceSlot], least_change: float = 0.0) -> None:
        """Give every sequence its share; those that get less evict first."""

    def note_growth(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> None:
        """Prepare for how long the text of one of the sequences is expected to get."""

    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> bool:
        """Tell whether note_growth() would let one of the sequences keep all of its text."""

    def resize(self, budget: Budget, slots: Sequence[SequenceSlot]) -> None:
        """Share another budget; raises BudgetError where it is not possible."""


class WholeBudget:
    """Give one sequence all of the budget, as it was asked for: these are a pool of one's shares.

    Its store owns the pages, and can be of any kind.
    """

    keeps_places = True

    def are_possible(
        self,
        slots: Sequence[SequenceSlot],  # noqa: ARG002
        budget: Budget | None = None,  # noqa: ARG002
    ) -> bool:
        """Say yes: the store itself checks its budget."""
        return True

    def learn(self, slots: Sequence[SequenceSlot]) -> bool:  # noqa: ARG002
        """Learn nothing, since nobody else has a share."""
        return False

    def give(self, slots: Sequence[SequenceSlot], least_change: float = 0.0) -> None:
        """Give nothing: the store has it."""

    def note_growth(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> None:  # noqa: ARG002
        """Let the store plan for how long the text is expected to get."""
        slot.store.expect(slot.expected)

    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> bool:  # noqa: ARG002
        """Say no: the store knows what it holds whole, whatever is expected."""
        return False

    def resize(self, budget: Budget, slots: Sequence[SequenceSlot]) -> None:
        """Give the store the other budget."""
        for slot in slots:
            slot.store.resize(budget)


class PageShares:
    """Divide the pages of a pool by what its sequences need; see policy/division.py."""

    keeps_places = False

    def __init__(
        self, core: _core.SequencePool, config: ResolvedConfig, layers: Sequence[_core.LayerShape]
    ) -> None:
        """Share the pages of `core` by the config; `layers`: the model's attention layers."""
        self._core = core
        self._config = config
        self._layers = layers
        self._all = config.headwise_plan(Budget("fraction", 1.0), layers)
        self._pages = config.pool_pages(config.options.budget, layers)
        core.set_pages(self._pages)
        self._pages_of: dict[int, int] = {}
        self._floors: dict[int, int] = {}
        """Of equal parts; few, as long as nobody comes or goes."""

    def are_possible(self, slots: Sequence[SequenceSlot], budget: Budget | None = None) -> bool:
        """Tell whether every equal part would hold what no eviction takes."""
        pages = self._pages if budget is None else self._config.pool_pages(budget, self._layers)
        try:
            for part in set(equal_parts(pages, [slot.weight for slot in slots])):
                self._plan(part)
        except BudgetError:
            return False
        return True

    def learn(self, slots: Sequence[SequenceSlot]) -> bool:
        """Take in what sequences would lose with fewer pages; whether that is news."""
        news = False
        for slot in slots:
            curve = slot.headwise.sharing.loss_curve()
            news = news or curve is not slot.loss_curve
            slot.loss_curve = curve
        return news

    def give(self, slots: Sequence[SequenceSlot], least_change: float = 0.0) -> None:
        """Give every sequence its share; those that get less evict first.

        `least_change`: nothing happens where no share would change by so much of it.
        """
        if not slots:
            return
        shares = self._divide(slots)
        former = [slot.headwise.share_pages for slot in slots]
        changes = [new - old for new, old in zip(shares, former, strict=True)]
        pairs = zip(changes, former, strict=True)
        if all(abs(change) < least_change * old for change, old in pairs):
            return
        for i in sorted(range(len(slots)), key=lambda i: changes[i]):
            slot = slots[i]
            whole = self._whole_length(slot, shares[i])
            slot.shared_for = whole or self._length(slot)
            held = slot.headwise.core.entries
            slot.headwise.take_share(shares[i], whole)
            slot.given_up += held - slot.headwise.core.entries

    def note_growth(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> None:
        """Share again where a text gets longer than shares have gone by."""
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
        """Tell whether give() would let one of the sequences keep all of its text."""
        shares = self._divide(slots)
        i = slots.index(slot)
        return self._whole_length(slot, shares[i]) is not None

    def _whole_length(self, slot: SequenceSlot, share: int) -> int | None:
        """Return how long a text may get that a share holds whole; None: it does not hold this."""
        whole = WholeTexts(share, self._config.n_ctx, self._pages_for)
        return whole.length_for(max(slot.expected, slot.position, 1), self._length(slot))

    def _divide(self, slots: Sequence[SequenceSlot]) -> list[int]:
        parts = equal_parts(self._pages, [slot.weight for slot in slots])
        claims = [self._claim(slot, part) for slot, part in zip(slots, parts, strict=True)]
        return divide(self._pages, claims)

    def _length(self, slot: SequenceSlot) -> int:
        """Return how long a text is taken to get."""
        n_tokens = max(slot.expected, slot.position, 1)
        return min(-(-n_tokens // STRETCH) * STRETCH, self._config.n_ctx)

    def _claim(self, slot: SequenceSlot, part: int) -> Claim:
        curve = slot.headwise.sharing.loss_curve()
        floor = part if curve is None else self._floor(part)
        return Claim(self._pages_for(self._length(slot)), floor, slot.weight, curve)

    def _pages_for(self, n_tokens: int) -> int:
        if n_tokens not in self._pages_of:
            self._pages_of[n_tokens] = self._all.pages_of(n_tokens)
        return self._pages_of[n_tokens]

    def _floor(self, part: int) -> int:
        """Return the pages for the sinks and the recent windows of an equal part."""
        if part not in self._floors:
            if len(self._floors) >= MOST_FLOORS:
                self._floors.clear()
            plan = self._plan(part)
            self._floors[part] = plan.pages_of(plan.floor_entries)
        return self._floors[part]

    def _plan(self, pages: int) -> HeadwisePlan:
        budget = Budget("bytes", max(1, pages * self._all.page_bytes))
        return self._config.headwise_plan(budget, self._layers)
