"""A pool without room closes sessions that were put aside, the least recently used first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Pool, PoolError, Session

pytest.importorskip("fastapi", reason="needs the extra server")

from entropykv.server.engine.prefix_cache import PrefixCache
from entropykv.server.http.access import Caller
from entropykv.session.kept_texts import IdleSession, KeptTexts
from tests.support.pools import N_CTX, PROMPTS, pool_of, written

ANNA = Caller("anna")
LONG, OTHER = PROMPTS[4], PROMPTS[2]

pytestmark = pytest.mark.usefixtures("patient")


def put_aside(pool: Pool, session: Session) -> None:
    idle = IdleSession(session)
    pool.runner.kept_texts.index.add(idle, idle.tokens)


def take(pool: Pool, session: Session) -> None:
    """Take a session out of the index of those that were put aside, so that it may be used."""
    index = pool.runner.kept_texts.index
    assert any(index.remove(each) for each in index.of(IdleSession) if each.session is session)


def bytes_of(model: Path, prompt: list[int]) -> int:
    """Return the bytes that a text takes when it is swapped out of the pool."""
    with pool_of(model, n_sequences=1, kv_budget=N_CTX, checkpoints="0") as pool:
        session = pool.session()
        written(session, prompt, 0)
        session.cache.swap_out()
        with pool.runner.scheduler.between_steps():
            while pool.runner.kept_texts.make_room():
                pass
        return pool.stats().swapped_bytes


def tight(model: Path, **options: Any) -> Pool:
    """Open a pool of one live conversation, whose swap space has room for one text and a half."""
    limit = f"{bytes_of(model, LONG) * 3 // 2}B"
    defaults = {"n_sequences": 1, "kv_budget": N_CTX, "checkpoints": "0", "swap_limit": limit}
    return pool_of(model, **{**defaults, **options})


def read(pool: Pool, n: int) -> list[Session]:
    """Let sessions read texts of the same length, one after the other, and put each aside."""
    sessions = []
    for token in range(n):
        session = pool.session()
        written(session, [token + 3, *LONG[1:]], 0)
        put_aside(pool, session)
        sessions.append(session)
    return sessions


def test_the_least_recently_used_is_let_go_for_one_that_reads(pool_llama: Path) -> None:
    with tight(pool_llama) as pool:
        sessions = read(pool, 4)
        assert [each.is_closed for each in sessions] == [True, True, False, False]
        assert pool.runner.shared.n_let_go == 2
        assert pool.sessions() == sessions[2:]
        take(pool, sessions[2])
        row = sessions[2].decode([7])[-1]  # The remaining sessions have lost nothing.
    with pool_of(pool_llama, n_sequences=1, kv_budget=N_CTX) as alone:
        session = alone.session()
        session.decode([5, *LONG[1:]])
        np.testing.assert_array_equal(row, session.decode([7])[-1])


def test_who_was_not_put_aside_stays(pool_llama: Path) -> None:
    with tight(pool_llama) as pool:
        sessions = read(pool, 2)
        for each in sessions:
            take(pool, each)
        with pytest.raises(PoolError, match="swap_limit"):
            pool.session().decode([1])
        assert not any(each.is_closed for each in sessions)


def test_a_step_without_pages_lets_go_of_what_cannot_leave_the_pool(
    pool_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PoolError("the disk is full")

    with pool_of(pool_llama, n_sequences=1, kv_budget=N_CTX, checkpoints="0") as pool:
        sessions = read(pool, 2)
        monkeypatch.setattr(KeptTexts, "_outside", fail)
        third = pool.session()
        third.decode(OTHER)
        assert [each.is_closed for each in sessions] == [True, False]
        assert pool.stats().sessions == 2
        take(pool, sessions[1])
        with pytest.raises(PoolError, match="the disk is full"):
            third.decode(LONG)
        assert not sessions[1].is_closed


def test_shares_stay_as_they_are_within_a_step(pool_llama: Path) -> None:
    """Within a step, only sessions without a share are closed, so that the shares of the others do
    not change.
    """
    with pool_of(pool_llama, n_sequences=2, kv_budget=2 * N_CTX) as pool:
        first, second = read(pool, 2)
        first.cache.swap_out()
        shared = pool.runner.shared
        with pool.runner.scheduler.between_steps():
            assert shared.let_go(even_live=False)
            assert not shared.let_go(even_live=False)
        assert [each.is_closed for each in (first, second)] == [True, False]


def kept(cache: PrefixCache, tokens: list[int], caller: Caller = ANNA) -> Session:
    """Read a prompt, and keep its conversation in the cache; return its session."""
    session = cache.take(tokens, caller)
    session.decode(tokens[session.position :])
    cache.has_read(session)
    cache.put(session, caller)
    return session


def test_others_are_let_go_for_a_copy(pool_llama: Path) -> None:
    """A copy may close other conversations to have room, but never the one that is copied."""
    with tight(pool_llama) as pool:
        cache = PrefixCache(pool, 8)
        first, second = kept(cache, [3, *LONG[1:]]), kept(cache, LONG)
        copy = cache.take([*LONG[:-8], 5], ANNA)
        assert copy not in (first, second)
        assert copy.tokens == LONG
        assert cache.forked == 1
        assert [each.is_closed for each in (first, second)] == [True, False]


@pytest.mark.parametrize("caller", [ANNA, Caller("anna", "work")])
def test_without_room_for_a_copy_the_conversation_itself_goes_on_if_it_is_ones_own(
    pool_llama: Path, caller: Caller
) -> None:
    with tight(pool_llama) as pool:
        cache = PrefixCache(pool, 8)
        only = kept(cache, LONG)
        only.cache.swap_out()
        session = cache.take([*LONG[:-8], 5], caller)
        assert (session is only) == (caller == ANNA)
        assert not only.is_closed
        assert cache.length_of(ANNA) == (0 if caller == ANNA else len(LONG))


def test_nobody_is_let_go_for_a_text_that_is_too_large(pool_llama: Path) -> None:
    half = f"{bytes_of(pool_llama, LONG) // 2}B"
    with tight(pool_llama, swap_limit=half) as pool:
        cache = PrefixCache(pool, 8)
        small, large = kept(cache, OTHER[:20]), kept(cache, LONG)
        assert cache.take([*LONG[:-8], 5], Caller("anna", "work")).position == 0
        assert not small.is_closed
        assert not large.is_closed


def test_beyond_its_own_limit_a_server_keeps_the_most_recently_used(pool_llama: Path) -> None:
    with pool_of(pool_llama, n_sequences=4, kv_budget=4 * N_CTX) as pool:
        cache = PrefixCache(pool, 2)
        sessions = [kept(cache, [token, *OTHER]) for token in (3, 4, 5)]
        assert kept(cache, [4, *OTHER, 6]) is sessions[1]
        sessions.append(kept(cache, [6, *OTHER]))
        assert [each.is_closed for each in sessions] == [True, False, True, False]
        assert pool.runner.shared.n_let_go == 2
