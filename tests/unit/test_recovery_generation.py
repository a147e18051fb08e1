"""A generation can go back and write its last tokens again, and ends properly; the session is a
fake that computes nothing.
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

from entropykv.cli.answer import Answer, write_answer
from entropykv.errors import ContextError, EntropyKVError
from entropykv.generation.prompt import GenerationRequest, Prompt
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
        yielded.extend(generate(session, [1, 2, 3], 60, GREEDY))
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
    stream = generate(session, [1, 2, 3], 60, GREEDY)
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
