"""Pure decisions: which entries survive, how a budget is read and shared."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.policy.names import POLICIES
from entropykv.policy.plan import FlatPlan, HeadwisePlan, plan_flat, plan_headwise
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.options import Budget
from tests.support import reference

SCORES = st.one_of(st.integers(0, 5).map(float), st.floats(-1e3, 1e3, width=32))


def survivors(*arguments: Any) -> list[int]:
    return [int(i) for i in np.flatnonzero(_core.select_survivors(*arguments))]


@pytest.mark.parametrize(
    ("scores", "keep", "n_sinks", "recent", "expected"),
    [
        ([5, 1, 4, 2, 3], 2, 0, 0, [0, 2]),
        ([5, 1, 4, 2, 3], 9, 0, 0, [0, 1, 2, 3, 4]),
        ([1, 9, 9, 9, 1], 2, 0, 0, [1, 2]),  # ties: the earlier index
        ([1, 9, 9, 9, 1], 3, 1, 1, [0, 1, 4]),
        ([9, 9, 9, 9, 9], 0, 1, 2, [0, 3, 4]),  # more are protected than may stay
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
    """Entries are in no order of positions."""
    scores = np.array([score for score, _ in entries], np.float32)
    positions = np.array([position for _, position in entries], np.int64)
    newest = int(positions.max(initial=0))
    expected = reference.select_survivors(scores, positions, keep, n_sinks, recent, newest)
    actual = _core.select_survivors(scores, positions, keep, n_sinks, recent, newest)
    np.testing.assert_array_equal(actual, expected)


def test_recency_score_by_hand() -> None:
    # newest 100, no variation: alpha = 0.02, the newest tenth is a distance below 10
    assert _core.recency_score(100, 100, 0.0) == pytest.approx(1.5)
    assert _core.recency_score(91, 100, 0.0) == pytest.approx(math.exp(-0.18) + 0.5)
    assert _core.recency_score(90, 100, 0.0) == pytest.approx(math.exp(-0.2))
    assert _core.recency_score(0, 100, 0.0) == pytest.approx(math.exp(-2))
    assert _core.recency_score(0, 100, 1.0) == pytest.approx(math.exp(-1))  # half the alpha
    assert _core.recency_score(0, 0, 0.5) == pytest.approx(1.5)


@given(st.integers(0, 100_000), st.floats(0.0, 1.0), st.floats(0.0, 4.0, width=32))
def test_recency_score_is_that_of_the_oracle(
    newest: int, fraction: float, variation: float
) -> None:
    position = int(fraction * newest)
    expected = reference.recency_score(position, newest, variation)
    assert _core.recency_score(position, newest, variation) == pytest.approx(expected, rel=1e-5)


def test_entropy_weights() -> None:
    weights = _core.entropy_weights([2.0, 0.1, 4.0, 9.0], 2.0, 0.3, 2.5)
    assert weights == pytest.approx([1.0, 0.3, 2.0, 2.5])
    assert _core.entropy_weights([0.0, 0.0], 0.0, 0.3, 2.5) == [1.0, 1.0]
    assert _core.entropy_weights([], 1.0, 0.3, 2.5) == []


# sharing a budget


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
        # rounding to whole pages of entries, and within the pages of equal shares, aside
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
    assert budgets == [60, 60, 100, 180]  # 20 + 80 * weight: whole pages as it happens
    # a head with all it can use leaves the rest to the others
    assert _core.share_budget(100, 160, 20, [4] * 3, [1.0, 1.0, 8.0]) == [72, 68, 160]


def test_decisions_without_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        _core.select_survivors([1.0, 2.0], [0], 1, 0, 0, 1)
    with pytest.raises(ValueError, match="below the floor"):
        _core.share_budget(10, 100, 11, [16], [1.0])


# flat eviction


def test_flat_plan_by_hand() -> None:
    positions = [0, 1, 2, 3, 7, 8, 9, 20]
    kept, removed = _core.plan_flat_eviction(
        positions, 4, _core.ScoreKind.streaming, 0.0, n_sinks=1, recent_window=1
    )
    assert kept.tolist() == [0, 8, 9, 20]
    assert removed == [(1, 8)]  # holes inside a range cost nothing
    assert _core.plan_flat_eviction([], 4, _core.ScoreKind.recency, 0.0, 1, 1)[1] == []


@given(
    st.sets(st.integers(0, 300), min_size=1, max_size=80).map(sorted),
    st.integers(0, 90),
    st.sampled_from(["streaming", "recency"]),
    st.floats(0.0, 2.0, width=32),
    st.integers(0, 8),
    st.integers(0, 30),
)
def test_flat_plan_is_that_of_the_oracle(
    positions: list[int], keep: int, score: str, variation: float, n_sinks: int, recent: int
) -> None:
    rules = reference.Rules(score, "f16", n_sinks, recent, variation)
    head = reference.ReferenceHead(rules, 1, 1, keep, positions=np.array(positions))
    newest = positions[-1]
    mask = reference.select_survivors(
        head.scores(keep), head.positions, keep, n_sinks, recent, newest
    )
    kind = getattr(_core.ScoreKind, score)
    kept, removed = _core.plan_flat_eviction(positions, keep, kind, variation, n_sinks, recent)
    assert kept.tolist() == head.positions[mask].tolist()
    gone = {p for first, last in removed for p in range(first, last)}
    assert not gone & set(kept.tolist())
    assert gone | set(kept.tolist()) >= set(positions)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(removed))


# reading a budget


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        *((0.2, "fraction", 0.2), ("0.2", "fraction", 0.2), (1, "fraction", 1.0)),
        *(("1.0", "fraction", 1.0), (2, "tokens", 2), ("512", "tokens", 512)),
        *(("64MiB", "bytes", 64 * 2**20), ("1.5KiB", "bytes", 1536), ("1GB", "bytes", 10**9)),
        *((" 3 mib ", "bytes", 3 * 2**20), ("7B", "bytes", 7), (Budget("tokens", 9), "tokens", 9)),
    ],
)
def test_budgets_that_can_be_read(text: Any, kind: str, value: float) -> None:
    budget = Budget.parse(text)
    assert (budget.kind, budget.value) == (kind, value)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    "text",
    [
        *(0, -1, 1.5, 2.5, "abc", "", "0MiB", "0.1B", "nan", "inf", math.nan, math.inf, None),
        *("-3MiB", "1e3MiB", "64 TiB", "MiB", [], "0", "-0.5"),
    ],
)
def test_budgets_that_cannot_be_read(text: Any) -> None:
    with pytest.raises(BudgetError, match="KV budget"):
        Budget.parse(text)


@pytest.mark.parametrize("text", [10**400, "9" * 400 + "B", "1\N{KELVIN SIGN}B"], ids=range(3))
def test_impossible_numbers_and_units_are_refused_by_name(text: Any) -> None:
    with pytest.raises(BudgetError, match="KV budget"):
        Budget.parse(text)


# planning

SHAPES = [_core.LayerShape(8, 2, 64, 64), _core.LayerShape(4, 4, 128, 64)]
PROFILE = EntropyProfile(1, 24, 6, 512, np.linspace(0.1, 6.0, 24).reshape(1, 24))


def headwise(
    budget: Budget, n_ctx: int, recent: int | None = None, kv_type: str = "q8_0"
) -> HeadwisePlan:
    return plan_headwise(budget, SHAPES, n_ctx, kv_type, POLICIES["entropy"], PROFILE, 4, recent)


@given(st.integers(100_000, 5_000_000), st.integers(64, 4096), st.sampled_from(["f16", "q8_0"]))
def test_a_headwise_plan_fits_its_bytes_and_its_pool(n_bytes: int, n_ctx: int, kind: str) -> None:
    plan = headwise(Budget("bytes", n_bytes), n_ctx, kv_type=kind)
    assert plan.pool_bytes <= n_bytes
    flat = [budget for layer in plan.budgets for budget in layer]
    _, per_page = _core.page_geometry(SHAPES, kind)
    pages = [per_page[0]] * 2 + [per_page[1]] * 4
    reference.check_shares(flat, plan.mean_entries, n_ctx, plan.protection.entries, pages)
    more = sum(_core.pages_for(plan.mean_entries + 1, n) for n in pages) * plan.page_bytes
    assert plan.mean_entries == n_ctx or more > n_bytes  # nothing is wasted


@given(st.floats(0.05, 1.0), st.integers(256, 4096))
def test_a_fraction_is_of_the_context(fraction: float, n_ctx: int) -> None:
    entries = headwise(Budget.parse(fraction), n_ctx).mean_entries
    assert fraction * n_ctx - 1 < entries <= fraction * n_ctx + 1e-9


def test_a_fraction_loses_no_entry_to_rounding() -> None:
    assert headwise(Budget.parse(0.29), 1000).mean_entries == 290


@given(st.integers(1000, 10**6), st.integers(8, 4096), st.sampled_from([16, 256, 512]))
def test_a_flat_plan_fits_its_bytes_and_a_micro_batch(n_bytes: int, n_ctx: int, batch: int) -> None:
    try:
        plan = plan_flat(Budget("bytes", n_bytes), 100, n_ctx, batch, 4, None)
    except BudgetError:
        assert n_bytes < 100 * (batch + 7 + 256)
        return
    assert plan.cells * 100 <= n_bytes
    assert plan.cells % 256 == 0
    assert plan.cells >= min(plan.entries + batch, n_ctx)


def test_bytes_for_the_whole_context_give_the_whole_context() -> None:
    whole = plan_flat(Budget.parse(1.0), 1, 4096, 512, 4, None)
    assert plan_flat(Budget("bytes", whole.cells), 1, 4096, 512, 4, None) == whole


def check_smallest(plan: Callable[[Budget], HeadwisePlan | FlatPlan], error: BudgetError) -> None:
    """The tokens and the bytes that the message states work, and one less does not."""
    match = re.search(r"is (\d+) tokens \((\d+) bytes\)", str(error))
    assert match is not None
    for budget in (Budget("tokens", int(match[1])), Budget("bytes", int(match[2]))):
        plan(budget)
        with pytest.raises(BudgetError, match="the smallest budget"):
            plan(Budget(budget.kind, budget.value - 1))


@given(st.integers(2, 500), st.one_of(st.none(), st.integers(1, 600)), st.integers(8, 512))
@example(2, None, 512)
def test_the_smallest_headwise_budget_works(tokens: int, recent: int | None, n_ctx: int) -> None:
    try:
        headwise(Budget("tokens", tokens), n_ctx, recent)
    except BudgetError as error:
        check_smallest(lambda budget: headwise(budget, n_ctx, recent), error)
    else:
        assert tokens >= min(n_ctx, 4 + (recent or 3))


@pytest.mark.parametrize("recent", [None, 100, 600])
def test_the_smallest_flat_budget_works(recent: int | None) -> None:
    def plan(budget: Budget) -> FlatPlan:
        return plan_flat(budget, 100, 512, 256, 4, recent)

    with pytest.raises(BudgetError) as raised:
        plan(Budget("tokens", 3))
    check_smallest(plan, raised.value)
