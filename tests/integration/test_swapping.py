"""Conversations can be swapped out of a pool and in again, and can be forked."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entropykv import ContextError, Pool, PoolError
from entropykv.session import shared_pool
from tests.architectures import MODELS
from tests.support.logits import relative_error
from tests.support.pools import N_CTX, PROMPTS, Steps, assert_equal, pool_of, together, written
from tests.support.releases import write_known
from tests.support.threads import in_threads
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def model(pool_llama: Path) -> Path:
    return pool_llama


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_more_conversations_than_fit_are_parked_and_nothing_is_read_again(
    model: Path, where: str, tmp_path: Path
) -> None:
    swap = "ram" if where == "ram" else f"disk:{tmp_path}"
    with pool_of(model, n_sequences=1, kv_budget=N_CTX, swap=swap) as pool:
        sessions = [pool.session() for _ in range(4)]
        steps = Steps(pool)
        logits = [written(s, p, 3)[-1] for s, p in zip(sessions, PROMPTS, strict=False)]
        assert [session.cache.is_live for session in sessions] == [False, False, False, True]
        assert pool.stats().swapped_out == 3
        standings = [session.cache.pool_status() for session in sessions]
        assert [each.state for each in standings] == ["swapped_out"] * 3 + ["idle"]
        assert pool.stats().swapped_bytes == sum(each.swapped_bytes for each in standings) > 0
        n_heads = pool.runner.factory.facts.n_kv_heads
        entries = [n_heads * session.position for session in sessions]
        assert [each.swapped_entries for each in standings] == [*entries[:3], 0]
        again = [
            written(s, [int(row.argmax())], 5) for s, row in zip(sessions, logits, strict=True)
        ]
        n_read = sum(map(sum, steps.parts))
        assert n_read == sum(map(len, PROMPTS[:4])) + 4 * (3 + 6)
        assert list(tmp_path.iterdir()) == []
    for prompt, rows in zip(PROMPTS, again, strict=False):
        with pool_of(model, n_sequences=1, kv_budget=N_CTX) as single:
            assert_equal(rows, written(single.session(), prompt, 9)[4:])


def leave_pool(pool: Pool) -> None:
    """Let every text that is swapped out leave the pool."""
    with pool.runner.scheduler.between_steps():
        while pool.runner.kept_texts.make_room():
            pass


@pytest.fixture
def windows(tmp_path: Path) -> Path:
    """Write a model in which every second layer has a window of 32 tokens."""
    path = tmp_path / "windows.gguf"
    write_known(path, MODELS["gemma3"])
    return path


@pytest.mark.parametrize("leaves", [False, True])
def test_parked_windows_go_back_as_far_as_they_could(windows: Path, leaves: bool) -> None:
    """A session that was swapped out before its windows lost a token can go back anywhere."""
    with pool_of(windows, n_sequences=1, kv_type="f16", kv_budget=N_CTX) as pool:
        first, second = pool.session(), pool.session()
        written(first, PROMPTS[1], 2)
        lengths = range(first.position + 1)
        before = [first.text.held().can_return_to(n) for n in lengths]
        assert before == [True] * len(before)
        second.decode([1])
        assert not first.cache.is_live
        if leaves:
            leave_pool(pool)
        other = first.fork()
        for session in (first, other):
            assert [session.text.held().can_return_to(n) for n in lengths] == before
        second.close()
        for session in (first, other):
            session.text.truncate(20)
            rows = session.decode(PROMPTS[1][20:30])
            session.rest()
            with pool_of(windows, n_sequences=1, kv_type="f16", kv_budget=N_CTX) as alone:
                expected = alone.session().decode(PROMPTS[1][:30])
            assert relative_error(rows, expected) < 1e-2


@pytest.mark.parametrize("leaves", [False, True])
def test_parked_windows_go_back_no_further_than_they_can(windows: Path, leaves: bool) -> None:
    """A session that was swapped out, and whose windows have lost tokens, goes back exactly as far
    as before.
    """
    options = {"n_sequences": 1, "kv_type": "f16", "kv_budget": 60, "policy": "recency"}
    with pool_of(windows, **options) as pool:
        first, second = pool.session(), pool.session()
        written(first, PROMPTS[4], 2)
        before = [first.text.held().can_return_to(n) for n in range(first.position + 1)]
        assert not all(before)
        second.decode([1])
        if leaves:
            leave_pool(pool)
        assert [first.text.held().can_return_to(n) for n in range(first.position + 1)] == before
        second.close()
        first.decode([5])
        with pytest.raises(ContextError, match="hold what they see only from position"):
            first.text.truncate(100)


def test_where_nothing_more_can_be_parked_the_newcomer_is_refused(model: Path) -> None:
    with pool_of(model, n_sequences=1, kv_budget=N_CTX, swap_limit="1KiB") as pool:
        first, second = pool.session(), pool.session()
        rows = written(first, PROMPTS[0], 2)
        with pytest.raises(PoolError, match="swap_limit"):
            second.decode([1])
        assert (
            first.position == len(first.tokens) == len(PROMPTS[0]) + 2
        )  # No session has lost an entry.
        written(first, [int(rows[-1].argmax())], 1)
        first.close()
        second.decode([1])


def test_a_newcomer_waits_for_those_who_write(model: Path) -> None:
    with pool_of(model, n_sequences=1, kv_budget=N_CTX) as pool:
        first, second = pool.session(), pool.session()
        written: list[int] = []

        def write() -> None:
            for token in first.generate(PROMPTS[0], max_tokens=60, temperature=0):
                written.append(token)  # noqa: PERF402  # The other thread looks.

        def come() -> int:
            wait_for(lambda: first.position >= len(PROMPTS[0]))
            second.decode(PROMPTS[1])
            return len(written)

        assert in_threads([write, come])[1] == 60


def test_a_newcomer_waits_for_one_that_becomes_idle_meanwhile(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new session waits for one that becomes idle while the pool refuses the new one."""
    monkeypatch.setattr(shared_pool, "IDLE_SECONDS", 1e6)
    late = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late, sleep=time.sleep)
    monkeypatch.setattr(shared_pool, "time", clock)
    with pool_of(model, n_sequences=1, kv_budget=N_CTX) as pool:
        first, second = pool.session(), pool.session()
        shared = pool.runner.shared
        make_live, refusals = shared.make_live, []

        def slowly(*args: Any) -> None:
            nonlocal late
            try:
                make_live(*args)
            except PoolError as error:
                refusals.append(error)
                late = 2e6
                raise

        monkeypatch.setattr(shared, "make_live", slowly)
        first.decode(PROMPTS[0])
        second.decode(PROMPTS[1])
        assert refusals


