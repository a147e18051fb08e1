"""The way in which policy auto uses a profile: what a comparison chooses, and what its file has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv.cli.profile import comparison_lines
from entropykv.errors import ProfileError
from entropykv.policy.names import POLICIES, policy_named
from entropykv.profile.profile import EntropyProfile
from entropykv.profile.ways import (
    NO_PROFILE,
    PREDICTOR_ONLY,
    WAYS,
    ComparedWay,
    WayComparison,
    best_way,
    exceeds_noise,
    gains_over,
)
from tests.support.profiles import example

CURVES, CURVES_ALONE = WAYS[2:]
QWEN = {NO_PROFILE: 0.11, PREDICTOR_ONLY: 0.0957, CURVES: 0.1374, CURVES_ALONE: 0.1653}
"""KL of Qwen2.5-Coder-0.5B, with which the budgets of its profile lose."""


TEXTS = (0.5, 0.8, 0.9, 1.1, 1.2, 1.5)
"""How much more is lost in one text than in another, whatever the way."""


def compared(
    divergences: dict[str, float],
    facts: dict[str, tuple[int, ...]] | None = None,
    repetitions: dict[str, float] | None = None,
    noise: dict[str, tuple[float, ...]] | None = None,
) -> WayComparison:
    """Return a comparison at one budget in six texts; ways know 30 of 60 facts and repeat equally,
    if not given.

    `facts` are those of the single texts, `noise` are factors of a way's loss in them.
    """
    known, repeated, factors = facts or {}, repetitions or {}, noise or {}
    n_facts = 0 if facts is None else 10
    even = (1.0,) * len(TEXTS)

    def of_texts(way: str, kl: float) -> tuple[tuple[float, ...], ...]:
        found = zip(TEXTS, factors.get(way, even), strict=True)
        return (tuple(kl * text * factor for text, factor in found),)

    ways = tuple(
        ComparedWay(
            way,
            of_texts(way, kl),
            of_texts(way, repeated.get(way, 0.2)),
            (known.get(way, (n_facts // 2,) * len(TEXTS)),),
        )
        for way, kl in divergences.items()
    )
    share = 1.0 if repeated else 0.0
    return WayComparison(
        (0.1,), 1024, (n_facts,) * len(TEXTS), (share,) * len(TEXTS), ways, NO_PROFILE
    )


FEWER, MORE = (5, 5, 4, 5, 5, 5), (6, 6, 5, 6, 7, 6)
"""Facts that are known in the texts."""


@pytest.mark.parametrize(
    ("divergences", "facts", "best"),
    [
        (QWEN, {}, PREDICTOR_ONLY),
        ({**QWEN, CURVES: 0.05}, {}, CURVES),
        ({**QWEN, CURVES: 0.05, CURVES_ALONE: 0.04}, {}, CURVES_ALONE),
        ({**QWEN, CURVES: 0.05, CURVES_ALONE: 0.049}, {}, CURVES),  # This gain is less than MARGIN.
        ({**QWEN, CURVES: 0.093}, {}, PREDICTOR_ONLY),
        ({**QWEN, PREDICTOR_ONLY: 0.12}, {}, NO_PROFILE),
        ({**QWEN, PREDICTOR_ONLY: 0.11}, {}, PREDICTOR_ONLY),  # It reads texts once.
        ({**QWEN, PREDICTOR_ONLY: 0.12, CURVES: 0.08}, {}, CURVES),
        ({**QWEN, PREDICTOR_ONLY: 0.12, CURVES: 0.107}, {}, NO_PROFILE),
        (QWEN, {PREDICTOR_ONLY: FEWER}, NO_PROFILE),
        (QWEN, {CURVES: MORE, PREDICTOR_ONLY: FEWER}, NO_PROFILE),  # Its KL is larger.
        ({**QWEN, CURVES: 0.05}, {CURVES: FEWER}, PREDICTOR_ONLY),
        ({**QWEN, CURVES: 0.05}, {CURVES: FEWER, PREDICTOR_ONLY: FEWER}, NO_PROFILE),
        ({**QWEN, CURVES: 0.05}, {PREDICTOR_ONLY: MORE}, PREDICTOR_ONLY),
        ({**QWEN, CURVES: 0.0955}, {CURVES: MORE}, CURVES),
        ({**QWEN, CURVES: 0.0955}, {CURVES: (5, 5, 5, 5, 5, 9)}, PREDICTOR_ONLY),
        ({NO_PROFILE: 0.1, CURVES: 0.12}, {}, NO_PROFILE),
        ({NO_PROFILE: 0.1, CURVES: 0.08}, {}, CURVES),
        ({NO_PROFILE: 0.0, PREDICTOR_ONLY: 0.0}, {}, PREDICTOR_ONLY),
    ],
)
def test_the_least_loss_wins_and_ties_go_to_the_simpler_way(
    divergences: dict[str, float], facts: dict[str, tuple[int, ...]], best: str
) -> None:
    assert best_way(compared(divergences, facts)) == best


@pytest.mark.parametrize(
    ("factors", "best"),
    [
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0), CURVES),
        ((1.1, 0.9, 1.0, 1.1, 0.9, 1.0), CURVES),
        ((1.0, 1.0, 1.0, 1.0, 1.0, 0.5), CURVES),
        ((1.25, 1.25, 1.25, 1.25, 1.25, 0.3), PREDICTOR_ONLY),  # One text says all.
        ((1.6, 0.6, 1.6, 0.6, 1.6, 0.6), PREDICTOR_ONLY),
    ],
)
def test_a_gain_must_exceed_what_texts_differ_by(factors: tuple[float, ...], best: str) -> None:
    """The gain of 18 % is the same in the mean."""
    ways = {NO_PROFILE: 0.1, PREDICTOR_ONLY: 0.1, CURVES: 0.082}
    assert best_way(compared(ways, noise={CURVES: factors})) == best


def test_a_single_text_proves_nothing() -> None:
    ways = (
        ComparedWay(NO_PROFILE, ((0.2,),), ((0.2,),), ((8,),)),
        ComparedWay(PREDICTOR_ONLY, ((0.19,),), ((0.2,),), ((8,),)),
        ComparedWay(CURVES, ((0.01,),), ((0.2,),), ((10,),)),
    )
    assert best_way(WayComparison((0.1,), 1024, (10,), (0.0,), ways, NO_PROFILE)) == PREDICTOR_ONLY
    one = np.array([0.5])
    assert not exceeds_noise(one)
    assert exceeds_noise(np.repeat(one, 2))


@pytest.mark.parametrize("n", [3, 6, 10])
def test_noise_is_seldom_taken_for_a_gain(n: int) -> None:
    """Of differences around 0, about 5 % seem to be larger; of those around three of their
    deviations, nine of ten are.
    """
    rng = np.random.default_rng(n)
    noise = rng.normal(size=(2000, n))
    assert 0.03 < np.mean([exceeds_noise(row) for row in noise]) < 0.07
    assert np.mean([exceeds_noise(row + 3.0) for row in noise]) > 0.9


def test_a_gain_at_one_budget_does_not_pay_for_a_loss_at_another() -> None:
    """SmolLM2's predictor from 4,080 tokens, as a calibration with three texts found it."""
    facts = ((8, 6, 7), (7, 4, 7))
    none = ((0.0190, 0.0128, 0.0125), (0.0560, 0.0598, 0.0370))
    found = ((0.0168, 0.0107, 0.0130), (0.0631, 0.0700, 0.0355))
    ways = tuple(
        ComparedWay(way, table, table, facts)
        for way, table in ((NO_PROFILE, none), (PREDICTOR_ONLY, found))
    )
    comparison = WayComparison((0.2, 0.1), 1024, (8, 7, 7), (0.9,) * 3, ways, NO_PROFILE)
    assert gains_over(ways[0], ways[1], comparison).mean() > 0.0
    assert best_way(comparison) == NO_PROFILE


