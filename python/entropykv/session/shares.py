"""Share the pages of a pool among its live sequences."""

from __future__ import annotations

from collections.abc import Sequence

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.policy.division import Claim, divide, equal_parts, longest_held
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


class Shares:
    """Divide the pages of a pool by what its sequences need; see policy/division.py."""

    def __init__(self, config: ResolvedConfig, layers: Sequence[_core.LayerShape]) -> None:
        """Share by the config's policy; `layers`: the model's attention layers."""
        self._config = config
        self._layers = layers
        self._all = config.headwise_plan(Budget("fraction", 1.0), layers)
        self._pages_of: dict[int, int] = {}
        self._floors: dict[int, int] = {}
        """Of equal parts; few, as long as nobody comes or goes."""

    def are_possible(self, slots: Sequence[SequenceSlot], pages: int) -> bool:
        """Tell whether every equal part would hold what no eviction takes."""
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

    def give(self, slots: Sequence[SequenceSlot], pages: int, least_change: float = 0.0) -> None:
        """Give every sequence its share; those that get less evict first.

        `least_change`: nothing happens where no share would change by so much of it.
        """
        if not slots:
            return
        claims, shares = self._divide(slots, pages)
        former = [slot.headwise.share_pages for slot in slots]
        changes = [new - old for new, old in zip(shares, former, strict=True)]
        pairs = zip(changes, former, strict=True)
        if all(abs(change) < least_change * old for change, old in pairs):
            return
        for i in sorted(range(len(slots)), key=lambda i: changes[i]):
            slot = slots[i]
            whole = self._whole_length(slot, shares[i], claims[i])
            slot.shared_for = whole or self._length(slot)
            held = slot.headwise.core.entries
            slot.headwise.take_share(shares[i], whole)
            slot.given_up += held - slot.headwise.core.entries

    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot], pages: int) -> bool:
        """Tell whether give() would let one of the sequences keep all of its text."""
        claims, shares = self._divide(slots, pages)
        i = slots.index(slot)
        return self._whole_length(slot, shares[i], claims[i]) is not None

    def _whole_length(self, slot: SequenceSlot, share: int, claim: Claim) -> int | None:
        """Return how long a text may get that a share holds whole; None: it does not hold this."""
        if share >= claim.needed:
            return self._length(slot)
        longest = longest_held(share, self._config.n_ctx, self._all.pages_of)
        return longest if longest >= max(slot.expected, slot.position) else None

    def _divide(self, slots: Sequence[SequenceSlot], pages: int) -> tuple[list[Claim], list[int]]:
        parts = equal_parts(pages, [slot.weight for slot in slots])
        claims = [self._claim(slot, part) for slot, part in zip(slots, parts, strict=True)]
        return claims, divide(pages, claims)

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