def test_one_thread_can_hold_several_generations(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_pool, "IDLE_SECONDS", 120.0)
    with pool_of(model, n_sequences=2, kv_budget=N_CTX) as pool:
        streams = [pool.session().generate(p, max_tokens=6, temperature=0) for p in PROMPTS[:2]]
        start = time.monotonic()
        pairs = list(zip(*streams, strict=True))
        assert len(pairs) == 6
        assert time.monotonic() - start < 60


@pytest.mark.parametrize("policy", ["uniform", "adaptive", "streaming", "layer"])
@pytest.mark.parametrize("tokens", [N_CTX, 96])
def test_a_fork_is_the_same_conversation_to_the_bit(model: Path, tokens: int, policy: str) -> None:
    """A fork has the logits of its original to the bit, also if both evict, or shared pages leave
    the pool.
    """
    options: dict[str, Any] = {"kv_budget": tokens, "policy": policy, "checkpoints": 0}
    with pool_of(model, n_sequences=2, **options) as pool:
        steps = Steps(pool)
        first = pool.session()
        first.decode(PROMPTS[4])
        fork = first.fork()
        again = fork.fork()
        expected = written(first, [9], 20)
        first.close()
        for session in (fork, again):
            found = written(session, [9], 20)
            assert session.cache.evicted > 0 or tokens == N_CTX
            session.close()
            assert_equal(found, expected)
        assert sum(map(sum, steps.parts)) == len(PROMPTS[4]) + 3 * 21
        assert 0 < steps.most_bytes <= pool.stats().kv_bytes_budget
        assert pool.stats().kv_bytes_now == 0


def test_a_fork_takes_no_pages_until_it_reads(model: Path) -> None:
    with pool_of(model, n_sequences=4, kv_budget=4 * N_CTX, checkpoints=0) as pool:
        first = pool.session()
        first.decode(PROMPTS[4])
        alone = pool.stats().kv_bytes_now
        forks = [first.fork() for _ in range(3)]
        assert pool.stats().kv_bytes_now == alone
        together([first, *forks], [[7], [8], [9], [10]], 4)
        # Each fork has its own last page per KV head, and at most one more.
        n_heads = 3 * 2
        page = first._slot.store.sharing.plan.page_bytes
        assert pool.stats().kv_bytes_now <= alone + 4 * 2 * n_heads * page < 2 * alone
        first.close()
        rows = [fork.decode([5]) for fork in forks]  # Forks keep the shared pages.
        for fork in forks:
            fork.close()
        assert len(rows) == 3
        assert pool.stats().kv_bytes_now == 0


