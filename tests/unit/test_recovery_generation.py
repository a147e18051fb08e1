"""The recovery ladder detects spikes; a generation goes back, writes its last tokens again, and
ends properly. The session is a fake that computes nothing.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from entropykv.cli.answer import Answer, write_answer
from entropykv.errors import ContextError, EntropyKVError, SettingsError
from entropykv.generation.prompt import GenerationRequest, Prompt
from entropykv.session.generate import generate_tokens
from entropykv.session.recovery import Climb, Ladder, _Distribution, _Running
from entropykv.settings.freezing import Recovery, Rung
from entropykv.settings.sampling import Sampling
from tests.support.climbs import ClimbCounts
from tests.support.ladders import (
    GREEDY,
    LADDER,
    N_VOCAB,
    SILENT,
    WARM_UP,
    FakeSession,
    climbs,
    logits_of,
    peaked,
    planned,
    stopped_after,
    token_at,
)


def random_logits(session: FakeSession) -> np.ndarray:
    """Return logits that depend on the last two tokens, the position, and what was thawed."""
    seed = [*session.tokens[-2:], session.position, session.n_full]
    return np.random.default_rng(seed).normal(0, 3, N_VOCAB).astype(np.float32)


runs = st.fixed_dictionaries(
    {
        "n_prompt": st.integers(1, 6),
        "max_tokens": st.sampled_from([-1, 1, 2, 7, 8, 9, 20, 33]),
        "n_ctx": st.integers(6, 40),
        "end": st.integers(-3, N_VOCAB - 1),
        "fails_at": st.integers(-20, 40),
        "breaks": st.booleans(),
        "stop": st.none() | st.integers(1, 40),
    }
)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    repeat_penalty=st.sampled_from([1.0, 1.5]),
    seed=st.integers(0, 9),
)


def run(options: dict[str, Any], sampling: Sampling, recovery: Recovery | None) -> Any:
    n_prompt = options["n_prompt"]
    fails_at = options["fails_at"] if options["fails_at"] >= n_prompt else -1
    session = FakeSession(
        random_logits, recovery, options["n_ctx"], options["end"], fails_at, options["breaks"]
    )
    yielded: list[int] = []
    error = None
    prompt = list(range(n_prompt))
    with closing(generate_tokens(session, prompt, options["max_tokens"], sampling)) as stream:
        try:
            yielded.extend(itertools.islice(stream, options["stop"]))
        except ContextError as raised:
            error = str(raised)
    return session, yielded, error


@settings(max_examples=200)
@given(runs, samplings, st.integers(0, 12))
def test_held_back_tokens_are_the_same_ones(
    options: dict[str, Any], sampling: Sampling, rewalk: int
) -> None:
    plain, expected, error = run(options, sampling, None)
    session, yielded, failure = run(
        options, sampling, Recovery(smooth=1, warm_up=SILENT, rewalk=rewalk)
    )
    assert (yielded, failure) == (expected, error)
    assert session.generated == plain.generated == len(expected)
    if not session.broken:
        assert session.tokens == plain.tokens
    if error is None and options["stop"] is None:
        np.testing.assert_array_equal(session.logits, plain.logits)


@settings(max_examples=100)
@given(
    st.sets(st.integers(0, 120)),
    st.integers(1, 12),
    st.integers(0, 5),
    st.integers(1, 60),
    st.none() | st.integers(1, 60),
    samplings,
)
def test_rewalks_take_back_nothing_that_was_yielded(
    spikes: set[int],
    rewalk: int,
    refractory: int,
    max_tokens: int,
    stop: int | None,
    sampling: Sampling,
) -> None:
    def function(session: FakeSession) -> np.ndarray:
        flat = len(session.decoded) in spikes
        return random_logits(session) * (0.01 if flat else 1.0)

    recovery = Recovery(smooth=1, warm_up=2, rewalk=rewalk, refractory=refractory)
    session = FakeSession(function, recovery)
    prompt = [5, 6]
    yielded = stopped_after(session, stop, prompt, max_tokens, sampling)
    assert len(yielded) == min(max_tokens, stop or max_tokens) == session.generated
    assert session.tokens == [*prompt, *yielded[:-1]]
    rewalks = [climb.position for climb in session.climbs if climb.rung is Rung.REWALK]
    assert all(b - a >= rewalk for a, b in itertools.pairwise(rewalks))
    assert len(session.decoded) <= 2 + (max_tokens + rewalk) * 2 + len(rewalks)


def test_a_rewalk_writes_the_last_tokens_again() -> None:
    spikes = {20, 25, 30, 35}
    session = FakeSession(planned(spikes), Recovery(smooth=1, warm_up=WARM_UP, rewalk=6, window=17))
    plain = FakeSession(planned(spikes))
    yielded = stopped_after(session, None, [1, 2, 3], 50, GREEDY)
    before = stopped_after(plain, None, [1, 2, 3], 50, GREEDY)
    first = 35 - 6
    assert yielded[: first - 3] == before[: first - 3]
    assert yielded[first - 3 :] == [token_at(position, 2) for position in range(first, 53)]
    assert [token for _, token in session.decoded[31:35]] == [
        token_at(position, 1) for position in range(31, 35)
    ]
    rungs = [Rung.SOFT, Rung.WINDOW, Rung.FULL, Rung.FULL]
    assert session.thaws == [(rung, 17) for rung in rungs]
    assert session.tokens == [1, 2, 3, *yielded[:-1]]
    assert [position for position, _ in session.decoded[35:]] == list(range(first - 1, 52))


def test_a_rewalk_at_the_beginning_returns_to_the_end_of_the_prompt() -> None:
    spikes = {5, 6, 7, 8}
    recovery = Recovery(smooth=1, warm_up=2, refractory=0, rewalk=20)
    session = FakeSession(planned(spikes), recovery)
    yielded = stopped_after(session, None, [9], 30, GREEDY)
    assert session.climb_counts.rewalk == 1
    assert session.decoded[8] == (0, 9)
    assert yielded == [token_at(position, 2) for position in range(1, 31)]


def test_climbs_are_reported_and_counted() -> None:
    session = FakeSession(planned({20, 25, 30, 35, 54}), Recovery(smooth=1, warm_up=WARM_UP))
    stopped_after(session, None, [1, 2, 3], 60, GREEDY)
    assert [climb.rung for climb in session.climbs] == [*LADDER, Rung.SOFT]
    assert [climb.position for climb in session.climbs] == [20, 25, 30, 35, 45]
    assert session.climb_counts == ClimbCounts(soft=2, window=1, full=1, rewalk=1, restored=100)
    assert [climb.restored for climb in session.climbs] == [10, 20, 30, 30, 10]
    for climb in session.climbs:
        assert climb.entropy == pytest.approx(np.log2(N_VOCAB), abs=0.01)
        assert climb.mean_entropy < 1
        assert climb.top_probability == pytest.approx(1 / N_VOCAB, rel=0.02)


def test_without_recovery_there_is_no_ladder() -> None:
    session = FakeSession(planned(set(range(10, 100))))
    with closing(generate_tokens(session, [1, 2, 3], 60, GREEDY)) as stream:
        for n, _ in enumerate(stream):
            assert session.position == 3 + n
    assert not session.thaws
    assert not session.climbs


@pytest.mark.parametrize(("rewalk", "ahead"), [(0, 0), (1, 1), (8, 8)])
def test_as_many_tokens_are_held_back_as_a_rewalk_takes(rewalk: int, ahead: int) -> None:
    session = FakeSession(planned(set()), Recovery(rewalk=rewalk))
    with closing(generate_tokens(session, [1, 2, 3], 60, GREEDY)) as stream:
        for n, _ in enumerate(itertools.islice(stream, 40)):
            assert session.position == 3 + n + ahead


def test_stopping_after_a_decode_that_broke_the_session_raises_nothing() -> None:
    session = FakeSession(planned(set()), Recovery(), fails_at=12, breaks=True)
    yielded = stopped_after(session, 5, [1, 2, 3], 60, GREEDY)
    assert session.broken
    assert len(yielded) == 5


@dataclass
class Failing(FakeSession):
    """Stand in for a session that cannot restore entries, or cannot read again."""

    thaws_nothing: bool = False

    def thaw(self, rung: Rung, window: int) -> int:
        if self.thaws_nothing and rung is Rung.FULL:
            raise EntropyKVError("failed")
        return super().thaw(rung, window)

    def read(self, tokens: Sequence[int], all_logits: bool, **_: object) -> Iterator[None]:
        if len(self.decoded) == 35:
            raise EntropyKVError("failed")
        yield from super().read(tokens, all_logits)


@pytest.mark.parametrize(("thaws_nothing", "n_yielded"), [(True, 30 - 3), (False, 35 - 8 - 3)])
def test_the_last_yielded_token_is_not_read_where_recovery_fails(
    thaws_nothing: bool, n_yielded: int
) -> None:
    spikes = {20, 25, 30, 35}
    session = Failing(
        planned(spikes), Recovery(smooth=1, warm_up=WARM_UP), thaws_nothing=thaws_nothing
    )
    yielded: list[int] = []
    with pytest.raises(EntropyKVError, match="failed"):
        yielded.extend(generate_tokens(session, [1, 2, 3], 60, GREEDY))
    assert len(yielded) == n_yielded
    assert session.tokens == [1, 2, 3, *yielded[:-1]]


def test_penalties_after_a_rewalk_are_those_of_the_tokens_that_stayed() -> None:
    spikes = {20, 25, 30, 35}  # When the text is read again, the spikes do not occur.

    def alike(session: FakeSession) -> np.ndarray:
        logits = np.linspace(9, 10, N_VOCAB, dtype=np.float32)
        return logits * (0.001 if len(session.decoded) in spikes else 4)

    def whole(recovery: Recovery | None) -> list[int]:
        session = FakeSession(alike, recovery)
        found = stopped_after(session, None, [1, 2, 3], 50, Sampling(repeat_penalty=1.2))
        assert bool(session.climb_counts.rewalk) == (recovery is not None)
        return found

    assert whole(Recovery(smooth=1, warm_up=WARM_UP)) == whole(None)


def test_random_numbers_go_on_after_a_rewalk() -> None:
    spikes = {20, 25, 30, 35}

    def even(session: FakeSession) -> np.ndarray:
        logits = np.zeros(N_VOCAB, np.float32)
        logits[:16] = 0 if len(session.decoded) in spikes else 12
        return logits

    sampling = Sampling(temperature=1.0, top_p=1.0, seed=4)
    session = FakeSession(even, Recovery(smooth=1, warm_up=WARM_UP))
    yielded = stopped_after(session, None, [1, 2, 3], 60, sampling)
    assert session.climb_counts.rewalk == 1
    dropped = [token for _, token in session.decoded[27:35]]
    again = yielded[24:32]
    assert again != dropped
    assert again != yielded[:8]
    assert again == [token for _, token in session.decoded[36:44]]


def test_a_late_close_leaves_alone_what_was_read_since() -> None:
    session = FakeSession(planned(set()), Recovery())
    stream = generate_tokens(session, [1, 2, 3], 60, GREEDY)
    next(stream)
    session.text.truncate(2)
    list(session.reader.read(range(40, 60), all_logits=False))
    before = list(session.tokens)
    stream.close()
    assert session.tokens == before


def test_ctrl_c_leaves_one_token_unread(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(FakeSession):
        def token_bytes(self, token: int) -> bytes:
            if len(answer.tokens) == 4:  # The fifth token is interrupted while its text is made.
                signal.raise_signal(signal.SIGINT)
            return super().token_bytes(token)

    session, answer = Interrupted(planned(set()), Recovery()), Answer()
    request = GenerationRequest(Prompt([1, 2, 3]), GREEDY, 60)
    write_answer(session, request, answer)  # type: ignore[arg-type]
    assert answer.interrupted
    assert capsys.readouterr().out.split() == [str(token) for token in answer.tokens]
    assert len(answer.tokens) == 5
    assert answer.unread == answer.tokens[4:]
    assert session.tokens == [1, 2, 3, *answer.tokens[:4]]


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
