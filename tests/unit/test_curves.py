"""Loss curves, and the budgets from them, equal those of the numpy oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from entropykv import _core
from entropykv.errors import ProfileError
from entropykv.policy.plan import plan_headwise
from entropykv.policy.policy import POLICIES
from entropykv.profile.curves import (
    CurveRules,
    Entries,
    LossCurves,
    Queries,
    average_curves,
    head_loss,
)
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.options import Budget
from tests.support import reference
from tests.support.reference import Options

NO_SINK = np.float32(-1e30)


@pytest.mark.parametrize(
    ("softcap", "window", "chunked", "with_sinks"),
    [
        (0.0, 0, False, False),
        (5.0, 0, False, False),
        (0.0, 40, False, False),
        (0.0, 48, True, False),
        (0.0, 0, False, True),
    ],
)
def test_head_loss_is_that_of_the_oracle(
    softcap: float, window: int, chunked: bool, with_sinks: bool
) -> None:
    rng = np.random.default_rng(0)
    rules = CurveRules(length=96, queries=16, n_sinks=3, recent_window=10, keep=(0, 5, 20, 200))
    q = rng.standard_normal((16, 3, 8)) * 2
    k, v = rng.standard_normal((96, 8)), rng.standard_normal((96, 6))
    importance = rng.uniform(size=80)
    sinks = rng.standard_normal(3) * 2 if with_sinks else None
    options = Options(1.0, softcap, window, sinks, chunked)
    mass, dropped, whole = reference.curve_losses(q, k, v, importance, rules, options)
    extra = np.full(3, NO_SINK) if sinks is None else sinks.astype(np.float32)
    queries = Queries(q.astype(np.float32), extra, softcap, window, chunked)
    entries = Entries(*(a.astype(np.float32) for a in (k, v, importance)))
    loss = head_loss(queries, entries, rules)
    np.testing.assert_allclose(loss.mass, mass, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss.dropped, dropped, rtol=1e-4, atol=1e-6)
    assert loss.whole == pytest.approx(whole, rel=1e-4)
    # The last number is more than there are entries, so nothing is lost.
    assert loss.mass[-1] == 0.0
    assert loss.mass[0] > loss.mass[1] > loss.mass[2] > 0.0


def test_average_over_texts() -> None:
    rules = CurveRules.for_length(1024)
    assert rules.keep == (0, 16, 32, 64, 128, 256, 512)
    assert (rules.queries, rules.recent_window, rules.n_read) == (128, 102, 896)
    rules = CurveRules(64, 8, 4, 6, (0, 4))
    rng = np.random.default_rng(0)
    q = Queries(rng.standard_normal((8, 1, 4)).astype(np.float32), np.full(1, NO_SINK), 0.0, 0)
    texts = []
    for _ in range(2):
        k, v = rng.standard_normal((2, 64, 4)).astype(np.float32)
        texts.append([[head_loss(q, Entries(k, v, np.arange(56, dtype=np.float32)), rules)]])
    curves = average_curves(rules, texts)
    losses = [text[0][0] for text in texts]
    np.testing.assert_allclose(curves.mass_lost[0, 0], np.mean([x.mass for x in losses], axis=0))
    error = sum(x.dropped for x in losses) / sum(x.whole for x in losses)
    np.testing.assert_allclose(curves.output_error[0, 0], np.sqrt(error))
    assert curves.n_texts == 2


def test_losses_of_a_layer_are_scaled_to_its_damage() -> None:
    error = np.array([[[3.0, 1.0], [4.0, 2.0]], [[1.0, 1.0], [7.0, 0.0]], [[2.0, 1.0], [2.0, 1.0]]])
    plain = LossCurves(64, 8, 4, 6, 1, (0, 8), np.zeros((3, 2, 2)), error)
    damage = np.array([0.5, 0.0, 2.0])
    scaled = replace(plain, layer_damage=damage)
    knots, losses = scaled.knots(64, 60)
    assert (knots, losses[2::3]) == ([0.0, 8.0, 60.0], [0.0] * 6)
    of_heads = np.array(losses).reshape(3, 2, 3)
    # The squared errors of the first layer add up to 25, those of the last one to 8.
    expected = np.square(error) * np.array([0.5 / 25, 0.0, 2.0 / 8])[:, None, None]
    np.testing.assert_allclose(of_heads[:, :, :2], expected / expected.max())
    assert plain.knots(64, 60)[1][0] == 9.0
    with pytest.raises(ProfileError, match="layer_damage"):
        replace(plain, layer_damage=damage[:2])
    with pytest.raises(ProfileError, match="layer_damage"):
        replace(plain, layer_damage=-damage)
    with pytest.raises(ProfileError, match="importance"):
        replace(plain, importance="attention")


def test_a_layer_that_changes_no_prediction_gets_its_floor() -> None:
    error = np.full((2, 1, 2), 0.5)
    curves = LossCurves(64, 8, 4, 6, 1, (0, 8), np.zeros((2, 1, 2)), error, np.array([0.0, 1.0]))
    knots, losses = curves.knots(64, 60)
    assert _core.share_by_curves(24, 64, 4, [4, 4], knots, losses, []) == [4, 44]


knots_of = st.lists(st.integers(1, 400), max_size=6, unique=True).map(
    lambda inner: [0.0, *map(float, sorted(inner)), 401.0]
)
loss = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.25, 0.5, 1.0]))


@settings(max_examples=300)
@given(st.data(), knots_of, st.integers(1, 12), st.floats(0.0, 1.2))
def test_curve_shares_are_those_of_the_oracle(
    data: st.DataObject, knots: list[float], n_heads: int, fraction: float
) -> None:
    size = n_heads * (len(knots) - 1)
    drawn = data.draw(st.lists(loss, min_size=size, max_size=size))
    losses = np.hstack([np.array(drawn).reshape(n_heads, -1), np.zeros((n_heads, 1))])
    total = fraction * knots[-1] * n_heads
    shares = np.array(_core.curve_shares(knots, losses.ravel().tolist(), total))
    expected = reference.curve_shares(knots, losses, total)
    assert shares.sum() == pytest.approx(min(total, knots[-1] * n_heads), rel=1e-9)
    assert (shares >= 0.0).all()
    assert (shares <= knots[-1] + 1e-6).all()

    def lost(at: Any) -> float:
        return sum(
            reference.convex_hull_at(knots, head, min(float(x), knots[-1]))
            for head, x in zip(losses, at, strict=True)
        )

    assert lost(shares) == pytest.approx(lost(expected), abs=1e-6)


def test_curve_shares_by_hand() -> None:
    # The first head gains 0.1 per entry up to 4, the second 0.05 up to 10.
    curves = [[0.5, 0.1, 0.0], [0.5, 0.3, 0.0]]
    knots = [0.0, 4.0, 10.0]
    flat = curves[0] + curves[1]
    assert _core.curve_shares(knots, flat, 3.0) == pytest.approx([3.0, 0.0])
    assert _core.curve_shares(knots, flat, 6.0) == pytest.approx([4.0, 2.0])
    assert _core.curve_shares(knots, flat, 16.0) == pytest.approx([6.0, 10.0])
    assert _core.curve_shares(knots, flat, 99.0) == pytest.approx([10.0, 10.0])
    # The curve is not convex: its hull skips the hump.
    assert _core.curve_shares(knots, [1.0, 1.0, 0.0, 0.9, 0.0, 0.0], 5.0) == pytest.approx([1, 4])
    # Equal heads share equally.
    assert _core.curve_shares([0.0, 8.0], [1.0, 0.0] * 4, 8.0) == pytest.approx([2.0] * 4)


@pytest.mark.parametrize(
    ("knots", "losses", "message"),
    [
        ([1.0, 2.0], [0.0, 0.0], "first knot"),
        ([], [], "first knot"),
        ([0.0, 0.0], [0.0, 0.0], "ascend"),
        ([0.0, 1.0], [0.0], "losses must be"),
        ([0.0, 1.0], [float("nan"), 0.0], "a loss outside"),
        ([0.0, 1.0], [-1.0, 0.0], "a loss outside"),
    ],
)
def test_curves_without_sense_are_refused(
    knots: list[float], losses: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _core.curve_shares(knots, losses, 1.0)


@settings(max_examples=200)
@given(
    st.data(),
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 400),
    st.integers(2, 500),
    st.integers(0, 400),
)
def test_shares_by_curves_stay_within_every_limit(
    data: st.DataObject, pages: list[int], mean: int, most: int, floor: int
) -> None:
    assume(floor <= min(mean, most - 1))
    top = float(most - floor)
    knots = sorted({0.0, top / 7, top / 3, top})
    losses = data.draw(st.lists(loss, min_size=4 * len(pages), max_size=4 * len(pages)))
    budgets = _core.share_by_curves(mean, most, floor, pages, knots, losses)
    reference.check_shares(budgets, mean, most, floor, pages)


def profile_with_curves(output_error: Any, length: int = 256) -> EntropyProfile:
    errors = np.array(output_error)
    curves = LossCurves(length, 32, 4, 25, 1, (0, 64), np.zeros_like(errors), errors)
    return EntropyProfile(1, 4, 2, 512, np.ones((1, 4)), curves=curves)


LAYERS = [_core.LayerShape(4, 2, 32, 32)]


def test_knots_grow_with_the_context() -> None:
    curves = profile_with_curves([[[0.5, 0.1], [0.2, 0.0]]]).curves
    assert curves is not None
    assert curves.knots(512, 300) == (
        [0.0, 128.0, 300.0],
        pytest.approx([0.25, 0.01, 0.0, 0.04, 0.0, 0.0]),
    )
    assert curves.knots(512, 100) == ([0.0, 100.0], pytest.approx([0.25, 0.0, 0.04, 0.0]))


def test_policy_profile_gives_more_where_more_is_lost() -> None:
    profile = profile_with_curves([[[0.9, 0.1], [0.01, 0.005]]])
    plan = plan_headwise(
        Budget.parse(0.25), LAYERS, 512, "f16", POLICIES["profile"], profile, 4, None
    )
    first, second = plan.budgets[0]
    assert plan.protection.entries == 68
    assert second == 80  # Shares are whole pages.
    assert first == 176
    assert first + second <= 2 * 128


@pytest.mark.parametrize("curves", [False, True])
def test_policy_profile_without_curves_says_what_to_do(curves: bool) -> None:
    profile = EntropyProfile(1, 4, 2, 512, np.ones((1, 4))) if curves else None
    with pytest.raises(ProfileError, match="entropykv calibrate"):
        plan_headwise(Budget.parse(0.25), LAYERS, 512, "f16", POLICIES["profile"], profile, 4, None)
