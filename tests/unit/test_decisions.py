"""Decisions are right: which entries survive, and how weights become budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from entropykv import _core
from tests.support import reference

SCORES = st.one_of(st.integers(0, 5).map(float), st.floats(-1e3, 1e3, width=32))


def survivors(*arguments: Any) -> list[int]:
    return [int(i) for i in np.flatnonzero(_core.select_survivors(*arguments))]


@pytest.mark.parametrize(
    ("scores", "keep", "n_sinks", "recent", "expected"),
    [
        ([5, 1, 4, 2, 3], 2, 0, 0, [0, 2]),
        ([5, 1, 4, 2, 3], 9, 0, 0, [0, 1, 2, 3, 4]),
        ([1, 9, 9, 9, 1], 2, 0, 0, [1, 2]),  # Of equal scores, the first index survives.
        ([1, 9, 9, 9, 1], 3, 1, 1, [0, 1, 4]),
        ([9, 9, 9, 9, 9], 0, 1, 2, [0, 3, 4]),  # More entries are protected than `keep` allows.
        ([0, 0, 0, 0, 0], 0, 0, 0, []),
        ([-3, -1, -2, -5, -4], 1, 0, 0, [1]),
    ],
)
def test_survivors_by_hand(
    scores: list[float], keep: int, n_sinks: int, recent: int, expected: list[int]
) -> None:
    positions = list(range(len(scores)))
    assert survivors(scores, positions, keep, n_sinks, recent, 4) == expected


scored = st.lists(
    st.tuples(SCORES, st.integers(0, 80)), max_size=60, unique_by=lambda pair: pair[1]
)


@given(scored, st.integers(0, 70), st.integers(0, 20), st.integers(0, 20))
def test_survivors_are_those_of_the_oracle(
    entries: list[tuple[float, int]], keep: int, n_sinks: int, recent: int
) -> None:
    scores = np.array([score for score, _ in entries], np.float32)
    positions = np.array([position for _, position in entries], np.int64)
    newest = int(positions.max(initial=0))
    expected = reference.select_survivors(scores, positions, keep, n_sinks, recent, newest)
    actual = _core.select_survivors(scores, positions, keep, n_sinks, recent, newest)
    np.testing.assert_array_equal(actual, expected)


SAMPLED = np.arange(384)
SPREADS: dict[str, Callable[[np.random.Generator, int], npt.NDArray[Any]]] = {
    "equal": lambda random, n: np.full(n, random.standard_normal()),
    "ties": lambda random, n: random.integers(0, 7, n),
    "few ties": lambda random, n: random.integers(0, 10_000, n),
    "close": lambda random, n: 1.0 + random.integers(0, 3_000, n) * 2.0**-23,
    "wide": lambda random, n: random.choice([-1, 1], n) * 10 ** random.uniform(-38, 38, n),
    "misleading": lambda random, n: np.isin(np.arange(n), SAMPLED * n // 384) + random.random(n),
}
"""Scores by kind: equal, with many ties or few, close together, far apart, and higher at the 384
places that a selection samples.
"""


@pytest.mark.parametrize("n_dropped", [1, 16, 63, 250])
@pytest.mark.parametrize("n", [400, 511, 512, 513, 5_000])
@pytest.mark.parametrize("spread", SPREADS)
def test_survivors_of_many_are_those_of_the_oracle(n_dropped: int, n: int, spread: str) -> None:
    random = np.random.default_rng(n_dropped)
    scores = SPREADS[spread](random, n).astype(np.float32)
    positions = random.permutation(2 * n)[:n]
    newest = int(positions.max())
    arguments = (scores, positions, n - n_dropped, 4, 60, newest)
    np.testing.assert_array_equal(
        _core.select_survivors(*arguments), reference.select_survivors(*arguments)
    )


@given(st.integers(2, 20_000), st.integers(1, 600), st.integers(0, 8), st.floats(0.0, 1.0))
def test_an_eviction_makes_the_room_of_the_oracle(
    budget: int, n_new: int, n_sinks: int, share: float
) -> None:
    """An eviction leaves as many entries as in the oracle, which makes room for 64 at most."""
    n_sinks = min(n_sinks, budget)
    arguments = (budget, n_new, n_sinks, int(share * (budget - n_sinks)))
    kept = _core.entries_to_keep(*arguments)
    assert kept == reference.entries_to_keep(*arguments)
    assert budget - 64 <= kept <= budget


def test_entropy_weights() -> None:
    weights = _core.entropy_weights([2.0, 0.1, 4.0, 9.0], 2.0, 0.3, 2.5)
    assert weights == pytest.approx([1.0, 0.3, 2.0, 2.5])
    assert _core.entropy_weights([0.0, 0.0], 0.0, 0.3, 2.5) == [1.0, 1.0]
    assert _core.entropy_weights([], 1.0, 0.3, 2.5) == []


def limits_of(pages: list[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 700), min_size=len(pages), max_size=len(pages))


page_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=24)


@settings(max_examples=400)
@given(st.data(), page_sizes, st.integers(1, 600), st.integers(1, 700), st.integers(0, 600))
def test_shares_stay_within_every_limit(
    data: st.DataObject, pages: list[int], mean: int, most: int, floor: int
) -> None:
    assume(floor <= min(mean, most))
    weight = st.one_of(st.floats(0.3, 2.5), st.floats(1e-3, 1e6), st.just(0.0))
    weights = data.draw(st.lists(weight, min_size=len(pages), max_size=len(pages)))
    limits = data.draw(st.one_of(st.just([]), limits_of(pages)))
    budgets = _core.share_budget(mean, most, floor, pages, weights, limits)
    reference.check_shares(budgets, mean, most, floor, pages, limits)


@settings(max_examples=400)
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=24),
    st.integers(1, 40),
    st.integers(1, 600),
    st.integers(1, 700),
    st.integers(0, 600),
)
def test_what_heads_with_a_limit_cannot_use_goes_to_the_others(
    limits: list[int], per_page: int, mean: int, most: int, floor: int
) -> None:
    assume(floor <= min(mean, most))
    pages = [per_page] * len(limits)
    by_weights = _core.share_budget(mean, most, floor, pages, [], limits)
    knots, losses = [0.0, float(most)], [1.0, 0.0] * len(pages)
    by_curves = _core.share_by_curves(mean, most, floor, pages, knots, losses, limits)
    for budgets in (by_weights, by_curves):
        reference.check_shares(budgets, mean, most, floor, pages, limits)
        # Only rounding to whole pages may leave something, and never more pages than equal shares
        # take.
        wanted = min(min(mean, most) * len(pages), sum(min(limit, most) for limit in limits))
        assert sum(budgets) >= wanted - 2 * sum(pages)


@given(page_sizes, st.integers(0, 600), st.integers(1, 600))
def test_equal_heads_get_the_mean_and_never_more_than_all(
    pages: list[int], mean: int, most: int
) -> None:
    n_heads = len(pages)
    assert _core.share_budget(mean, most, 0, pages, []) == [min(mean, most)] * n_heads
    weights = [1.0 + i for i in range(n_heads)]
    assert _core.share_budget(most + mean, most, 0, pages, weights) == [most] * n_heads


small = st.integers(0, 300)


@given(st.integers(2, 12), st.integers(1, 40), small, small, st.floats(0.3, 2.5))
def test_the_head_of_another_weight_gets_no_less_or_no_more(
    n_heads: int, per_page: int, floor: int, beyond: int, weight: float
) -> None:
    weights = [weight] + [1.0] * (n_heads - 1)
    first, *rest = _core.share_budget(floor + beyond, 1000, floor, [per_page] * n_heads, weights)
    assert first >= max(rest) if weight >= 1.0 else first <= max(rest)


def test_shares_follow_the_weights() -> None:
    budgets = _core.share_budget(100, 1000, 20, [4] * 4, [0.5, 0.5, 1.0, 2.0])
    # Each head gets 20 + 80 * weight, which are whole pages here.
    assert budgets == [60, 60, 100, 180]
    # A head that has all it can use leaves the rest to the others.
    assert _core.share_budget(100, 160, 20, [4] * 3, [1.0, 1.0, 8.0]) == [72, 68, 160]


def test_decisions_without_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        _core.select_survivors([1.0, 2.0], [0], 1, 0, 0, 1)
    with pytest.raises(ValueError, match="below the floor"):
        _core.share_budget(10, 100, 11, [16], [1.0])
