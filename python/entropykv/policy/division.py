"""Divide the pages of a pool among its sequences; pages that one sequence does not need go to the
others.

The functions change nothing; SharedPool calls them between two steps and applies the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LossCurve:
    """Hold how much a sequence loses with fewer pages, as pieces of equally valuable pages, the
    most valuable piece first; the arrays have a number for each piece.
    """

    begin: float
    """How many pages come before the first piece: those of sinks and recent windows, whose loss is
    not measured.
    """
    pages: Floats
    """The number of pages of every piece."""
    losses: Floats
    """The loss that a page of each piece prevents, descending."""

    @classmethod
    def of_heads(
        cls,
        floors: npt.NDArray[np.int64],
        per_page: npt.NDArray[np.int64],
        knots: Floats,
        losses: Floats,
    ) -> LossCurve:
        """Join the curves of KV heads: at every number of pages, the next page goes to the head
        where it prevents most loss.

        `floors`: the floor of every KV head in entries. `per_page`: how many entries of every KV
        head fill a page. `losses`: [KV head][knot], with `knots` entries beyond the floor; they
        must be convex, as sums of all but the largest scores are.
        """
        pages = np.diff(knots)[None, :] / per_page[:, None]
        prevented = np.maximum(-np.diff(losses, axis=1), 0.0) / pages
        order = np.argsort(-prevented, axis=None, kind="stable")
        return cls(float((floors / per_page).sum()), pages.ravel()[order], prevented.ravel()[order])

    def between(self, low: float, high: float) -> tuple[Floats, Floats]:
        """Return the lengths in pages of the pieces between `low` and `high` pages, (n,), and the
        loss that a page of each prevents, (n,).

        Before `begin`, a page is assumed to prevent as much as one of the first piece; after the
        last piece, it prevents nothing.
        """
        if high <= low:
            return np.empty(0), np.empty(0)
        ends = np.concatenate([[0.0, self.begin], self.begin + np.cumsum(self.pages), [np.inf]])
        first = self.losses[:1] if self.losses.size else np.zeros(1)
        losses = np.concatenate([first, self.losses, [0.0]])
        pieces = np.clip(ends[1:], low, high) - np.clip(ends[:-1], low, high)
        there = pieces > 0.0
        return pieces[there], losses[there]


@dataclass(frozen=True)
class Claim:
    """Hold what a sequence asks of a pool, in pages."""

    needed: int
    """How many pages hold the sequence's whole text, so that nothing of it is evicted."""
    floor: int
    """The pages for the protected entries of an equal part of the pool: a sequence with a loss
    curve gets as many in any case, up to its need and its part by weight.
    """
    weight: float = 1.0
    """The weight of the sequence, relative to the others."""
    curve: LossCurve | None = None
    """What the sequence loses with fewer pages than it needs; None if unknown or not used."""


def parts_by_weight(pages: int, weights: Sequence[float]) -> list[int]:
    """Return parts of the pages in proportion to the weights, rounded down."""
    total = sum(weights)
    return [int(pages * weight / total) for weight in weights]


def divide(pages: int, claims: Sequence[Claim]) -> list[int]:
    """Return the pages of every sequence, together at most `pages`.

    Every sequence gets a part in proportion to its weight if that is enough for all. Otherwise each
    sequence gets its part up to its need, and the pages that are left go to those with the smallest
    share for their weight: up to their needs, and beyond them if all needs are met. But a sequence
    that has a loss curve and needs more than its part is only sure of its floor: further pages go
    to the sequences where a page prevents most loss, multiplied by the weight.
    """
    parts = parts_by_weight(pages, [claim.weight for claim in claims])
    if all(claim.needed <= part for claim, part in zip(claims, parts, strict=True)):
        return parts
    if sum(claim.needed for claim in claims) <= pages:
        shares = [float(claim.needed) for claim in claims]
        most = [float(pages)] * len(claims)
    else:
        shares = [float(_sure(claim, part)) for claim, part in zip(claims, parts, strict=True)]
        _give_by_losses(pages - sum(shares), claims, shares)
        most = [float(claim.needed) for claim in claims]
    _give_equally(pages - sum(shares), claims, shares, most)
    return [int(share + 1e-6) for share in shares]


def _sure(claim: Claim, part: int) -> int:
    """Return the pages that a sequence certainly gets if its part by weight is `part`."""
    if claim.curve is None or claim.needed <= part:
        return min(claim.needed, part)
    return min(claim.floor, part)


def _give_by_losses(rest: float, claims: Sequence[Claim], shares: list[float]) -> None:
    """Give up to `rest` pages to the sequences with loss curves, most loss prevented first, and add
    them to `shares`.
    """
    owners, pieces, losses = [], [], []
    for owner, claim in enumerate(claims):
        if claim.curve is not None:
            lengths, prevented = claim.curve.between(shares[owner], claim.needed)
            owners.append(np.full(lengths.size, owner))
            pieces.append(lengths)
            losses.append(prevented * claim.weight)
    if not owners:
        return
    owner_of, lengths, prevented = map(np.concatenate, (owners, pieces, losses))
    order = np.argsort(-prevented, kind="stable")
    order = order[prevented[order] > 0.0]
    before = np.cumsum(lengths[order]) - lengths[order]
    given = np.clip(rest - before, 0.0, lengths[order])
    for owner, more in enumerate(np.bincount(owner_of[order], given, len(claims))):
        shares[owner] += float(more)


def _give_equally(
    rest: float, claims: Sequence[Claim], shares: list[float], most: Sequence[float]
) -> None:
    """Raise `shares`, those that are smallest for their weight first, until `rest` pages are used
    up or each has its maximum in `most`.
    """
    for level in _levels(rest, claims, shares, most):
        for i, claim in enumerate(claims):
            shares[i] = max(shares[i], min(most[i], level * claim.weight))


def _levels(
    rest: float, claims: Sequence[Claim], shares: Sequence[float], most: Sequence[float]
) -> Iterator[float]:
    """Yield the share per weight up to which shares must be raised to use up `rest`, as far as
    `most` allows; nothing if there is no rest.
    """
    if rest <= 0.0:
        return

    def taken(level: float) -> float:
        return sum(
            max(0.0, min(limit, level * claim.weight) - share)
            for claim, share, limit in zip(claims, shares, most, strict=True)
        )

    marks = sorted(
        {x / c.weight for c, *pair in zip(claims, shares, most, strict=True) for x in pair}
    )
    below = marks[0]
    for mark in marks[1:]:
        if taken(mark) > rest:
            part = (rest - taken(below)) / (taken(mark) - taken(below))
            yield below + part * (mark - below)
            return
        below = mark
    yield below
