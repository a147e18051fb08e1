"""Many conversations in one pool: the numbers of each alone, hard bytes, and nothing lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import (
    BudgetError,
    ContextError,
    EntropyKVError,
    PoolError,
    Session,
    SettingsError,
    UnsupportedModelError,
)
from entropykv.session import seat
from entropykv.session.pool_session import PoolSession
from tests.architectures import ARCHITECTURES
from tests.support.logits import relative_error
from tests.support.pools import N_CTX, PIECE, PROMPTS, Rows, Steps, pool_of, written
from tests.support.releases import write_known
from tests.support.threads import in_threads
from tests.support.tiny_models import write_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "tiny.gguf"
    write_llama(path, weight_type="Q8_0", n_layer=3, n_head=4, n_head_kv=2, head_dim=32, n_ff=64)
    return path


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, nobody who only waits for the processor is taken to be idle."""
    monkeypatch.setattr(seat, "IDLE_SECONDS", 60.0)


def together(sessions: Sequence[Session], prompts: Sequence[list[int]], n: int) -> list[Rows]:
    """The same as written(), of several conversations at a time."""
    return in_threads(
        [
            lambda s=session, p=prompt: written(s, p, n)
            for session, prompt in zip(sessions, prompts, strict=True)
        ]
    )


# --- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["uniform", "adaptive", "streaming", "layer"])
@pytest.mark.parametrize("tokens", [2048, 256])
def test_logits_in_company_are_those_alone_to_the_bit(
    model: Path, tokens: int, policy: str
) -> None:
    """Ample, and so few that everybody evicts; all are live before the first prompt is read."""
    with pool_of(model, n_sequences=len(PROMPTS), kv_budget=tokens, policy=policy) as pool:
        sessions = [pool.session() for _ in PROMPTS]
        for session in sessions:  # from now on the shares stay as they are
            session.decode([1])
        shares = [session.stats().kv_bytes_budget for session in sessions]
        steps = Steps(pool)
        found = together(sessions, PROMPTS, 24)
        evicted = [session.evicted for session in sessions]
    assert (max(evicted) > 0) == (tokens == 256)
    assert max(map(len, steps.parts)) > 1  # they were read together
    assert any(1 in parts and max(parts) > 1 for parts in steps.parts)  # prompts among tokens
    for rows, prompt, share in zip(found, PROMPTS, shares, strict=True):
        with pool_of(model, n_sequences=1, kv_budget=f"{share}B", policy=policy) as single:
            session = single.session()
            session.decode([1])
            for row, other in zip(rows, written(session, prompt, 24), strict=True):
                np.testing.assert_array_equal(row, other)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_pool_gives_the_logits_of_a_session(model: Path, n_threads: int) -> None:
    """Of weights whose products are ours for one token as for many: to the bit."""
    options: dict[str, Any] = {"n_ctx": N_CTX, "n_ubatch": PIECE, "kv_type": "q8_0"}
    with Session(model, n_threads=n_threads, kv_budget=64, **options) as session:
        expected = written(session, PROMPTS[4], 20)
    with pool_of(model, n_sequences=3, kv_budget=64, n_threads=n_threads) as pool:
        found = written(pool.session(), PROMPTS[4], 20)
    for row, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(row, other)


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
    """Windows, recurrent layers, ALiBi, latent attention, shared keys: beside others as alone."""
    models = {each.name: each for many in ARCHITECTURES.values() for each in many}
    path = tmp_path / f"{name}.gguf"
    write_known(path, models[name])
    prompts = [prompt[:60] for prompt in PROMPTS[:3]]
    with pool_of(path, n_sequences=3, kv_type="f16", kv_budget=600) as pool:
        found = together([pool.session() for _ in prompts], prompts, 12)
    for rows, prompt in zip(found, prompts, strict=True):
        with Session(path, n_ctx=N_CTX, n_ubatch=PIECE, n_threads=2, kv_type="f16") as session:
            tokens = [int(row.argmax()) for row in rows[:-1]]
            expected = [session.decode(prompt)[-1], *(session.decode([t])[-1] for t in tokens)]
        assert relative_error(np.array(rows), np.array(expected)) < models[name].rounding