def test_repetitions_count_as_far_as_the_model_repeats() -> None:
    """A model that answers word for word needs other entries than one that goes on; facts say more
    if it knows some.
    """
    repetitions = {NO_PROFILE: 0.5, PREDICTOR_ONLY: 0.5, CURVES: 0.9, CURVES_ALONE: 0.3}
    comparison = compared({**QWEN, CURVES: 0.08, CURVES_ALONE: 0.085}, None, repetitions)
    few = (1,) * 5 + (0,)
    assert best_way(comparison) == CURVES_ALONE
    assert best_way(replace(comparison, repeats=(0.01,) * 6)) == CURVES
    facts = compared({**QWEN, CURVES: 0.08, CURVES_ALONE: 0.085}, {}, repetitions)
    assert best_way(facts) == CURVES
    assert best_way(replace(knowing(facts, few), n_facts=few)) == CURVES_ALONE


def knowing(comparison: WayComparison, facts: tuple[int, ...]) -> WayComparison:
    """Return a comparison in which all ways know these facts."""
    ways = tuple(replace(each, facts=(facts,)) for each in comparison.compared)
    return replace(comparison, compared=ways)


@given(
    st.lists(st.lists(st.floats(0.2, 5.0), min_size=8, max_size=8), min_size=3, max_size=3),
    st.lists(st.lists(st.integers(0, 8), min_size=8, max_size=8), min_size=3, max_size=3),
)
def test_nothing_is_chosen_that_loses_more_than_no_profile(
    factors: list[list[float]], facts: list[list[int]]
) -> None:
    """At none of the budgets, it knows fewer facts, or has a larger mean loss."""
    tables = np.array(factors).reshape(3, 2, 4)
    known = np.array(facts).reshape(3, 2, 4)
    ways = [ComparedWay(NO_PROFILE, ((1.0,) * 4,) * 2, ((0.0,) * 4,) * 2, ((2,) * 4,) * 2)]
    for way, table, of_way in zip(WAYS[1:], tables, known, strict=True):
        kl, right = (tuple(map(tuple, values.tolist())) for values in (table, of_way))
        ways.append(ComparedWay(way, kl, ways[0].repetitions, right))
    comparison = WayComparison((0.2, 0.1), 1024, (8,) * 4, (0.0,) * 4, tuple(ways), NO_PROFILE)
    best = WAYS.index(best_way(comparison)) - 1
    if best >= 0:
        assert np.all(known[best].sum(axis=1) >= 8)
        assert np.log(tables[best]).mean(axis=1).max() <= 1e-9


def with_best(best: str, **changed: Any) -> EntropyProfile:
    return replace(example(), comparison=replace(compared(QWEN), best=best), **changed)


def test_policy_auto_goes_the_way_that_the_profile_names() -> None:
    for best, budgets in (
        (PREDICTOR_ONLY, "adaptive"),
        (CURVES, "guided"),
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
    """Budgets of a device store cannot follow the text, and were not compared."""
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
    assert "budgets of 10% of the bytes, in 6 held-back texts of up to 1,024 tokens" in text
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
    short = WayComparison((), 0, (), (), (), PREDICTOR_ONLY)
    assert "too short" in comparison_lines(short)[0]
