"""The way in which policy auto uses a profile: what a comparison chooses, and what its file has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entropykv.cli.profile import comparison_lines
from entropykv.errors import ProfileError
from entropykv.policy.names import POLICIES, policy_named
from entropykv.profile.profile import EntropyProfile
from entropykv.profile.ways import (
    MARGIN,
    NO_PROFILE,
    PREDICTOR_ONLY,
    WAYS,
    ComparedWay,
    WayComparison,
    best_way,
)
from tests.support.profiles import example

CURVES, PREDICTED, CURVES_ALONE = WAYS[2:]
QWEN = {NO_PROFILE: 0.11, PREDICTOR_ONLY: 0.0957, CURVES: 0.1374, PREDICTED: 0.1653}
"""KL of Qwen2.5-Coder-0.5B, with which the budgets of its profile lose."""


def compared(
    divergences: dict[str, float],
    facts: dict[str, int] | None = None,
    repetitions: dict[str, float] | None = None,
) -> WayComparison:
    """Return a comparison at one budget; ways know ten facts and repeat equally, if not given."""
    known, repeated = facts or {}, repetitions or {}
    ways = tuple(
        ComparedWay(way, (kl,), (repeated.get(way, 0.2),), (known.get(way, 10),))
        for way, kl in divergences.items()
    )
    repeats = 1.0 if repeated else 0.0
    return WayComparison((0.1,), 2, 1024, 16 if known else 0, repeats, ways, NO_PROFILE)


@pytest.mark.parametrize(
    ("divergences", "facts", "best"),
    [
        (QWEN, {}, PREDICTOR_ONLY),
        ({**QWEN, CURVES: 0.05}, {}, CURVES),
        ({**QWEN, CURVES: 0.05, PREDICTED: 0.04}, {}, PREDICTED),
        ({**QWEN, CURVES: 0.05, PREDICTED: 0.049}, {}, CURVES),  # This gain is less than MARGIN.
        ({**QWEN, CURVES: 0.093}, {}, PREDICTOR_ONLY),
        ({**QWEN, PREDICTOR_ONLY: 0.12}, {}, NO_PROFILE),
        ({**QWEN, PREDICTOR_ONLY: 0.11}, {}, PREDICTOR_ONLY),  # It reads texts once.
        ({**QWEN, PREDICTOR_ONLY: 0.12, CURVES: 0.08}, {}, CURVES),
        ({**QWEN, PREDICTOR_ONLY: 0.12, CURVES: 0.107}, {}, NO_PROFILE),
        (QWEN, {PREDICTOR_ONLY: 5}, NO_PROFILE),
        (QWEN, {CURVES: 12, PREDICTOR_ONLY: 9}, NO_PROFILE),
        (QWEN, {CURVES: 12, PREDICTOR_ONLY: 10}, PREDICTOR_ONLY),
        ({**QWEN, CURVES_ALONE: 0.05}, {CURVES_ALONE: 9}, PREDICTOR_ONLY),  # It forgets a fact.
        ({**QWEN, CURVES_ALONE: 0.05}, {CURVES_ALONE: 10}, CURVES_ALONE),
        ({**QWEN, CURVES: 0.092}, {CURVES: 12}, CURVES),
        ({NO_PROFILE: 0.1, CURVES: 0.12}, {}, NO_PROFILE),
        ({NO_PROFILE: 0.1, CURVES: 0.08}, {}, CURVES),
        ({NO_PROFILE: 0.0, PREDICTOR_ONLY: 0.0}, {}, PREDICTOR_ONLY),
    ],
)
def test_the_least_loss_wins_and_ties_go_to_the_simpler_way(
    divergences: dict[str, float], facts: dict[str, int], best: str
) -> None:
    assert best_way(compared(divergences, facts)) == best


def test_repetitions_count_as_far_as_the_model_repeats() -> None:
    """A model that answers word for word needs other entries than one that goes on; facts say more
    if it knows some.
    """
    repetitions = {NO_PROFILE: 0.5, PREDICTOR_ONLY: 0.5, CURVES: 0.9, PREDICTED: 0.3}
    comparison = compared({**QWEN, CURVES: 0.08, PREDICTED: 0.085}, {}, repetitions)
    assert best_way(comparison) == PREDICTED
    assert best_way(replace(comparison, repeats=0.01)) == CURVES
    assert best_way(replace(comparison, n_facts=5)) == PREDICTED
    assert best_way(replace(comparison, n_facts=16)) == CURVES


def test_nothing_is_chosen_that_loses_more_than_no_profile() -> None:
    """Not even where it gains at one of the budgets."""
    for first in (0.5, 0.9, 1.0, 1.2):
        for second in (0.5, 1.0, 1.1, 1.6):
            ways = (
                ComparedWay(NO_PROFILE, (0.1, 0.2), (0.0, 0.0), (8, 8)),
                ComparedWay(PREDICTOR_ONLY, (0.1 * second, 0.2 * second), (0.0, 0.0), (8, 8)),
                ComparedWay(CURVES, (0.1 * first, 0.2 * second), (0.0, 0.0), (8, 8)),
            )
            comparison = WayComparison((0.2, 0.1), 2, 1024, 0, 0.0, ways, NO_PROFILE)
            loss = {NO_PROFILE: 1.0, PREDICTOR_ONLY: second, CURVES: (first + second) / 2}
            best = loss[best_way(comparison)]
            assert best <= 1.0
            assert best <= min(loss.values()) + MARGIN


def with_best(best: str, **changed: Any) -> EntropyProfile:
    return replace(example(), comparison=replace(compared(QWEN), best=best), **changed)


def test_policy_auto_goes_the_way_that_the_profile_names() -> None:
    for best, budgets in (
        (PREDICTOR_ONLY, "adaptive"),
        (CURVES, "guided"),
        (PREDICTED, "guided"),
        (CURVES_ALONE, "profile"),
    ):
        profile = with_best(best)
        assert policy_named("auto", profile, "headwise") == policy_named(best, profile, "headwise")
        assert policy_named("fast", profile, "headwise") == POLICIES[budgets]
        assert policy_named("auto", profile, "headwise", recurrent=True) == POLICIES[budgets]
        unpredictable = policy_named("auto", profile, "headwise", predictable=False).name
        assert unpredictable in (f"{budgets}:mass+values+echo", f"{budgets}:reconstruct")
    none = with_best(NO_PROFILE, predictor=None)
    assert policy_named("auto", none, "headwise") == policy_named("auto", None, "headwise")


def test_curves_that_count_must_be_there() -> None:
    with pytest.raises(ProfileError, match=r"comparison\.best is guided.*, which needs curves"):
        with_best(CURVES, curves=None)
    with_best(PREDICTOR_ONLY, curves=None)


def test_a_device_store_still_shares_by_curves() -> None:
    """Its budgets cannot follow the text, and were not compared."""
    profile = with_best(PREDICTOR_ONLY)
    assert policy_named("auto", profile, "device").name == "profile:mass+values+predicted"


def test_a_file_without_a_comparison_means_what_it_meant() -> None:
    profile = replace(example(), comparison=None)
    assert policy_named("auto", profile, "headwise").name == "profile:predicted"
    assert policy_named("fast", profile, "headwise").name == "profile"


def test_the_table_says_what_was_lost_and_what_auto_does() -> None:
    profile = with_best(PREDICTOR_ONLY)
    assert profile.comparison is not None
    text = "\n".join(comparison_lines(profile.comparison))
    assert "budgets of 10% of the bytes, in 2 held-back texts of up to 1,024 tokens" in text
    assert "no profile" in text
    for way, kl in QWEN.items():
        assert f"{kl:.4f}" in text
        assert way == NO_PROFILE or way in text
    assert f"* {PREDICTOR_ONLY}" in text
    assert "budgets by loss curves gain nothing" in text
    for best, said in (
        (NO_PROFILE, "policy auto does not use it"),
        (CURVES, f"auto is {CURVES}"),
        (CURVES_ALONE, f"auto is {CURVES_ALONE}"),
    ):
        other = with_best(best).comparison
        assert other is not None
        assert said in comparison_lines(other)[-1]
    short = WayComparison((), 0, 0, 0, 0.0, (), PREDICTOR_ONLY)
    assert "too short" in comparison_lines(short)[0]