def test_positions_beyond_the_trained_context_are_each_their_own(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    write_llama(path, weight_type="Q8_0", head_dim=32, n_ctx_train=64)
    prompts = [PROMPTS[4][:150], PROMPTS[2][:20], PROMPTS[0]]
    with pool_of(path, n_sequences=3, kv_budget=150, n_ubatch=16) as pool:
        sessions = [pool.session() for _ in prompts]
        for session in sessions:
            session.decode([1])
        shares = [session.stats().kv_bytes_budget for session in sessions]
        found = together(sessions, prompts, 30)
        assert sessions[0].stats().rebases > sessions[1].stats().rebases == 0
    for rows, prompt, share in zip(found, prompts, shares, strict=True):
        with pool_of(path, n_sequences=1, kv_budget=f"{share}B", n_ubatch=16) as single:
            session = single.session()
            session.decode([1])
            for row, other in zip(rows, written(session, prompt, 30), strict=True):
                np.testing.assert_array_equal(row, other)


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
        assert all(session.evicted == 0 for session in sessions)
    for rows, prompt in zip(found, prompts, strict=True):
        with pool_of(model, n_sequences=1, **{**options, "kv_budget": f"{share}B"}) as single:
            session = single.session()
            session.decode([1])
            for row, other in zip(rows, written(session, prompt, 20), strict=True):
                np.testing.assert_array_equal(row, other)


# --- bytes ----------------------------------------------------------------------------------------


def test_who_comes_costs_the_others_entries_and_who_goes_gives_them_room(model: Path) -> None:
    with pool_of(model, n_sequences=4, kv_budget=256, policy="uniform") as pool:
        first = pool.session()
        first.decode(PROMPTS[4])
        assert first.evicted == 0
        whole = first.stats().kv_bytes_budget
        assert whole == pool.stats().kv_bytes_budget
        others = [pool.session(), pool.session(weight=2.0)]
        for other in others:
            other.decode([1, 2])
        assert first.evicted > 0
        assert first.standing().given_up == first.evicted
        assert pool.sessions() == [first, *others]
        assert [other.standing().given_up for other in others] == [0, 0]
        assert first.reusable_from == len(PROMPTS[4])
        shares = [session.stats().kv_bytes_budget for session in (first, *others)]
        assert sum(shares) <= whole
        assert shares[0] == shares[1] == pytest.approx(shares[2] / 2, rel=0.1)
        assert pool.stats().kv_bytes_now <= pool.stats().kv_bytes_budget
        kept = first.stats().entries_kept
        for other in others:
            other.close()
        assert pool.sessions() == [first]
        assert first.stats().kv_bytes_budget == whole
        first.decode(PROMPTS[0])
        assert first.stats().entries_kept == kept + first.stats().entries_full // len(
            first.tokens
        ) * len(PROMPTS[0])


def test_a_pool_is_resized_for_all(model: Path) -> None:
    with pool_of(model, n_sequences=3, kv_budget=900) as pool:
        sessions = [pool.session() for _ in range(3)]
        together(sessions, PROMPTS[2:5], 4)
        before = pool.stats()
        for session in sessions:
            session._host.rest(session._seat)
        pool.resize(200)
        now = pool.stats()
        assert now.kv_bytes_now <= now.kv_bytes_budget < before.kv_bytes_budget / 4
        with pytest.raises(BudgetError, match="entries per KV head"):
            pool.resize(3)
        assert pool.stats().kv_bytes_budget == now.kv_bytes_budget
        pool.resize("1MiB")
        assert pool.stats().kv_bytes_budget > before.kv_bytes_budget
        together(sessions, [[5], [6], [7]], 4)


