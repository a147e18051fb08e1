"""Divide the pages of a pool among its sequences: who needs less leaves the rest to others.

Pure: SharedPool asks between two steps, and follows.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class WholeTexts:
    """Say which texts some pages keep whole: while the bytes hold all of a text, nothing goes.

    Only for longer texts, the policy plans what is kept.
    """

    pages: int
    most: int
    """Tokens of the longest text at all."""
    pages_of: Callable[[int], int]
    """The pages for all entries of so many tokens."""

    @functools.cached_property
    def longest(self) -> int:
        """Return how many tokens the longest of them has."""
        return bisect.bisect_right(range(self.most + 1), self.pages, key=self.pages_of) - 1

    def hold(self, n_tokens: int) -> bool:
        """Tell whether a text is one of them; where none is expected, the policy plans for it."""
        return 0 < n_tokens <= self.longest

    def length_for(self, n_tokens: int, wanted: int) -> int | None:
        """Return how long a text of `n_tokens` may get and stay one of them, up to `wanted`.

        None where it is none of them.
        """
        if self.pages_of(wanted) <= self.pages:
            return wanted
        return self.longest if self.hold(n_tokens) else None


@dataclass(frozen=True, eq=False)
class LossCurve:
    """What a sequence loses with fewer pages: pieces of them, the most valuable first."""

    begin: float
    """Pages below the first piece: sinks and recent windows, of which no loss is known."""
    pages: Floats
    """Length of every piece."""
    losses: Floats
    """Loss that a page of each piece prevents, descending."""

    @classmethod
    def of_heads(
        cls,
        floors: npt.NDArray[np.int64],
        per_page: npt.NDArray[np.int64],
        knots: Floats,
        losses: Floats,
    ) -> LossCurve:
        """Join the curves of KV heads, each of which gets the page that prevents most.

        `losses`: [KV head][knot], at so many entries beyond `floors`; convex, as sums of all but
        the largest scores are. `per_page`: entries of every KV head in a page.
        """
        pages = np.diff(knots)[None, :] / per_page[:, None]
        prevented = np.maximum(-np.diff(losses, axis=1), 0.0) / pages
        order = np.argsort(-prevented, axis=None, kind="stable")
        return cls(float((floors / per_page).sum()), pages.ravel()[order], prevented.ravel()[order])

    def between(self, low: float, high: float) -> tuple[Floats, Floats]:
        """Return the pieces from `low` to `high` pages, and what a page of each prevents.

        Below `begin`, a page prevents as much as one of the first piece, at least; beyond the last
        piece, nothing.
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
    """What a sequence asks of a pool, in pages."""

    needed: int
    """With so many, nothing of its text is evicted."""
    floor: int
    """What it has in any case, as far as it needs it: sinks and recent windows of an equal part."""
    weight: float = 1.0
    """Its part, relative to those of the others."""
    curve: LossCurve | None = None
    """What it loses with fewer pages than it needs; None: not known, or it does not count."""


def equal_parts(pages: int, weights: Sequence[float]) -> list[int]:
    """Return parts of the pages that are equal but for weights."""
    total = sum(weights)
    return [int(pages * weight / total) for weight in weights]


def divide(pages: int, claims: Sequence[Claim]) -> list[int]:
    """Return the pages of every sequence, together no more than `pages`.

    Parts are equal, but for weights, where that is enough for all. Otherwise each has its equal
    part as far as it needs it, and what others leave goes to those who need more, in equal parts
    again. Of those with a loss curve that need more than their part, only the floor is sure: what
    they have beyond it goes where a page prevents most loss, times the weight.
    """
    parts = equal_parts(pages, [claim.weight for claim in claims])
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
    """Return the pages that nobody takes from a sequence whose equal part is `part`."""
    if claim.curve is None or claim.needed <= part:
        return min(claim.needed, part)
    return min(claim.floor, part)


def _give_by_losses(rest: float, claims: Sequence[Claim], shares: list[float]) -> None:
    """Give pages to those with curves, the ones that prevent most loss first."""
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
    """Raise the shares, those that are smallest for their weight first, up to the most of each."""
    for level in _levels(rest, claims, shares, most):
        for i, claim in enumerate(claims):
            shares[i] = max(shares[i], min(most[i], level * claim.weight))


def _levels(
    rest: float, claims: Sequence[Claim], shares: Sequence[float], most: Sequence[float]
) -> Iterator[float]:
    """Yield the share per weight that takes all of the rest, if anybody takes anything."""
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