def test_idle_conversations_stay_in_the_pool_while_there_is_room(
    model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"swap": f"disk:{tmp_path}", "policy": "uniform", "checkpoints": 0}
    with pool_of(model, n_sequences=1, kv_budget=N_CTX, **options) as pool:
        first, second = pool.session(), pool.session()
        row = written(first, PROMPTS[4], 1)[-1]
        page_bytes = pool.stats().kv_bytes_now
        written(second, PROMPTS[3], 1)
        assert not first.cache.is_live
        assert pool.stats().kv_bytes_now > page_bytes  # Both sessions are in the pool.
        outside = pool.stats().swapped_bytes
        assert outside < page_bytes / 8
        second.reset()
        written(second, [3] * 400, 1)  # This text needs the pages of the other session.
        assert pool.stats().swapped_bytes > 2 * outside
        found = written(first, [int(row.argmax())], 5)
    with pool_of(model, n_sequences=1, kv_budget=N_CTX, policy="uniform") as single:
        expected = written(single.session(), PROMPTS[4], 7)[2:]
        assert_equal(found, expected)


def swaps(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows with every sequence that is swapped out."""
    shared, found = pool.runner.shared, []
    vacate = shared._vacate

    def note(slot: object) -> None:
        found.append(slot)
        vacate(slot)

    monkeypatch.setattr(shared, "_vacate", note)
    return found


@pytest.mark.parametrize("policy", ["uniform", "adaptive"])
def test_nobody_is_swapped_out_while_all_texts_have_room(
    model: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle conversations keep their places while there are bytes for all; one leaves only if a
    fourth conversation needs one of three places.
    """
    options: dict[str, Any] = {"kv_budget": 2 * N_CTX, "policy": policy, "checkpoints": 0}
    with pool_of(model, n_sequences=3, **options) as pool:
        swapped = swaps(pool, monkeypatch)
        sessions = [pool.session() for _ in range(4)]
        rows = [written(s, p, 2) for s, p in zip(sessions[:3], PROMPTS, strict=False)]
        again = [
            written(s, [int(row[-1].argmax())], 3)
            for s, row in zip(sessions[:3], rows, strict=True)
        ]
        assert [session.cache.is_live for session in sessions] == [True] * 3 + [False]
        assert swapped == []
        written(sessions[3], PROMPTS[3], 1)  # There are three places.
        assert [session.cache.is_live for session in sessions] == [False, True, True, True]
        assert len(swapped) == 1
    for prompt, first, second in zip(PROMPTS, rows, again, strict=False):
        with pool_of(model, n_sequences=1, kv_budget=N_CTX, policy=policy) as single:
            assert_equal([*first, *second], written(single.session(), prompt, 6))


@pytest.mark.parametrize("policy", ["uniform", "adaptive"])
def test_an_idle_conversation_is_swapped_out_before_it_would_lose_entries(
    model: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a growing text needs the bytes, the idle one leaves, and neither loses an entry."""
    options: dict[str, Any] = {"kv_budget": N_CTX, "policy": policy, "checkpoints": 0}
    with pool_of(model, n_sequences=2, **options) as pool:
        swapped = swaps(pool, monkeypatch)
        first, second = pool.session(), pool.session()
        rows = written(first, PROMPTS[2], 1)
        found = written(second, PROMPTS[4], 1)
        assert swapped == []
        for _ in range(5):
            found += written(second, [int(found[-1].argmax())], 39)
        assert swapped == [first._slot]
        assert (first.cache.evicted, second.cache.evicted) == (0, 0)
        rows += written(first, [int(rows[-1].argmax())], 3)
        assert first.cache.evicted == 0
    for prompt, expected in ((PROMPTS[2], rows), (PROMPTS[4], found)):
        with pool_of(model, n_sequences=1, kv_budget=N_CTX, policy=policy) as single:
            assert_equal(expected, written(single.session(), prompt, len(expected) - 1))


def test_who_was_used_least_recently_leaves_first(model: Path) -> None:
    options: dict[str, Any] = {"kv_budget": N_CTX, "checkpoints": 0}
    with pool_of(model, n_sequences=1, **options) as pool:
        sessions = [pool.session() for _ in range(3)]
        for index in (0, 1, 2, 0):
            written(sessions[index], PROMPTS[3], 1)
        pool.session().decode(PROMPTS[3])
        assert [each.cache.is_live for each in sessions] == [False] * 3
        kept_texts, left = pool.runner.kept_texts, []
        for _ in sessions:
            with pool.runner.scheduler.between_steps():
                assert kept_texts.make_room()
            status = [each.cache.pool_status().pages_bytes > 0 for each in sessions]
            left.append([index for index in range(3) if not status[index]])
        assert left == [[1], [1, 2], [0, 1, 2]]


@pytest.mark.parametrize("name", ["gemma3", "jamba", "lfm2", "deepseek2"])
def test_every_kind_of_layer_is_forked(name: str, tmp_path: Path) -> None:
    """A fork has all states of its layers: windows, recurrent layers, latent attention."""
    path = tmp_path / f"{name}.gguf"
    write_known(path, MODELS[name])
    with pool_of(path, n_sequences=2, kv_type="f16", kv_budget=2 * N_CTX) as pool:
        first = pool.session()
        first.decode(PROMPTS[2])
        fork = first.fork()
        expected = written(first, [9], 8)
        first.close()
        assert_equal(written(fork, [9], 8), expected)