def changed(session: PoolSession, kind: int, chance: random.Random) -> PoolSession:
    """Go back, park, fork, keep a checkpoint or return to one; returns who goes on."""
    if kind == 4 and session.position:
        position = chance.randrange(session.position)
        if session.can_return_to(position):
            session.truncate(position)
    elif kind == 5:
        session.park()
    elif kind == 6:
        with_copy = session.fork()
        assert with_copy.tokens == session.tokens
        session.close()
        return with_copy
    elif kind == 7:
        session.keep_checkpoint()
    elif kind == 8:
        text = [*session.tokens[: chance.randrange(1, N_CTX)], 5]
        if session.return_to_checkpoint(text, repeatable=chance.random() < 0.5):
            assert session.tokens == text[: session.position]
    else:
        session.rest()
    return session


def test_random_schedules_never_exceed_the_bytes(model: Path) -> None:
    """Conversations that come, write, go back, are parked, forked and closed, in four threads."""
    with pool_of(model, n_sequences=4, kv_budget=300, checkpoints="400KiB") as pool:
        steps = Steps(pool)

        def live(seed: int) -> int:
            chance = random.Random(seed)
            session, n = pool.session(), 0
            for _ in range(25):
                kind = chance.randrange(10)
                if session.position > N_CTX - 100:
                    session.reset()
                if kind < 4:
                    tokens = [chance.randrange(3, 300) for _ in range(chance.randrange(1, 80))]
                    n += len(session.decode(tokens, all_logits=True))
                else:
                    session = changed(session, kind, chance)
            session.close()
            return n

        read = in_threads([lambda s=seed: live(s) for seed in range(4)])
        assert all(read)
        assert sum(map(sum, steps.parts)) == sum(read)
        assert 0 < pool.stats().checkpoint_bytes <= 400 * 1024
        pool.host.checkpoints.clear()
        assert pool.stats().kv_bytes_now == 0  # no page has an owner that is not there
        assert pool.stats().sessions == pool.stats().parked == pool.stats().parked_bytes == 0


# --- parking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_more_conversations_than_fit_are_parked_and_nothing_is_read_again(
    model: Path, where: str, tmp_path: Path
) -> None:
    park = "ram" if where == "ram" else f"disk:{tmp_path}"
    with pool_of(model, n_sequences=1, kv_budget=N_CTX, park=park) as pool:
        sessions = [pool.session() for _ in range(4)]
        steps = Steps(pool)
        logits = [written(s, p, 3)[-1] for s, p in zip(sessions, PROMPTS, strict=False)]
        assert [session.is_live for session in sessions] == [False, False, False, True]
        assert pool.stats().parked == 3
        standings = [session.standing() for session in sessions]
        assert [each.state for each in standings] == ["parked"] * 3 + ["idle"]
        assert pool.stats().parked_bytes == sum(each.parked_bytes for each in standings) > 0
        n_heads = pool.host.n_kv_heads
        entries = [n_heads * session.position for session in sessions]
        assert [each.parked_entries for each in standings] == [*entries[:3], 0]
        again = [
            written(s, [int(row.argmax())], 5) for s, row in zip(sessions, logits, strict=True)
        ]
        n_read = sum(map(sum, steps.parts))
        assert n_read == sum(map(len, PROMPTS[:4])) + 4 * (3 + 6)
        assert list(tmp_path.iterdir()) == []
    for prompt, rows in zip(PROMPTS, again, strict=False):
        with pool_of(model, n_sequences=1, kv_budget=N_CTX) as single:
            for row, other in zip(rows, written(single.session(), prompt, 9)[4:], strict=True):
                np.testing.assert_array_equal(row, other)


def test_parked_windows_go_back_no_further_than_they_can(tmp_path: Path) -> None:
    """What has left a window is not parked: the text must be read again, and a session says so."""
    models = {each.name: each for many in ARCHITECTURES.values() for each in many}
    path = tmp_path / "windows.gguf"
    write_known(path, models["gemma3"])
    with pool_of(path, n_sequences=1, kv_type="f16", kv_budget=N_CTX) as pool:
        first, second = pool.session(), pool.session()
        written(first, PROMPTS[4], 2)
        second.decode([1])
        assert not first.is_live
        other = first.fork()
        for session in (first, other):
            assert session.can_return_to(session.position)
            assert not session.can_return_to(session.position - 1)
            assert session.can_return_to(0)
        second.close()
        first.decode([5])
        with pytest.raises(ContextError, match="sliding window"):
            first.truncate(100)


