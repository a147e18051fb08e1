"""Share pages among KV heads, and compute the losses of their budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.reference.attending import Options, biased, visible
from tests.support.reference.ranking import select_survivors
from tests.support.reference.values import Floats


def pages_for(entries: int, entries_per_page: int) -> int:
    """Return how many whole pages hold this many entries."""
    return -(-entries // entries_per_page)


def check_shares(
    budgets: Sequence[int],
    mean: int,
    most: int,
    floor: int,
    pages: list[int],
    limits: Sequence[int] = (),
) -> None:
    """Assert that budgets keep floor and limits, and take no more entries and pages than equal
    ones; `pages` has the entries per page of every head.
    """
    mean = min(mean, most)
    assert len(budgets) == len(pages)
    limits = [min(limit, most) for limit in limits or [most] * len(pages)]
    for budget, limit in zip(budgets, limits, strict=True):
        assert min(floor, limit) <= budget <= limit
    assert sum(budgets) <= mean * len(budgets)
    used = sum(pages_for(budget, n) for budget, n in zip(budgets, pages, strict=True))
    assert used <= sum(pages_for(mean, n) for n in pages)


def convex_hull_at(knots: Sequence[float], losses: Sequence[float], at: float) -> float:
    """Return the lower convex hull of a curve at one point: the lowest of all chords there."""
    best = np.inf
    for i, left in enumerate(knots):
        for j, right in enumerate(knots):
            if i == j and left == at:
                best = min(best, losses[i])
            elif left <= at <= right and left < right:
                share = (at - left) / (right - left)
                best = min(best, losses[i] + share * (losses[j] - losses[i]))
    return float(best)


def curve_shares(
    knots: Sequence[float], losses: Floats, total: float, limits: Sequence[float] = ()
) -> Floats:
    """Return the entries of every head that minimise the sum of hulls, for losses [head][knot].

    No head gets more than its limit, if there are `limits`.

    The search is by the price of an entry: at a price, the optimal number of entries of every head
    is a range; at the price whose summed range contains `total`, all heads take the same fraction
    of their range.
    """
    hulls = np.array([[convex_hull_at(knots, head, k) for k in knots] for head in losses])
    slopes = (hulls[:, :-1] - hulls[:, 1:]) / np.diff(knots)
    ends = np.minimum(knots, np.array(limits)[:, None] if len(limits) else np.inf)
    steps = np.broadcast_to(np.diff(ends, axis=-1), slopes.shape)
    tolerance = 1e-9 * max(1.0, float(slopes.max(initial=0.0)))
    for price in sorted(set(slopes.ravel().tolist()), reverse=True):
        least = np.where(slopes > price + tolerance, steps, 0.0).sum(axis=1)
        most = np.where(slopes >= price - tolerance, steps, 0.0).sum(axis=1)
        if most.sum() >= total:
            part = (total - least.sum()) / max(most.sum() - least.sum(), 1e-300)
            return np.asarray(least + np.clip(part, 0.0, 1.0) * (most - least))
    return np.asarray(steps.sum(axis=1))


def layer_shares(entropies: Floats, total: float, in_range: tuple[int, int] | None) -> Floats:
    """Return the shares of layers, (n_layer,), by Kim and Jung (2025): k_l = total * I_l / sum I.

    With `in_range`, I_l is first scaled linearly into that range.
    """
    weights = entropies
    if in_range is not None:
        least, most = in_range
        low, high = entropies.min(), entropies.max()
        weights = least + (most - least) * (entropies - low) / (high - low)
    return np.asarray(total * weights / weights.sum())


def curve_losses(
    q: Floats, k: Floats, v: Floats, importance: Floats, rules: Any, options: Options
) -> tuple[Floats, Floats, float]:
    """Return for a KV head the lost attention mass, the mean squares of dropped outputs, and that
    of whole outputs.

    Entries are ranked by their contribution to the outputs: importance * |v|^2. q [n][group][k_dim]
    are the last queries of a text; k and v have T rows; importance is [n_read]. Each number in
    rules.keep is computed separately, with the entries that select_survivors() keeps.
    """
    first = len(k) - len(q)
    positions = np.arange(len(k))
    mass, dropped = [], []
    scores = importance * (v[:first] ** 2).sum(axis=1)
    logits = np.einsum("ngd,td->ngt", q, k) * options.scale
    if options.softcap > 0.0:
        logits = options.softcap * np.tanh(logits / options.softcap)
    logits = biased(logits, first + np.arange(len(q)), positions, options)
    seen = visible(first + np.arange(len(q)), positions, options)
    weights = np.exp(np.where(seen[:, None, :], logits, -np.inf))
    sinks = 0.0 if options.sinks is None else np.exp(options.sinks)[None, :]
    p = weights / (weights.sum(axis=2) + sinks)[:, :, None]
    whole = np.einsum("ngt,td->ngd", p, v)
    for extra in rules.keep:
        keep = rules.n_sinks + rules.recent_window + extra
        kept = select_survivors(
            scores, positions[:first], keep, rules.n_sinks, rules.recent_window, first - 1
        )
        gone = np.flatnonzero(~kept)
        mass.append(p[:, :, gone].sum(axis=2).mean())
        lost = np.einsum("ngt,td->ngd", p[:, :, gone], v[gone])
        dropped.append((lost**2).sum(axis=2).mean())
    return np.array(mass), np.array(dropped), float((whole**2).sum(axis=2).mean())
