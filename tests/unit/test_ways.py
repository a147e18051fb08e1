"""Policy auto uses a profile in the way that a comparison chose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv.cli.profile import comparison_lines
from entropykv.errors import ProfileError
from entropykv.policy.policy import POLICIES, policy_named
from entropykv.profile.profile import EntropyProfile
from entropykv.profile.ways import (
    NO_PROFILE,
    PREDICTOR_ONLY,
    WAYS,
    ComparedWay,
    WayComparison,
    advantage,
    best_way,
)
from tests.support.profiles import example

CURVES, CURVES_ALONE = WAYS[2:]
QWEN = {NO_PROFILE: 0.11, PREDICTOR_ONLY: 0.0957, CURVES: 0.1374, CURVES_ALONE: 0.1653}
"""The KL in nats of each way for Qwen2.5-Coder-0.5B, which loses with its profile's budgets."""


TEXTS = (0.5, 0.8, 0.9, 1.1, 1.2, 1.5)
"""The factors by which more is lost in one text than in another, by any way."""


SOME, MORE, FEWER, FAR_FEWER = (tuple(int(i < n) for i in range(60)) for n in (30, 36, 29, 20))
"""For each of 60 facts, 1 if it is known."""
OTHERS = (*SOME[2:], 1, 1)
"""Known facts that differ from SOME: two are lost, and two others gained."""


def compared(
    divergences: dict[str, float],
    facts: dict[str, tuple[int, ...]] | None = None,
    repetitions: dict[str, float] | None = None,
    noise: dict[str, tuple[float, ...]] | None = None,
) -> WayComparison:
    """Return a comparison of ways at one budget in six texts.

    Unless given, a way knows SOME facts and repeats as others do. `noise`: factors of a way's loss,
    per text. If `facts` is None, the full cache knows no facts.
    """
    known, repeated, factors = facts or {}, repetitions or {}, noise or {}
    some = () if facts is None else SOME
    even = (1.0,) * len(TEXTS)

    def of_texts(way: str, kl: float) -> tuple[tuple[float, ...], ...]:
        found = zip(TEXTS, factors.get(way, even), strict=True)
        return (tuple(kl * text * factor for text, factor in found),)

    ways = tuple(
        ComparedWay(
            way, of_texts(way, kl), of_texts(way, repeated.get(way, 0.2)), (known.get(way, some),)
        )
        for way, kl in divergences.items()
    )
    share = 1.0 if repeated else 0.0
    return WayComparison((0.1,), 1024, (share,) * len(TEXTS), ways, NO_PROFILE)


@pytest.mark.parametrize(
    ("divergences", "facts", "best"),
    [
        (QWEN, {}, PREDICTOR_ONLY),
        ({**QWEN, CURVES: 0.05}, {}, CURVES),
        ({**QWEN, CURVES: 0.05, CURVES_ALONE: 0.04}, {}, CURVES_ALONE),
        ({**QWEN, PREDICTOR_ONLY: 0.12}, {}, NO_PROFILE),
        # PREDICTOR_ONLY is as good as NO_PROFILE, and reads texts only once.
        ({**QWEN, PREDICTOR_ONLY: 0.11}, {}, PREDICTOR_ONLY),
        ({**QWEN, PREDICTOR_ONLY: 0.12, CURVES: 0.08}, {}, CURVES),
        (QWEN, {PREDICTOR_ONLY: FEWER}, PREDICTOR_ONLY),  # One fact fewer may be chance.
        (QWEN, {PREDICTOR_ONLY: FAR_FEWER}, NO_PROFILE),
        ({**QWEN, PREDICTOR_ONLY: 0.12}, {PREDICTOR_ONLY: OTHERS}, NO_PROFILE),
        ({**QWEN, CURVES: 0.05}, {CURVES: FEWER}, PREDICTOR_ONLY),
        ({**QWEN, CURVES: 0.05}, {CURVES: FAR_FEWER, PREDICTOR_ONLY: FAR_FEWER}, NO_PROFILE),
        ({**QWEN, CURVES: 0.05}, {PREDICTOR_ONLY: MORE}, PREDICTOR_ONLY),
        ({**QWEN, CURVES: 0.0957}, {CURVES: MORE}, CURVES),
        ({**QWEN, CURVES: 0.0957}, {CURVES: OTHERS}, PREDICTOR_ONLY),
        # More facts do not outweigh the larger KL.
        ({**QWEN, CURVES: 0.12}, {CURVES: MORE}, PREDICTOR_ONLY),
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
        # The whole gain comes from one text.
        ((1.25, 1.25, 1.25, 1.25, 1.25, 0.3), PREDICTOR_ONLY),
        ((1.6, 0.6, 1.6, 0.6, 1.6, 0.6), PREDICTOR_ONLY),
    ],
)
def test_a_gain_must_exceed_what_texts_differ_by(factors: tuple[float, ...], best: str) -> None:
    """A way is chosen for a loss that is 18 % smaller, times a factor for each text, only if this
    gain exceeds the differences between the texts.
    """
    ways = {NO_PROFILE: 0.1, PREDICTOR_ONLY: 0.1, CURVES: 0.082}
    assert best_way(compared(ways, noise={CURVES: factors})) == best