def test_where_nothing_more_can_be_parked_the_newcomer_is_refused(model: Path) -> None:
    with pool_of(model, n_sequences=1, kv_budget=N_CTX, park_limit="1KiB") as pool:
        first, second = pool.session(), pool.session()
        rows = written(first, PROMPTS[0], 2)
        with pytest.raises(PoolError, match="park_limit"):
            second.decode([1])
        assert (
            first.position == len(first.tokens) == len(PROMPTS[0]) + 2
        )  # and nobody lost anything
        written(first, [int(rows[-1].argmax())], 1)
        first.close()
        second.decode([1])


def test_a_newcomer_waits_for_those_who_write(model: Path) -> None:
    with pool_of(model, n_sequences=1, kv_budget=N_CTX) as pool:
        first, second = pool.session(), pool.session()
        ended: dict[str, float] = {}

        def write() -> None:
            list(first.generate(PROMPTS[0], max_tokens=60, temperature=0))
            ended["first"] = time.monotonic()

        def come() -> None:
            while first.position < len(PROMPTS[0]):
                time.sleep(0.001)
            second.decode(PROMPTS[1])
            ended["second"] = time.monotonic()

        in_threads([write, come])
        assert ended["first"] < ended["second"]


def test_one_thread_can_hold_several_generations(model: Path) -> None:
    with pool_of(model, n_sequences=2, kv_budget=N_CTX) as pool:
        streams = [pool.session().generate(p, max_tokens=6, temperature=0) for p in PROMPTS[:2]]
        start = time.monotonic()
        pairs = list(zip(*streams, strict=True))
        assert len(pairs) == 6
        assert time.monotonic() - start < seat.IDLE_SECONDS


# --- forks ----------------------------------------------------------------------------------------


def test_a_fork_goes_on_from_what_was_read(model: Path) -> None:
    with pool_of(model, n_sequences=3, kv_budget=3 * N_CTX) as pool:
        steps = Steps(pool)
        first = pool.session()
        first.decode(PROMPTS[4])
        forks = [first.fork(), first.fork()]
        found = together([first, *forks], [[9], [9], [17]], 10)
        assert sum(map(sum, steps.parts)) == len(PROMPTS[4]) + 3 * 11
    for rows, token in zip(found, (9, 9, 17), strict=True):
        with pool_of(model, n_sequences=1, kv_budget=N_CTX) as single:
            session = single.session()
            session.decode(PROMPTS[4])
            for row, other in zip(rows, written(session, [token], 10), strict=True):
                np.testing.assert_array_equal(row, other)


@pytest.mark.parametrize("policy", ["uniform", "adaptive", "streaming", "layer"])
@pytest.mark.parametrize("tokens", [N_CTX, 96])
def test_a_fork_is_the_same_conversation_to_the_bit(model: Path, tokens: int, policy: str) -> None:
    """Also where both evict, and what they share has to leave the pool meanwhile."""
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
            assert session.evicted > 0 or tokens == N_CTX
            session.close()
            for row, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(row, other)
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
        # Each has its own last page of every KV head, and at most one more, and nothing else.
        n_heads = 3 * 2
        shared = pool.host.shared
        assert shared is not None
        page = shared.core.budget_bytes // shared._pages
        assert pool.stats().kv_bytes_now <= alone + 4 * 2 * n_heads * page < 2 * alone
        first.close()
        rows = [fork.decode([5]) for fork in forks]  # what they share is still theirs
        for fork in forks:
            fork.close()
        assert len(rows) == 3
        assert pool.stats().kv_bytes_now == 0


