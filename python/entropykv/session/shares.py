"""Share the pages of a pool among its live sequences."""

from __future__ import annotations

from collections.abc import Sequence

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.policy.division import Claim, divide, equal_parts, longest_held
from entropykv.policy.plan import HeadwisePlan
from entropykv.policy.recipe import Recipe
from entropykv.session.seat import Seat
from entropykv.settings.options import Budget

STRETCH = 64
"""Tokens by which a text is expected to grow: shares do not change with every token."""
LEAST_CHANGE = 1 / 16
"""Of a sequence's share: what has become clear of losses changes no shares by less."""

MOST_FLOORS = 64
"""Equal parts whose floors are known at a time."""


class Shares:
    """Divide the pages of a pool by what its sequences need; see policy/division.py."""

    def __init__(self, recipe: Recipe, layers: Sequence[_core.LayerShape]) -> None:
        """Share by the recipe's policy; `layers`: the model's attention layers."""
        self._recipe = recipe
        self._layers = layers
        self._all = recipe.headwise_plan(Budget("fraction", 1.0), layers)
        self._pages_of: dict[int, int] = {}
        self._floors: dict[int, int] = {}
        """Of equal parts; few, as long as nobody comes or goes."""

    def are_possible(self, seats: Sequence[Seat], pages: int) -> bool:
        """Tell whether every equal part would hold what no eviction takes."""
        try:
            for part in set(equal_parts(pages, [seat.weight for seat in seats])):
                self._plan(part)
        except BudgetError:
            return False
        return True

    def learn(self, seats: Sequence[Seat]) -> bool:
        """Take in what sequences would lose with fewer pages; whether that is news."""
        news = False
        for seat in seats:
            curve = seat.headwise.sharing.loss_curve()
            news = news or curve is not seat.loss_curve
            seat.loss_curve = curve
        return news

    def give(self, seats: Sequence[Seat], pages: int, least_change: float = 0.0) -> None:
        """Give every sequence its share; those that get less evict first.

        `least_change`: nothing happens where no share would change by so much of it.
        """
        if not seats:
            return
        claims, shares = self._divide(seats, pages)
        former = [seat.headwise.share_pages for seat in seats]
        changes = [new - old for new, old in zip(shares, former, strict=True)]
        pairs = zip(changes, former, strict=True)
        if all(abs(change) < least_change * old for change, old in pairs):
            return
        for i in sorted(range(len(seats)), key=lambda i: changes[i]):
            seat = seats[i]
            whole = self._whole_length(seat, shares[i], claims[i])
            seat.shared_for = whole or self._length(seat)
            held = seat.headwise.core.entries
            seat.headwise.take_share(shares[i], whole)
            seat.given_up += held - seat.headwise.core.entries

    def hold_whole(self, seat: Seat, seats: Sequence[Seat], pages: int) -> bool:
        """Tell whether give() would let one of the sequences keep all of its text."""
        claims, shares = self._divide(seats, pages)
        i = seats.index(seat)
        return self._whole_length(seat, shares[i], claims[i]) is not None

    def _whole_length(self, seat: Seat, share: int, claim: Claim) -> int | None:
        """Return how long a text may get that a share holds whole; None: it does not hold this."""
        if share >= claim.needed:
            return self._length(seat)
        longest = longest_held(share, self._recipe.n_ctx, self._all.pages_of)
        return longest if longest >= max(seat.expected, seat.position) else None

    def _divide(self, seats: Sequence[Seat], pages: int) -> tuple[list[Claim], list[int]]:
        parts = equal_parts(pages, [seat.weight for seat in seats])
        claims = [self._claim(seat, part) for seat, part in zip(seats, parts, strict=True)]
        return claims, divide(pages, claims)

    def _length(self, seat: Seat) -> int:
        """Return how long a text is taken to get."""
        n_tokens = max(seat.expected, seat.position, 1)
        return min(-(-n_tokens // STRETCH) * STRETCH, self._recipe.n_ctx)

    def _claim(self, seat: Seat, part: int) -> Claim:
        curve = seat.headwise.sharing.loss_curve()
        floor = part if curve is None else self._floor(part)
        return Claim(self._pages_for(self._length(seat)), floor, seat.weight, curve)

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
        return self._recipe.headwise_plan(budget, self._layers)