def test_an_advantage_is_the_sum_of_differences_against_their_chance() -> None:
    """An advantage is the sum of paired differences, relative to what they would be by chance.

    Here the logarithm of KL falls by 2, 1, 0.5 and 1. Repetitions count while there are too few
    facts; of more facts, two are gained for each one that is lost.
    """
    base = ComparedWay(NO_PROFILE, ((1.0, 1.0), (1.0, 1.0)), ((1.0, 1.0),) * 2, ((0, 1), (0, 1)))
    loss = tuple(tuple(map(float, np.exp(row))) for row in -np.array([[2.0, 1.0], [0.5, 1.0]]))
    other = ComparedWay(CURVES, loss, ((0.5, 2.0), (0.5, 0.5)), ((1, 0), (1, 1)))
    comparison = WayComparison((0.2, 0.1), 1024, (0.5, 1.0), (base, other), NO_PROFILE)
    of_kl, of_repetitions = 4.5 / np.sqrt(6.25), 2 / np.sqrt(4.0)
    weighted = (of_kl + 0.75 * of_repetitions) / np.sqrt(1.0 + 0.75**2)
    assert advantage(base, other, comparison) == pytest.approx(weighted)
    assert advantage(other, base, comparison) == pytest.approx(-weighted)
    assert advantage(base, base, comparison) == 0.0
    base, other = (
        replace(way, facts=tuple(3 * row for row in way.facts)) for way in comparison.compared
    )
    comparison = replace(comparison, compared=(base, other))
    assert comparison.n_facts == 6
    expected = (of_kl + 3 / np.sqrt(9.0)) / np.sqrt(2.0)
    assert advantage(base, other, comparison) == pytest.approx(expected)


def measured(*ways: tuple[str, Any, Any, Any, Any]) -> WayComparison:
    """Return a comparison of ways in four passages.

    Of each way: name, KL at 20 and 10 % of the bytes, and which of 32 facts are lost at each.
    """
    compared = [
        ComparedWay(way, (at_20, at_10), (at_20, at_10), (lost(*lost_20), lost(*lost_10)))
        for way, at_20, at_10, lost_20, lost_10 in ways
    ]
    return WayComparison((0.2, 0.1), 1000, (0.9,) * 4, tuple(compared), NO_PROFILE)


def lost(*facts: int) -> tuple[int, ...]:
    return tuple(int(fact not in facts) for fact in range(32))


def test_gains_at_one_budget_count_although_the_other_one_gains_nothing() -> None:
    """A gain at one budget counts, although the other budget gains nothing.

    The figures are those of Gemma 3 270M with `calibrate --quick`: at 10 % of the bytes, the
    predictor knows eight facts more and two others less; at 20 %, its KL is 2 % larger.
    """
    at_20, at_10 = (0.0167, 0.0161, 0.0124, 0.0154), (0.0930, 0.1485, 0.0401, 0.0850)
    none = (NO_PROFILE, at_20, at_10, (17, 22), (0, 2, 3, 9, 11, 12, 17, 30, 31))
    at_20, at_10 = (0.0164, 0.0160, 0.0127, 0.0168), (0.0671, 0.0946, 0.0542, 0.0764)
    predictor = (PREDICTOR_ONLY, at_20, at_10, (17, 22), (2, 18, 24))
    at_20, at_10 = (0.0155, 0.0179, 0.0109, 0.0143), (0.0591, 0.1019, 0.0531, 0.0799)
    curves = (CURVES, at_20, at_10, (17, 22), (3, 18, 24))
    at_20, at_10 = (0.0145, 0.0210, 0.0106, 0.0164), (0.0709, 0.1178, 0.0440, 0.0780)
    alone = (CURVES_ALONE, at_20, at_10, (17, 22), (17, 18))
    assert best_way(measured(none, predictor, curves, alone)) == PREDICTOR_ONLY
    assert best_way(measured(none, curves, alone)) == CURVES
    assert best_way(measured(none, alone)) == CURVES_ALONE


def test_budgets_that_lose_facts_are_not_chosen_for_a_smaller_divergence() -> None:
    """Budgets that lose facts are not chosen for a smaller KL.

    The figures are those of Qwen2.5-Coder-0.5B with `calibrate --quick`: with budgets by curves
    alone, ten facts fewer are known at 10 % of the bytes, although the mean KL at 20 % is 27 %
    smaller.
    """
    lost_10 = (3, 4, 6, 11, 12, 13, 14, 15, 20, 24, 27, 29, 30)
    at_20, at_10 = (0.0848, 0.0481, 0.0386, 0.1356), (0.2219, 0.2865, 0.0917, 0.3014)
    none = (NO_PROFILE, at_20, at_10, (3,), lost_10)
    at_20, at_10 = (0.0828, 0.0470, 0.0394, 0.1076), (0.2187, 0.2641, 0.0859, 0.2999)
    predictor = (PREDICTOR_ONLY, at_20, at_10, (3,), lost_10)
    at_20, at_10 = (0.0807, 0.0538, 0.0383, 0.1039), (0.1980, 0.2890, 0.0872, 0.2937)
    curves = (CURVES, at_20, at_10, (3,), (*lost_10, 1, 5, 10, 28, 31))
    at_20, at_10 = (0.0764, 0.0716, 0.0331, 0.0437), (0.3379, 0.4055, 0.0963, 0.3798)
    lost_alone = {*range(1, 32)} - {7, 16, 17, 18, 23, 25, 28, 30}
    alone = (CURVES_ALONE, at_20, at_10, (3, 31), lost_alone)
    assert best_way(measured(none, predictor, curves, alone)) == PREDICTOR_ONLY
    for way in (curves, alone):
        assert best_way(measured(none, way)) == NO_PROFILE