def test_idle_conversations_stay_in_the_pool_while_there_is_room(
    model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"park": f"disk:{tmp_path}", "policy": "uniform", "checkpoints": 0}
    with pool_of(model, n_sequences=1, kv_budget=N_CTX, **options) as pool:
        first, second = pool.session(), pool.session()
        row = written(first, PROMPTS[4], 1)[-1]
        page_bytes = pool.stats().kv_bytes_now
        written(second, PROMPTS[3], 1)
        assert not first.is_live
        assert pool.stats().kv_bytes_now > page_bytes  # both are in it
        outside = pool.stats().parked_bytes
        assert outside < page_bytes / 8
        second.reset()
        written(second, [3] * 400, 1)  # needs the pages of the other one
        assert pool.stats().parked_bytes > 2 * outside
        found = written(first, [int(row.argmax())], 5)
    with pool_of(model, n_sequences=1, kv_budget=N_CTX, policy="uniform") as single:
        expected = written(single.session(), PROMPTS[4], 7)[2:]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["gemma3", "jamba", "lfm2", "deepseek2"])
def test_every_kind_of_layer_is_forked(name: str, tmp_path: Path) -> None:
    """Windows, recurrent layers, latent attention: the fork has all of their states."""
    models = {each.name: each for many in ARCHITECTURES.values() for each in many}
    path = tmp_path / f"{name}.gguf"
    write_known(path, models[name])
    with pool_of(path, n_sequences=2, kv_type="f16", kv_budget=2 * N_CTX) as pool:
        first = pool.session()
        first.decode(PROMPTS[2])
        fork = first.fork()
        expected = written(first, [9], 8)
        first.close()
        for row, other in zip(written(fork, [9], 8), expected, strict=True):
            np.testing.assert_array_equal(row, other)


# --- errors ---------------------------------------------------------------------------------------


def test_a_call_off_reaches_who_waits(model: Path) -> None:
    with pool_of(model, n_sequences=2, kv_budget=N_CTX, policy="uniform") as pool:
        first, second = pool.session(), pool.session()
        first.decode([1, 2, 3])
        result: list[BaseException] = []

        def decode() -> None:
            try:
                second.decode([1])
            except EntropyKVError as error:
                result.append(error)

        with pool.host.scheduler.between_steps():  # as if a step went on
            thread = threading.Thread(target=decode)
            thread.start()
            while pool.host.scheduler.n_waiting == 0:
                time.sleep(0.001)
            second.interrupt()
            thread.join(10)
        assert isinstance(result[0], PoolError)
        second.decode([1])  # nothing was half-done


def test_what_goes_wrong_for_one_does_not_concern_the_others(model: Path) -> None:
    with pool_of(model, n_sequences=2, kv_budget=N_CTX) as pool:
        good, bad = pool.session(), pool.session()
        good.decode(PROMPTS[0])
        with pytest.raises(ContextError):
            bad.decode([10**6])
        with pytest.raises(ContextError):
            bad.decode([5] * (N_CTX + 1))
        bad.decode([5])
        good.decode([6])


def test_impossible_pools_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="n_sequences"):
        pool_of(model, n_sequences=0)
    with pytest.raises(SettingsError, match="at most 256"):
        pool_of(model, n_sequences=257)
    with pytest.raises(SettingsError, match="park cannot be"):
        pool_of(model, park="cupboard")
    with pytest.raises(SettingsError, match="is no directory"):
        pool_of(model, park=f"disk:{tmp_path / 'nowhere'}")
    with pytest.raises(SettingsError, match="limit of parked"):
        pool_of(model, park_limit="none")
    with pytest.raises(UnsupportedModelError, match="flat store holds one"):
        pool_of(model, store="flat")
    with pool_of(model) as pool, pytest.raises(SettingsError, match="weight"):
        pool.session(weight=0.0)


def test_closed_sessions_and_pools_say_so(model: Path) -> None:
    pool = pool_of(model)
    session = pool.session()
    session.decode([1])
    pool.close()
    for call in (lambda: session.decode([1]), pool.stats, pool.session):
        with pytest.raises(EntropyKVError, match="closed"):
            call()
    session.close()
