"""A pool of one conversation gives it the logits of a session alone, then takes the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entropykv import EntropyKVError, Pool, PoolError, Session, SettingsError
from entropykv.settings.cache_options import CacheOptions
from tests.support.pools import N_CTX, PIECE, PROMPTS, assert_equal, pool_of, written

pytest.importorskip("fastapi", reason="needs the extra server")

from entropykv.server.engine.answering import Totals
from entropykv.server.engine.engine import figures_of_pool
from entropykv.server.engine.prefix_cache import PrefixCache
from entropykv.server.http.access import Caller

ANNA, BEN = Caller("anna"), Caller("ben")
SMALL = 96
"""A budget in tokens that evicts the longer prompts."""


def options_of(**options: Any) -> CacheOptions:
    usual: dict[str, Any] = {"n_ctx": N_CTX, "n_ubatch": PIECE, "n_threads": 1, "kv_budget": SMALL}
    return CacheOptions(**{**usual, **options})


@pytest.fixture(params=["headwise", "flat"])
def pool(request: pytest.FixtureRequest, pool_llama: Path) -> Any:
    kv_type = "f16" if request.param == "flat" else "q8_0"
    with Pool.of_one(pool_llama, options_of(store=request.param, kv_type=kv_type)) as made:
        yield made


def test_conversations_follow_each_other_as_sessions_alone(pool: Pool, pool_llama: Path) -> None:
    assert pool.holds_one
    evicted = 0
    for prompt in (PROMPTS[4], PROMPTS[2], PROMPTS[4]):
        with pool.session() as session, Session(pool_llama, pool.runner.config.options) as alone:
            with pytest.raises(PoolError, match="holds one conversation"):
                pool.session()
            assert_equal(written(session, prompt, 9), written(alone, prompt, 9))
            assert (
                session.text.held().text.reusable_from == alone.text.held().text.reusable_from > 0
            )
            evicted += alone.cache.evicted
            stats, expected = pool.stats(), alone.stats()
            for name in ("kv_bytes_budget", "kv_bytes_now", "kv_bytes_staging", "entries_kept"):
                assert getattr(stats, name) == getattr(expected, name), name
            assert (stats.sessions, stats.live, stats.evictions) == (1, 1, evicted)
            with pytest.raises(PoolError, match="without a pool"):
                session.fork()
    stats = pool.stats()
    assert (stats.sessions, stats.kv_bytes_now, stats.evictions) == (0, 0, evicted)


def test_a_session_that_fails_leaves_its_place(pool: Pool) -> None:
    session = pool.session()
    session.decode(PROMPTS[3])
    del session  # The garbage collector closes the session before the next step.
    assert pool.session().position == 0


def test_it_is_no_pool_of_several(pool_llama: Path) -> None:
    with pytest.raises(SettingsError, match="one conversation"):
        Pool.of_one(pool_llama, options_of(n_sequences=2))


def test_a_closed_pool_frees_the_model_with_its_session(pool: Pool) -> None:
    session = pool.session()
    session.decode(PROMPTS[3])
    pool.close()
    assert pool.runner.closed
    with pytest.raises(EntropyKVError, match="closed; make a new one"):
        session.decode([5])


def test_figures_of_a_server_are_sums_over_its_conversations(pool_llama: Path) -> None:
    options: dict[str, Any] = {"kv_budget": 2 * SMALL, "freeze": "ram"}
    with pool_of(pool_llama, n_sequences=2, **options) as pool:
        idle, *sessions = (pool.session() for _ in range(3))
        for session in sessions:
            written(session, PROMPTS[4], 9)
        one = idle.stats()
        figures = figures_of_pool(pool, one, [Totals(prompt_tokens=7), Totals(prompt_tokens=1)])
        stats = [session.stats() for session in sessions]
        for name in ("frozen_entries", "frozen_bytes", "entries_frozen"):
            assert getattr(figures, name) == sum(getattr(each, name) for each in stats) > 0, name
        assert [each.cache.is_live for each in sessions] == [False, True]
        for name in ("entries_full", "kv_bytes_full"):
            assert getattr(figures, name) == getattr(stats[1], name) > 0, name
        assert figures.prompt_tokens == 8
        for session in sessions:
            session.close()
        after = figures_of_pool(pool, one, [])
        assert (after.frozen_entries, after.entries_full) == (0, 0)
        assert after.entries_frozen == figures.entries_frozen


def take(cache: PrefixCache, tokens: list[int], caller: Caller) -> Session:
    session = cache.take(tokens, caller)
    if session.position == 0:
        session.decode(tokens)
    return session


def test_the_only_place_goes_to_the_next_prompt(pool: Pool) -> None:
    cache = PrefixCache(pool, 64)
    first = take(cache, PROMPTS[1], ANNA)
    cache.put(first, ANNA)
    assert take(cache, PROMPTS[1], ANNA) is first
    cache.put(first, ANNA)
    assert (cache.resumed, pool.runner.shared.n_let_go) == (1, 0)
    other = cache.take(PROMPTS[1], BEN)
    assert other.position == 0, "the text of another user"
    assert (cache.resumed, pool.runner.shared.n_let_go) == (1, 1)
    assert cache.length_of(ANNA) == 0
    other.decode(PROMPTS[1])
    cache.put(other, BEN)
    assert cache.take(PROMPTS[2], BEN).position == 0, "it begins differently"
    assert (cache.resumed, pool.runner.shared.n_let_go) == (1, 2)
    assert len(pool.sessions()) == 1


def test_a_file_takes_the_place_of_what_is_kept(pool: Pool, tmp_path: Path) -> None:
    cache = PrefixCache(pool, 64)
    cache.put(take(cache, PROMPTS[1], ANNA), ANNA)
    cache.save(ANNA, tmp_path / "anna")
    cache.put(take(cache, PROMPTS[2], BEN), BEN)
    cache.load(ANNA, tmp_path / "anna")
    assert cache.length_of(ANNA) == len(PROMPTS[1])
    assert cache.length_of(BEN) == 0
    assert len(cache.conversations()) == 1
    cache.close()
    assert pool.stats().sessions == 0
