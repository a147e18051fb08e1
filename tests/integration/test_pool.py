"""Conversations in one pool get the same numbers as each of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import PoolError, Session
from tests.architectures import MODELS
from tests.support.logits import relative_error
from tests.support.pools import (
    N_CTX,
    PIECE,
    PROMPTS,
    Steps,
    assert_equal,
    pool_of,
    together,
    written,
)
from tests.support.releases import write_known
from tests.support.tiny_models import write_llama

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def model(pool_llama: Path) -> Path:
    return pool_llama


def assert_equals_alone(
    model: Path, prompts: Any, shares: Any, found: Any, n: int, **options: Any
) -> None:
    """Assert that each text has the logits that it has alone, in a pool of its share of bytes."""
    for rows, prompt, share in zip(found, prompts, shares, strict=True):
        with pool_of(model, n_sequences=1, **{**options, "kv_budget": f"{share}B"}) as single:
            session = single.session()
            session.decode([1])
            assert_equal(rows, written(session, prompt, n))


@pytest.mark.parametrize(
    ("policy", "tokens"),
    [*((p, n) for p in ("uniform", "streaming", "layer") for n in (2048, 256)), ("adaptive", 2048)],
)
def test_logits_in_company_are_those_alone_to_the_bit(
    model: Path, tokens: int, policy: str
) -> None:
    """Logits are those of each text alone, to the bit, with ample budgets and with budgets that
    evict.

    All sessions are live before the first prompt is read, so that shares do not change.
    """
    with pool_of(model, n_sequences=len(PROMPTS), kv_budget=tokens, policy=policy) as pool:
        sessions = [pool.session() for _ in PROMPTS]
        for session in sessions:  # From now on, every session shares the pool with all others.
            session.decode([1])
        plans = [session._slot.store for session in sessions]
        shares = [plan.share_pages * plan.sharing.plan.page_bytes for plan in plans]
        steps = Steps(pool)
        found = together(sessions, PROMPTS, 24)
        evicted = [session.cache.evicted for session in sessions]
    assert (max(evicted) > 0) == (tokens == 256)
    assert max(map(len, steps.parts)) > 1  # Several sessions were read in one step.
    # Prompts are read together with single tokens.
    assert any(1 in parts and max(parts) > 1 for parts in steps.parts)
    assert_equals_alone(model, PROMPTS, shares, found, 24, policy=policy)


def noting_shares(session: Session) -> list[tuple[int, int, int | None]]:
    """Return a list that records a session's share from now on: position, pages, longest text."""
    slot, found = session._slot, list[tuple[int, int, int | None]]()
    take = slot.store.take_share

    def noted(pages: int, longest: int | None) -> None:
        found.append((slot.position, pages, longest))
        take(pages, longest)

    slot.store.take_share = noted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("policy", ["adaptive", "uniform"])
def test_with_the_same_shares_the_logits_are_those_alone(model: Path, policy: str) -> None:
    """A text alone that gets the same share at every position has the same logits as in company.

    Shares change as texts grow and as losses are measured.
    """
    prompts = [PROMPTS[3], PROMPTS[2], [7] * 260, PROMPTS[4]]
    with pool_of(model, n_sequences=len(prompts), kv_budget=360, policy=policy) as pool:
        sessions = [pool.session() for _ in prompts]
        shares = [noting_shares(session) for session in sessions]
        found = together(sessions, prompts, 24)
        evicted = [session.cache.evicted for session in sessions]
    assert evicted[0] == 0 < max(evicted)
    assert max(len({pages for _, pages, _ in each}) for each in shares) > 2
    for rows, prompt, had in zip(found, prompts, shares, strict=True):
        with pool_of(model, n_sequences=1, kv_budget=360, policy=policy) as single:
            session = single.session()
            shared = single.runner.shared
            run, left = single.runner.scheduler._run, list(had)

            def follow(works: Any, session: Any = session, run: Any = run, left: Any = left) -> Any:
                while left and left[0][0] <= works[0].part.position:
                    session._slot.store.take_share(*left.pop(0)[1:])
                return run(works)

            shared._shares.give = lambda *_, **__: None  # type: ignore[method-assign]
            with single.runner.live_store(session._slot):
                session._slot.store.take_share(*left.pop(0)[1:])
            single.runner.scheduler._run = follow
            assert_equal(rows, written(session, prompt, 24))


