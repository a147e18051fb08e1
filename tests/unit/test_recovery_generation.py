"""A generation can go back and write its last tokens again; the session is a fake that computes
nothing.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv.errors import ContextError
from entropykv.session.generate import generate
from entropykv.settings.recovery import Recovery, Rung
from entropykv.settings.sampling import Sampling
from tests.support.climbs import ClimbCounts
from tests.support.ladders import (
    GREEDY,
    LADDER,
    N_VOCAB,
    SILENT,
    WARM_UP,
    FakeSession,
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
    with closing(generate(session, prompt, options["max_tokens"], sampling)) as stream:
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
    with closing(generate(session, [1, 2, 3], 60, GREEDY)) as stream:
        for n, _ in enumerate(stream):
            assert session.position == 3 + n
    assert not session.thaws
    assert not session.climbs


@pytest.mark.parametrize(("rewalk", "ahead"), [(0, 0), (1, 1), (8, 8)])
def test_as_many_tokens_are_held_back_as_a_rewalk_takes(rewalk: int, ahead: int) -> None:
    session = FakeSession(planned(set()), Recovery(rewalk=rewalk))
    with closing(generate(session, [1, 2, 3], 60, GREEDY)) as stream:
        for n, _ in enumerate(itertools.islice(stream, 40)):
            assert session.position == 3 + n + ahead