def chosen(rng: np.random.Generator, way: str, gain: float, n_texts: int) -> bool:
    """Tell whether a way is chosen whose KL is smaller by `gain`, a logarithm, and that knows more
    facts.

    KL differs between texts as much as Gemma's does, and known facts by chance.
    """
    shape, facts = (2, n_texts), (2, 8 * n_texts)
    noise = np.array([[0.08], [0.28]]) * rng.normal(size=shape)
    easy = np.array([[1.6], [0.7]]) + rng.normal(size=facts[1])
    ones = np.ones(shape)
    ways = tuple(
        ComparedWay(name, table(kl), table(ones), table((found > 0.0).astype(int)))
        for name, kl, found in (
            (NO_PROFILE, ones, easy + 0.6 * rng.normal(size=facts)),
            (way, np.exp(noise - gain), easy + 0.6 * rng.normal(size=facts) + 1.4 * gain),
        )
    )
    comparison = WayComparison((0.2, 0.1), 1024, (0.9,) * n_texts, ways, NO_PROFILE)
    return best_way(comparison) == way


def table(figures: np.ndarray) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, figures.tolist()))


@pytest.mark.parametrize("n_texts", [4, 6])
@pytest.mark.parametrize(
    ("way", "gain", "least", "most"),
    [
        (CURVES, 0.0, 0.0, 0.12),
        (CURVES, -0.1, 0.0, 0.02),
        (CURVES, 0.22, 0.75, 1.0),
        (PREDICTOR_ONLY, 0.0, 0.35, 0.65),
        (PREDICTOR_ONLY, -0.1, 0.0, 0.12),
        (PREDICTOR_ONLY, 0.22, 0.97, 1.0),
    ],
)
def test_chance_seldom_chooses_and_gains_are_seen(
    way: str, gain: float, least: float, most: float, n_texts: int
) -> None:
    rng = np.random.default_rng(n_texts)
    assert least <= np.mean([chosen(rng, way, gain, n_texts) for _ in range(300)]) <= most


def test_repetitions_count_as_far_as_the_model_repeats() -> None:
    """Repetitions count as far as the model repeats, and only if it knows too few facts to compare.

    A model that answers word for word needs other entries than one that continues a text.
    """
    repetitions = {NO_PROFILE: 0.5, PREDICTOR_ONLY: 0.5, CURVES: 0.9, CURVES_ALONE: 0.3}
    divergences = {**QWEN, CURVES: 0.08, CURVES_ALONE: 0.085}
    comparison = compared(divergences, None, repetitions)
    assert best_way(comparison) == CURVES_ALONE
    assert best_way(replace(comparison, repeats=(0.01,) * 6)) == CURVES
    for n_facts, best in ((6, CURVES), (5, CURVES_ALONE)):
        ways = (replace(each, facts=((1,) * n_facts,)) for each in comparison.compared)
        assert best_way(replace(comparison, compared=tuple(ways))) == best


@given(
    st.lists(st.lists(st.floats(1.0, 5.0), min_size=8, max_size=8), min_size=3, max_size=3),
    st.lists(st.lists(st.booleans(), min_size=60, max_size=60), min_size=3, max_size=3),
)
def test_nothing_is_chosen_that_only_loses(
    factors: list[list[float]], lost: list[list[bool]]
) -> None:
    """A way that knows no further fact, and has a smaller KL nowhere, is never chosen."""
    none = ComparedWay(NO_PROFILE, ((1.0,) * 4,) * 2, ((0.0,) * 4,) * 2, ((1,) * 30,) * 2)
    losers = []
    for way, factor, gone in zip(WAYS[1:], factors, lost, strict=True):
        kl, known = np.reshape(factor, (2, 4)), 1 - np.reshape(gone, (2, 30)).astype(int)
        if kl.max() > 1.0 or not known.all():
            losers.append(ComparedWay(way, table(kl), none.repetitions, table(known)))
    comparison = WayComparison((0.2, 0.1), 1024, (0.0,) * 4, (none, *losers), NO_PROFILE)
    assert best_way(comparison) == NO_PROFILE


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
    """A device store uses curves whatever won, because its budgets cannot follow the text, and were
    not compared.
    """
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
    short = WayComparison((), 0, (), (), PREDICTOR_ONLY)
    assert "too short" in comparison_lines(short)[0]
