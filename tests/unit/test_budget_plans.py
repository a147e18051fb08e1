"""A budget is parsed, and planned in entries, cells and bytes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.policy.plan import (
    FlatPlan,
    HeadwisePlan,
    own_windows,
    plan_flat,
    plan_headwise,
)
from entropykv.policy.policy import POLICIES, policy_named
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.options import Budget
from tests.support import reference


def test_flat_plan_by_hand() -> None:
    positions = [0, 1, 2, 3, 7, 8, 9, 20]
    kept, removed = _core.plan_flat_eviction(
        positions, 4, _core.ScoreKind.streaming, n_sinks=1, recent_window=1
    )
    assert kept.tolist() == [0, 8, 9, 20]
    assert removed == [(1, 8)]  # Holes inside a removed range cost nothing.
    assert _core.plan_flat_eviction([], 4, _core.ScoreKind.recency, 1, 1)[1] == []


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
    mask = reference.select_survivors(head.scores(), head.positions, keep, n_sinks, recent, newest)
    kind = getattr(_core.ScoreKind, score)
    kept, removed = _core.plan_flat_eviction(positions, keep, kind, n_sinks, recent)
    assert kept.tolist() == head.positions[mask].tolist()
    gone = {p for first, last in removed for p in range(first, last)}
    assert not gone & set(kept.tolist())
    assert gone | set(kept.tolist()) >= set(positions)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(removed))


@given(
    st.sets(st.integers(0, 2**20), min_size=1, max_size=80).map(sorted),
    st.integers(0, 90),
)
def test_the_recency_score_keeps_the_newest_as_streaming_does(
    positions: list[int], keep: int
) -> None:
    """The score `recency` keeps the newest entries, as `streaming` does, because it falls with the
    distance.
    """
    plans = [
        _core.plan_flat_eviction(positions, keep, kind, n_sinks=1, recent_window=1)
        for kind in (_core.ScoreKind.streaming, _core.ScoreKind.recency)
    ]
    assert plans[0][0].tolist() == plans[1][0].tolist()


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        *((0.2, "fraction", 0.2), ("0.2", "fraction", 0.2), (1, "fraction", 1.0)),
        *(("1.0", "fraction", 1.0), (2, "tokens", 2), ("512", "tokens", 512)),
        *(("64MiB", "bytes", 64 * 2**20), ("1.5KiB", "bytes", 1536), ("1GB", "bytes", 10**9)),
        *(("20%", "fraction", 0.2), (" 12.5 % ", "fraction", 0.125), ("100%", "fraction", 1.0)),
        *((" 3 mib ", "bytes", 3 * 2**20), ("7B", "bytes", 7), (Budget("tokens", 9), "tokens", 9)),
    ],
)
def test_budgets_that_can_be_read(text: Any, kind: str, value: float) -> None:
    budget = Budget.parse(text)
    assert (budget.kind, budget.value) == (kind, value)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize("text", ["0.2", "512", "64MiB", "3GiB", "1025KiB", "1000000B", "7B"])
def test_budgets_are_shown_as_they_are_typed(text: str) -> None:
    assert str(Budget.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *(0, -1, 1.5, 2.5, "abc", "", "0MiB", "0.1B", "nan", "inf", math.nan, math.inf, None),
        *("0%", "101%", "x%", "%", "nan%", "20%%", "-5%"),
        *("-3MiB", "1e3MiB", "64 TiB", "MiB", [], "0", "-0.5", "-1", "1.5"),
    ],
)
def test_budgets_that_cannot_be_read(text: Any) -> None:
    with pytest.raises(BudgetError, match="KV budget"):
        Budget.parse(text)


@pytest.mark.parametrize("text", [10**400, "9" * 400 + "B", "1\N{KELVIN SIGN}B"], ids=range(3))
def test_impossible_numbers_and_units_are_refused_by_name(text: Any) -> None:
    with pytest.raises(BudgetError, match="KV budget"):
        Budget.parse(text)


def test_a_fraction_becomes_tokens_of_a_context() -> None:
    assert Budget.parse("20%").of_context(32768) == Budget("tokens", 6554)
    assert Budget.parse(0.0001).of_context(1000) == Budget("tokens", 2)
    for other in (Budget("tokens", 512), Budget("bytes", 1000)):
        assert other.of_context(4) == other


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
    # The plan wastes no part of the budget: another page would exceed it.
    assert plan.mean_entries == n_ctx or more > n_bytes


@given(st.floats(0.05, 1.0), st.integers(256, 4096))
def test_a_fraction_is_of_the_context(fraction: float, n_ctx: int) -> None:
    entries = headwise(Budget.parse(fraction), n_ctx).mean_entries
    assert fraction * n_ctx - 1 < entries <= fraction * n_ctx + 1e-9


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("adaptive:mass+values+predicted", 375),
        ("adaptive:attention+predicted", 375),
        ("adaptive", 500),
        ("adaptive:mass+values+echo", 500),
        ("adaptive:predicted", 500),
        ("uniform:mass+values+predicted", 500),
    ],
)
def test_only_budgets_that_follow_the_text_with_added_predictions_have_a_smaller_window(
    name: str, window: int
) -> None:
    policy = policy_named(name, None, "headwise")
    plan = plan_headwise(Budget.parse(1000), SHAPES, 4096, "q8_0", policy, None, 4, None)
    assert (plan.mean_entries, plan.protection.recent_window) == (1000, window)
    assert plan.floor_entries == 4 + window
    assert own_windows(policy, None) == (window == 375)
    assert not own_windows(policy, 700)
    given = plan_headwise(Budget.parse(1000), SHAPES, 4096, "q8_0", policy, None, 4, 700)
    assert given.protection.recent_window == 700


@pytest.mark.parametrize(("name", "eighths"), [("guided", 3), ("profile", 4)])
def test_curves_that_count_alone_leave_the_window_they_were_measured_with(
    name: str, eighths: int
) -> None:
    policy = policy_named(f"{name}:mass+values+predicted", PROFILE, "headwise")
    assert policy.window_eighths == eighths
    assert own_windows(policy, None) == (eighths == 3)


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
    """Check that a plan takes the smallest budgets that an error names, in tokens and in bytes, and
    refuses one less.
    """
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
