"""A pool never exceeds its bytes, whoever joins, grows, leaves or fails."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import (
    BudgetError,
    ContextError,
    EntropyKVError,
    EntropyProfile,
    PoolError,
    Session,
    SettingsError,
    UnsupportedModelError,
)
from entropykv.cli import main
from entropykv.session.memory_plan import describe_budget
from tests.support.pools import N_CTX, PROMPTS, Steps, pool_of, together
from tests.support.threads import in_threads

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def model(pool_llama: Path) -> Path:
    return pool_llama


def test_who_comes_costs_the_others_entries_and_who_goes_gives_them_room(model: Path) -> None:
    with pool_of(model, n_sequences=4, kv_budget=256, policy="uniform") as pool:
        first = pool.session()
        first.decode(PROMPTS[4])
        assert first.cache.evicted == 0
        whole = first.stats().kv_bytes_budget
        assert whole == pool.stats().kv_bytes_budget
        others = [pool.session(), pool.session(weight=2.0)]
        for other in others:
            other.decode([1, 2])
        for other in others:
            other.decode(PROMPTS[4])
        assert first.cache.evicted > 0
        assert first.cache.pool_status().given_up == first.cache.evicted
        assert pool.sessions() == [first, *others]
        assert others[1].cache.pool_status().given_up == 0
        assert first.text.held().text.reusable_from == len(PROMPTS[4])
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


@pytest.mark.parametrize("policy", ["uniform", "adaptive"])
def test_who_needs_less_than_an_equal_part_leaves_it_to_the_others(
    model: Path, policy: str
) -> None:
    """Sessions with short texts leave bytes to a long one, until they need their part."""
    with pool_of(model, n_sequences=3, kv_budget=600, policy=policy, checkpoints=0) as pool:
        long, *short = [pool.session() for _ in range(3)]
        for session in short:
            session.decode([1, 2, 3])
        long.decode((PROMPTS[4] * 2)[:400])
        assert long.cache.evicted == 0
        held = long.stats().kv_bytes_budget
        assert held > pool.stats().kv_bytes_budget / 3
        for session in short:
            session.decode((PROMPTS[2] * 2)[:180])
        assert long.cache.evicted == long.cache.pool_status().given_up > 0
        assert long.stats().kv_bytes_budget < held
        if policy == "uniform":
            assert [session.cache.evicted for session in short] == [0, 0]
        budgets = [session.stats().kv_bytes_budget for session in (long, *short)]
        assert sum(budgets) <= pool.stats().kv_bytes_budget
        short[0].close()
        long.decode(PROMPTS[1])
        assert long.stats().kv_bytes_budget > budgets[0]


def test_texts_that_fit_into_equal_parts_are_held_whole(model: Path) -> None:
    uneven = EntropyProfile(3, 4, 2, 512, np.tile([0.1, 0.1, 4.0, 4.0], (3, 1)))
    options: dict[str, Any] = {"policy": "entropy", "entropy_config": uneven}
    with pool_of(model, n_sequences=3, kv_budget=600, **options) as pool:
        sessions = [pool.session() for _ in range(3)]
        for session, prompt in zip(sessions, PROMPTS[2:5], strict=True):
            session.decode((prompt * 2)[:180])
        for session in sessions:
            session.decode([1, 2, 3])
        assert [session.cache.evicted for session in sessions] == [0, 0, 0]
        sessions[0].decode((PROMPTS[4] * 2)[:200])
        assert sessions[0].cache.evicted > 0


def test_a_loaded_text_that_fits_is_held_whole(model: Path, tmp_path: Path) -> None:
    with pool_of(model, n_sequences=2, kv_budget=600) as pool:
        session = pool.session()
        session.decode((PROMPTS[4] * 2)[:250])
        entries = session.stats().entries_kept
        session.files.save(tmp_path / "saved")
    with pool_of(model, n_sequences=2, kv_budget=600) as pool:
        sessions = [pool.session() for _ in range(2)]
        sessions[0].decode([1])
        for session in sessions:
            session.files.load(tmp_path / "saved")
            assert (session.cache.evicted, session.stats().entries_kept) == (0, entries)


def test_a_pool_is_resized_for_all(model: Path) -> None:
    with pool_of(model, n_sequences=3, kv_budget=900) as pool:
        sessions = [pool.session() for _ in range(3)]
        together(sessions, PROMPTS[2:5], 4)
        before = pool.stats()
        for session in sessions:
            session.rest()
        pool.resize(200)
        now = pool.stats()
        assert now.kv_bytes_now <= now.kv_bytes_budget < before.kv_bytes_budget / 4
        with pytest.raises(BudgetError, match="entries per KV head"):
            pool.resize(3)
        assert pool.stats().kv_bytes_budget == now.kv_bytes_budget
        pool.resize("1MiB")
        assert pool.stats().kv_bytes_budget > before.kv_bytes_budget
        together(sessions, [[5], [6], [7]], 4)


def changed(session: Session, kind: int, chance: random.Random) -> Session:
    """Roll back, swap, fork, rest, keep a checkpoint or return to one; returns the session to
    continue with.
    """
    if kind == 4 and session.position:
        position = chance.randrange(session.position)
        if session.text.held().can_return_to(position):
            session.text.truncate(position)
    elif kind == 5:
        session.cache.swap_out()
    elif kind == 6:
        with_copy = session.fork()
        assert with_copy.tokens == session.tokens
        session.close()
        return with_copy
    elif kind == 7:
        session.text.keep_checkpoint()
    elif kind == 8:
        text = [*session.tokens[: chance.randrange(1, N_CTX)], 5]
        if session.text.return_to_checkpoint(text, repeatable=chance.random() < 0.5):
            assert session.tokens == text[: session.position]
    else:
        session.rest()
    return session


def test_random_schedules_never_exceed_the_bytes(model: Path) -> None:
    """Four threads that write, swap out, fork and close conversations never exceed the bytes."""
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
        pool.runner.kept_texts.drop_checkpoints()
        assert pool.stats().kv_bytes_now == 0  # No page has an owner any more.
        assert pool.stats().sessions == pool.stats().swapped_out == pool.stats().swapped_bytes == 0


def test_tokens_and_logits_of_all_sessions_are_counted(model: Path) -> None:
    with pool_of(model, n_sequences=2, kv_budget=N_CTX, policy="uniform") as pool:
        assert pool.stats().text_bytes < 1000
        sessions = [pool.session() for _ in range(3)]
        for session in sessions:
            session.decode(list(range(1, 60)))
            session.rest()
        n_vocab = sessions[0].model.n_vocab
        least = 3 * 4 * (59 + n_vocab)
        assert least <= pool.stats().text_bytes < 1.5 * least
        # The session keeps the logits of the prompt besides those of the last token.
        sessions[0].decode([3])
        assert pool.stats().text_bytes >= least + 4 * n_vocab
        for session in sessions:
            session.close()
        assert pool.stats().text_bytes == 0


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

        # Between steps, decode() waits as if a step were running.
        with pool.runner.scheduler.between_steps():
            thread = threading.Thread(target=decode)
            thread.start()
            while pool.runner.scheduler.n_waiting == 0:
                time.sleep(0.001)
            second.interrupt()
            thread.join(10)
        assert isinstance(result[0], PoolError)
        second.decode([1])  # The interrupted call has left nothing half done.


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
    with pytest.raises(SettingsError, match="swap cannot be"):
        pool_of(model, swap="cupboard")
    with pytest.raises(SettingsError, match="is not a directory"):
        pool_of(model, swap=f"disk:{tmp_path / 'nowhere'}")
    with pytest.raises(SettingsError, match="swap_limit"):
        pool_of(model, swap_limit="none")
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


def test_a_fraction_means_for_each_conversation_what_it_means_for_one_alone(model: Path) -> None:
    with Session(model, n_ctx=N_CTX, kv_type="q8_0", kv_budget=0.25, n_threads=1) as session:
        alone = session.stats().kv_bytes_budget
    with pool_of(model, n_sequences=4, kv_budget=0.25, policy="uniform") as pool:
        assert pool.stats().kv_bytes_budget == 4 * alone
        sessions = [pool.session() for _ in range(4)]
        together(sessions, [PROMPTS[4]] * 4, 3)
        assert {session.stats().kv_bytes_budget for session in sessions} == {alone}
        told = describe_budget(pool.runner.config, pool.stats().kv_bytes_budget)
        assert f"({4 * alone / 2**20:.1f} MiB for 4 conversations), policy uniform" in told
        pool.resize(0.5)
        assert pool.stats().kv_bytes_budget == pytest.approx(8 * alone, rel=0.1)
    with pool_of(model, n_sequences=4, kv_budget=20, policy="uniform") as pool:
        told = describe_budget(pool.runner.config, pool.stats().kv_bytes_budget)
        assert "fewer at a time" in told


def test_the_fraction_of_everything_evicts_nothing(model: Path) -> None:
    with pool_of(model, n_sequences=3, policy="uniform") as pool:
        sessions = [pool.session() for _ in range(3)]
        text = [3 + i % 290 for i in range(N_CTX - 8)]
        together(sessions, [text] * 3, 4)
        assert [session.cache.evicted for session in sessions] == [0, 0, 0]


@pytest.mark.parametrize("budget", ["0.25", "300", "200KiB"])
def test_plan_shows_what_a_pool_shares_and_what_each_gets(
    model: Path, budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "-m", str(model), "-c", str(N_CTX), "-np", "3", "--kv-budget", budget]
    command += ["--kv-type", "q8_0"]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    with pool_of(model, n_sequences=3, kv_budget=budget, policy="uniform", n_ubatch=None) as pool:
        stats = pool.stats()
        sessions = [pool.session() for _ in range(3)]
        # A session that writes an answer may leave bytes to others; these sessions write none.
        for session in sessions:
            session.decode(PROMPTS[4])
        assert plan["kv_bytes_budget"] == stats.kv_bytes_budget
        assert plan["n_ubatch"] == sessions[0].reader.chunk
        for session in sessions:
            assert plan["kv_bytes_each"] == pytest.approx(session.stats().kv_bytes_budget, rel=0.1)
    assert main(command) == 0
    assert "for each of 3 conversations" in capsys.readouterr().out
    command[command.index("--kv-budget") + 1] = "8"
    assert main(command) == 2
    assert "3 conversations at a time would get too little" in capsys.readouterr().err