@pytest.mark.parametrize("policy", ["adaptive", "auto", "uniform"])
@pytest.mark.parametrize("kv_budget", [48, 64, 80, 96])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_pool_gives_the_logits_of_a_session(
    model: Path, n_threads: int, kv_budget: int, policy: str
) -> None:
    """A pool gives a session's logits to the bit, if products are computed equally for one token
    and for many, and if the budget fills whole pages, which a pool shares.
    """
    options: dict[str, Any] = {"n_ctx": N_CTX, "n_ubatch": PIECE, "kv_type": "q8_0"}
    same: dict[str, Any] = {"n_threads": n_threads, "kv_budget": kv_budget, "policy": policy}
    with Session(model, **same, **options) as session:
        expected = written(session, PROMPTS[4], 20)
    with pool_of(model, n_sequences=3, **same) as pool:
        found = written(pool.session(), PROMPTS[4], 20)
    assert_equal(found, expected)


NAMES = (
    "gemma3",
    "gpt-oss",
    "llama4",
    "jamba",
    "qwen3next",
    "lfm2",
    "bloom",
    "deepseek2",
    "gemma4",
)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_layer_in_company(name: str, tmp_path: Path) -> None:
    """In a pool, all kinds of layers give the logits that they give to a session alone."""
    path = tmp_path / f"{name}.gguf"
    write_known(path, MODELS[name])
    prompts = [prompt[:60] for prompt in PROMPTS[:3]]
    with pool_of(path, n_sequences=3, kv_type="f16", kv_budget=600) as pool:
        found = together([pool.session() for _ in prompts], prompts, 12)
    for rows, prompt in zip(found, prompts, strict=True):
        with Session(path, n_ctx=N_CTX, n_ubatch=PIECE, n_threads=2, kv_type="f16") as session:
            tokens = [int(row.argmax()) for row in rows[:-1]]
            expected = [session.decode(prompt)[-1], *(session.decode([t])[-1] for t in tokens)]
        assert relative_error(np.array(rows), np.array(expected)) < MODELS[name].rounding


def test_positions_beyond_the_trained_context_are_each_their_own(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    write_llama(path, weight_type="Q8_0", head_dim=32, n_ctx_train=64)
    prompts = [PROMPTS[4][:150], PROMPTS[2][:20], PROMPTS[0]]
    with pool_of(path, n_sequences=3, kv_budget=150, n_ubatch=16, policy="uniform") as pool:
        sessions = [pool.session() for _ in prompts]
        for session in sessions:
            session.decode([1])
        shares = [session.stats().kv_bytes_budget for session in sessions]
        found = together(sessions, prompts, 30)
        assert sessions[0].stats().rebases > sessions[1].stats().rebases == 0
    assert_equals_alone(path, prompts, shares, found, 30, n_ubatch=16, policy="uniform")


def test_frozen_entries_are_each_their_own(model: Path) -> None:
    prompts = [PROMPTS[4], PROMPTS[2]]
    options: dict[str, Any] = {"freeze": "ram", "kv_budget": 100}
    with pool_of(model, n_sequences=2, **options) as pool:
        sessions = [pool.session() for _ in prompts]
        for session in sessions:
            session.decode([1])
        share = sessions[0].stats().kv_bytes_budget
        found = together(sessions, prompts, 20)
        assert all(session.stats().frozen_entries > 0 for session in sessions)
        assert all(session.cache.evicted == 0 for session in sessions)
    assert_equals_alone(model, prompts, [share] * 2, found, 20, **options)


@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_a_session_alone_is_live_and_shares_with_nobody(model: Path, store: str) -> None:
    """A session without a pool keeps its budget, and cannot be forked or swapped out."""
    with Session(model, n_ctx=N_CTX, kv_budget=128, store=store, n_threads=1) as session:
        budgets = session.cache.budgets()
        assert min(map(min, budgets)) > 0
        session.decode(PROMPTS[0])
        expected = session.decode([7])
        for leave in (session.fork, session.cache.swap_out):
            with pytest.raises(PoolError, match="create it with a Pool"):
                leave()
        session.text.keep_checkpoint()
        assert not session.text.return_to_checkpoint(PROMPTS[0])
        assert session.cache.pool_status().state == "active"
        session.rest()
        assert session.cache.pool_status().state == "idle"
        session.reset()
        assert session.cache.is_live
        assert session.cache.budgets() == budgets
        session.decode(PROMPTS[0])
        np.testing.assert_array_equal(session.decode([7]), expected)
    assert session.is_closed
    with pool_of(model, n_sequences=1) as pool:
        assert not pool.holds_one
