"""The recovery ladder detects spikes, and chooses the rung to climb to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from entropykv.errors import SettingsError
from entropykv.session.recovery import Climb, Ladder, _Distribution, _Running
from entropykv.settings.recovery import Recovery, Rung
from tests.support.ladders import LADDER, N_VOCAB, SILENT, WARM_UP, climbs, logits_of, peaked


@given(hnp.arrays(np.float32, 300, elements=st.floats(-1000, 1000, width=32)), st.booleans())
def test_entropy_and_top_probability_are_those_of_the_softmax(
    logits: np.ndarray, impossible: bool
) -> None:
    if impossible:
        logits[1::2] = -np.inf
    p = np.exp(logits.astype(np.float64) - logits.max())
    p /= p.sum()
    terms = p[p > 0] * np.log2(p[p > 0])
    entropy, top = _Distribution(300).measure(logits)
    assert entropy == pytest.approx(-terms.sum(), abs=1e-3)
    assert top == pytest.approx(p.max(), rel=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_without_a_distribution_change_nothing(bad: float) -> None:
    ladder = Ladder(Recovery(smooth=1, warm_up=WARM_UP), N_VOCAB)
    climbs(ladder, set(), 20)
    assert ladder.observe(np.full(N_VOCAB, bad, np.float32), 21) is None
    assert climbs(ladder, {1}, 1) == {1: Rung.SOFT}


@given(st.lists(st.floats(0, 8), min_size=1, max_size=40))
def test_before_anything_counts_mean_and_deviation_are_plain_ones(values: list[float]) -> None:
    running = _Running(Recovery(smooth=1, warm_up=SILENT, memory=max(2, len(values))))
    assert not any(running.take(value) for value in values)
    assert running.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert running._variance == pytest.approx(np.var(values), abs=1e-9)


@given(
    st.lists(st.floats(0, 8), min_size=WARM_UP, max_size=100),
    st.floats(0, 1e6),
    st.floats(0.5, 5),
    st.integers(2, 80),
)
def test_one_spike_does_not_drag_the_mean(
    values: list[float], value: float, deviations: float, memory: int
) -> None:
    running = _Running(Recovery(smooth=1, warm_up=WARM_UP, memory=memory, deviations=deviations))
    for before in values:
        running.take(before)
    mean, deviation = running.mean, max(np.sqrt(running._variance), 0.25)
    spike = running.take(value)
    assert spike == (value > mean + deviations * deviation)
    share = 1 / min(memory, len(values) + 1)
    assert abs(running.mean - mean) <= share * deviations * deviation + 1e-9


def test_a_lasting_change_is_the_new_level_after_a_while() -> None:
    running = _Running(Recovery(smooth=1, memory=32))
    for _ in range(100):
        assert not running.take(1.0)
    spikes = [running.take(6.0) for _ in range(100)]
    assert spikes[:4] == [True] * 4
    assert not any(spikes[32:])
    assert running.mean == pytest.approx(6.0, abs=1.0)


@pytest.mark.parametrize(
    ("calm", "spike"),
    [
        pytest.param([0.9], [0.5, 0.5], id="a drop of the top probability alone"),
        pytest.param([0.5, 0.5], [0.5], id="a rise of the entropy alone"),
    ],
)
def test_each_of_the_two_signs_is_enough(calm: list[float], spike: list[float]) -> None:
    before, after = logits_of(calm), logits_of(spike)
    distribution = _Distribution(N_VOCAB)
    entropies = [distribution.measure(logits)[0] for logits in (before, after)]
    tops = [distribution.measure(logits)[1] for logits in (before, after)]
    assert (entropies[1] > entropies[0]) != (tops[1] < tops[0] * 0.99)
    ladder = Ladder(Recovery(smooth=1), N_VOCAB)
    assert climbs(ladder, set(), 20, before) == {}
    climb = ladder.observe(after, 21)
    assert climb is not None
    assert climb == Climb(21, Rung.SOFT, climb.entropy, climb.mean_entropy, climb.top_probability)
    assert climb.entropy == pytest.approx(entropies[1])
    assert climb.mean_entropy == pytest.approx(entropies[0])
    assert climb.top_probability == pytest.approx(tops[1])


@pytest.mark.parametrize("warm_up", [2, 8, 30])
def test_nothing_counts_in_the_warm_up(warm_up: int) -> None:
    for position in range(1, warm_up + 3):
        ladder = Ladder(Recovery(smooth=1, warm_up=warm_up), N_VOCAB)
        expected = {position: Rung.SOFT} if position > warm_up else {}
        assert climbs(ladder, {position}, position) == expected


def test_tiny_differences_of_certain_tokens_are_no_spikes() -> None:
    ladder = Ladder(Recovery(smooth=1, warm_up=WARM_UP), N_VOCAB)
    assert climbs(ladder, set(), 50, peaked(0, 15)) == {}
    assert ladder.observe(peaked(0, 8), 51) is None


def test_every_spike_climbs_one_rung_and_a_rewalk_starts_over() -> None:
    ladder = Ladder(Recovery(smooth=1, warm_up=WARM_UP), N_VOCAB)
    positions = list(range(20, 61, 8))
    seen = climbs(ladder, set(positions), 61)
    assert list(seen) == positions
    assert list(seen.values()) == [*LADDER, Rung.SOFT, Rung.WINDOW]


@pytest.mark.parametrize("refractory", [0, 1, 4, 9])
def test_no_climb_within_a_few_tokens_of_one(refractory: int) -> None:
    recovery = Recovery(smooth=1, warm_up=WARM_UP, refractory=refractory, deviations=1.0)
    seen = climbs(Ladder(recovery, N_VOCAB), set(range(20, 24 + 2 * refractory)), 60)
    assert list(seen) == list(range(20, 24 + 2 * refractory, refractory + 1))


@pytest.mark.parametrize(
    ("calm_tokens", "then"),
    [(9, Rung.REWALK), (10, Rung.FULL), (20, Rung.WINDOW), (30, Rung.SOFT), (50, Rung.SOFT)],
)
def test_calm_tokens_bring_it_down_by_one(calm_tokens: int, then: Rung) -> None:
    ladder = Ladder(Recovery(smooth=1, warm_up=WARM_UP, calm=10), N_VOCAB)
    position = 40 + calm_tokens + 1
    seen = climbs(ladder, {30, 35, 40, position}, position)
    assert list(seen.values()) == [Rung.SOFT, Rung.WINDOW, Rung.FULL, then]


def test_a_spike_too_soon_to_climb_is_not_calm() -> None:
    ladder = Ladder(Recovery(smooth=1, warm_up=WARM_UP, calm=10, refractory=4), N_VOCAB)
    assert list(climbs(ladder, {30, 33, 43}, 43).values()) == [Rung.SOFT, Rung.WINDOW]


@pytest.mark.parametrize(
    ("recovery", "expected"),
    [
        (Recovery(smooth=1, highest=Rung.SOFT), [Rung.SOFT] * 5),
        (Recovery(smooth=1, highest=Rung.WINDOW), [Rung.SOFT] + [Rung.WINDOW] * 4),
        (Recovery(smooth=1, rewalk=0), [Rung.SOFT, Rung.WINDOW] + [Rung.FULL] * 3),
        (Recovery(smooth=1, highest=Rung.SOFT, rewalk=0), [Rung.SOFT] * 5),
    ],
)
def test_the_highest_rung_is_climbed_again(recovery: Recovery, expected: list[Rung]) -> None:
    seen = climbs(Ladder(recovery, N_VOCAB), set(range(20, 60, 8)), 60)
    assert list(seen.values()) == expected
    assert recovery.held_back == 0


def test_no_token_is_rewalked_twice() -> None:
    recovery = Recovery(smooth=1, warm_up=WARM_UP, refractory=0, rewalk=6)
    seen = climbs(Ladder(recovery, N_VOCAB), set(range(30, 42)), 42)
    assert [position for position, rung in seen.items() if rung is Rung.REWALK] == [33, 39]
    assert list(seen.values())[4:9] == [Rung.SOFT, Rung.WINDOW, *[Rung.FULL] * 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"deviations": 0},
        {"deviations": float("nan")},
        {"warm_up": 1},
        {"memory": 1},
        {"refractory": -1},
        {"calm": 0},
        {"window": 0},
        {"rewalk": -1},
        {"rewalk": 2.5},
        {"highest": Rung.NONE},
        {"highest": 2},
    ],
)
def test_impossible_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(wrong))} cannot be .*; use "):
        Recovery(**wrong)
