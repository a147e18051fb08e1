"""Sessions whose memory is not shared keep a text whole if it fits the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Session
from tests.support.logits import tokens_for
from tests.support.saved_sessions import all_entries, future, session_of

POLICIES = ("adaptive", "adaptive:mass+values+echo", "uniform", "layer", "streaming")

each_policy = pytest.mark.parametrize("policy", POLICIES)


def logits_of_turns(session: Session, turns: tuple[int, ...]) -> Any:
    return [session.decode(tokens_for(n, seed=n), all_logits=True) for n in turns]


@each_policy
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_text_that_the_bytes_hold_has_the_numbers_of_a_full_cache(
    uneven_llama: Path, policy: str, kv_type: str
) -> None:
    turns = (41, 1, 1, 30, 1)
    with (
        session_of(uneven_llama, policy=policy, kv_type=kv_type) as session,
        session_of(uneven_llama, policy=policy, kv_type=kv_type, kv_budget=1.0) as full,
    ):
        assert sum(turns) <= session.cache.sure_entries < session.config.n_ctx
        for ours, theirs in zip(
            logits_of_turns(session, turns), logits_of_turns(full, turns), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
        assert session.cache.evicted == 0
        assert all_entries(session) == [list(range(sum(turns)))] * len(all_entries(session))


@each_policy
def test_the_longest_text_that_is_kept_whole_fills_the_bytes(
    uneven_llama: Path, policy: str
) -> None:
    with session_of(uneven_llama, policy=policy) as session:
        longest = session.cache.sure_entries
        session.decode(tokens_for(longest))
        assert session.cache.evicted == 0
        stats = session.stats()
        page = stats.kv_bytes_budget - stats.kv_bytes_now
        assert 0 <= page < stats.kv_bytes_budget / 10
        for token in tokens_for(70, seed=1):
            session.decode([token])
            stats = session.stats()
            assert stats.kv_bytes_peak <= stats.kv_bytes_budget
        assert session.cache.evicted > 0


@each_policy
def test_a_text_that_is_longer_from_its_start_follows_the_policy(
    uneven_llama: Path, policy: str
) -> None:
    """A long prompt gives the same result in a session that has kept a short text whole before."""
    with (
        session_of(uneven_llama, policy=policy) as session,
        session_of(uneven_llama, policy=policy) as other,
    ):
        other.decode(tokens_for(60))
        other.reset()
        for each in (session, other):
            each.decode(tokens_for(300))
        assert future(session) == future(other)


@each_policy
def test_a_text_that_grows_beyond_the_bytes_comes_under_the_policy(
    uneven_llama: Path, policy: str
) -> None:
    with session_of(uneven_llama, policy=policy) as session:
        short = session.cache.sure_entries // 2
        session.decode(tokens_for(short))
        session.decode(tokens_for(200, seed=1))
        assert session.cache.evicted > 0
        sinks = session.config.options.n_sinks
        for positions in all_entries(session):
            assert positions[:sinks] == list(range(sinks))
            assert positions[-1] == short + 199


@each_policy
@pytest.mark.parametrize("n_read", [50, 300])
def test_a_saved_session_goes_on_in_another_that_has_read_something_else(
    uneven_llama: Path, policy: str, n_read: int
) -> None:
    with (
        session_of(uneven_llama, policy=policy) as session,
        session_of(uneven_llama, policy=policy) as other,
    ):
        session.decode(tokens_for(n_read))
        other.decode(tokens_for(350 - n_read, seed=3))
        other.files.load_state(session.files.save_state())
        assert future(other) == future(session)


@each_policy
@pytest.mark.parametrize("position", [0, 50])
def test_a_session_that_went_back_has_the_budgets_of_one_that_is_loaded_there(
    uneven_llama: Path, policy: str, position: int
) -> None:
    with (
        session_of(uneven_llama, policy=policy) as session,
        session_of(uneven_llama, policy=policy) as loaded,
    ):
        session.decode(tokens_for(300))
        session.text.truncate(position)
        loaded.files.load_state(session.files.save_state())
        assert loaded.cache.budgets() == session.cache.budgets()
        assert future(loaded) == future(session)


@each_policy
def test_other_bytes_change_what_is_kept_whole(uneven_llama: Path, policy: str) -> None:
    with session_of(uneven_llama, policy=policy) as session:
        session.decode(tokens_for(60))
        session.cache.resize(200)
        assert session.cache.evicted == 0
        assert session.cache.sure_entries >= 200
        session.decode(tokens_for(100, seed=1))
        assert session.cache.evicted == 0
        session.cache.resize(96)
        assert session.cache.evicted > 0
        assert session.cache.sure_entries < 160


def test_a_text_within_the_bytes_can_be_asked_again(uneven_llama: Path) -> None:
    """After a text that fits the budget, an answer is repeated without reading its prompt again."""
    with session_of(uneven_llama, policy="adaptive") as session:
        session.decode(tokens_for(60))
        first = list(session.generate([], 20))
        assert session.text.return_to_prompt(60, 80)
        assert list(session.generate([], 20)) == first
        assert session.stats().prompt_tokens == 60


def test_what_freezes_follows_its_schedule(uneven_llama: Path) -> None:
    with session_of(uneven_llama, policy="rolling-freeze", freeze="ram") as session:
        assert session.cache.sure_entries == 0
