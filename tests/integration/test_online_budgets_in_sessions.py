"""Budgets that follow the text stay inside the pool in sessions, are repeatable, and continue in
loaded sessions.
"""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv.model.shipped import DEMOS
from entropykv.store.headwise import HeadwiseStore
from tests.support.command import entropykv
from tests.support.logits import tokens_for
from tests.support.online_sessions import BY_LAYER, are_equal, check, each_policy
from tests.support.saved_sessions import (
    all_entries,
    assert_goes_on_from,
    assert_load_refused,
    future,
    sections_start,
    session_of,
    signed,
    with_contents,
)


@pytest.mark.parametrize("n_ubatch", [1, 2, 16, 31])
@pytest.mark.parametrize("policy", BY_LAYER)
def test_small_micro_batches_say_what_large_ones_do(
    uneven_llama: Path, policy: str, n_ubatch: int
) -> None:
    """Small micro-batches give nearly the budgets of large ones, because the entropies of all rows
    of attention count.
    """
    budgets = []
    for size in (n_ubatch, 64):
        with session_of(uneven_llama, policy=policy, n_ubatch=size) as session:
            session.decode(tokens_for(192))
            check(session)
            assert not are_equal(session)
            budgets.append(np.array(session.cache.budgets()).ravel())
    # They may differ by two pages, because small micro-batches also evict sooner.
    assert np.abs(np.subtract(*budgets)).max() <= 32


@pytest.mark.parametrize("n_ubatch", [1, 2, 16, 31])
@each_policy
def test_small_micro_batches_keep_step_after_a_load(
    uneven_llama: Path, policy: str, n_ubatch: int
) -> None:
    with session_of(uneven_llama, policy=policy, n_ubatch=n_ubatch) as session:
        for n_tokens in (150, 77):
            session.decode(tokens_for(n_tokens))
            check(session)
            data = session.files.save_state()
            session.decode(tokens_for(109, seed=4))
            expected = session.cache.budgets()
            session.files.load_state(data)
            session.decode(tokens_for(109, seed=4))
            assert session.cache.budgets() == expected
            session.files.load_state(data)


@pytest.mark.parametrize("n_ubatch", [16, 24])
def test_small_micro_batches_measure_losses(uneven_llama: Path, n_ubatch: int) -> None:
    """Small micro-batches give unequal budgets, too, though losses are measured only if several
    entries compete.
    """
    with session_of(uneven_llama, policy="adaptive", n_ubatch=n_ubatch) as session:
        session.decode(tokens_for(300))
        check(session)
        assert not are_equal(session)


@pytest.mark.parametrize("policy", BY_LAYER)
@pytest.mark.parametrize("recent_window", [3, 60])
def test_a_recent_window_that_is_given_is_that_of_every_layer(
    uneven_llama: Path, policy: str, recent_window: int
) -> None:
    """Every layer keeps a given recent window; without one, layers keep windows of their own."""
    runs = []
    for window in (recent_window, None):
        with session_of(uneven_llama, policy=policy, recent_window=window) as session:
            for n_tokens in (64, 64, 64, 64, 5):
                session.decode(tokens_for(n_tokens, seed=n_tokens))
            check(session)
            kept = [session.cache.entries(layer, 0).tolist() for layer in range(3)]
            least = min(budgets[0] for budgets in session.cache.budgets())
        if window is not None:
            protected = {*range(4), *range(261 - window, 261)}
            assert all(protected <= set(positions) for positions in kept)
            assert least >= window + 4
        runs.append([next(n for n in range(262) if 260 - n not in set(k)) for k in kept])
    assert runs[0] != runs[1]


@each_policy
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_nothing_ever_exceeds_the_pool(uneven_llama: Path, policy: str, kv_type: str) -> None:
    with session_of(uneven_llama, policy=policy, kv_type=kv_type) as session:
        assert are_equal(session)
        for n_tokens in (300, 1, 1, 40, 64):
            session.decode(tokens_for(n_tokens, seed=n_tokens))
            check(session)
            stats = session.stats()
            assert stats.kv_bytes_peak <= stats.kv_bytes_budget
        assert not are_equal(session)
        assert stats.evictions > 0
        assert sum(map(sum, session.cache.budgets())) <= 96 * 6
        for budget in (48, 200, 0.5):
            session.cache.resize(budget)
            check(session)
            session.decode(tokens_for(30))
            check(session)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("n_tokens", [150, 300, 430])
def test_a_prompt_fills_the_bytes(uneven_llama: Path, kv_type: str, n_tokens: int) -> None:
    """A prompt fills the budget: no KV head drops entries while another cannot fill its share."""
    with session_of(uneven_llama, policy="adaptive", kv_type=kv_type) as session:
        session.decode(tokens_for(n_tokens))
        assert session.stats().entries_kept > 0.97 * 96 * 6


@pytest.mark.parametrize("n_prompt", [150, 190, 210])
def test_an_answer_goes_on_equally_from_everywhere(uneven_llama: Path, n_prompt: int) -> None:
    """A session that loads a saved state continues equally, because the state says whether budgets
    change next.
    """
    opened = partial(session_of, uneven_llama, policy="adaptive")
    assert_goes_on_from(opened, n_prompt, 80, (0, 1, 5, 31, 32, 33, 64), 40)


@each_policy
def test_after_a_reset_a_session_is_a_fresh_one(uneven_llama: Path, policy: str) -> None:
    results = []
    for used in (False, True):
        with session_of(uneven_llama, policy=policy) as session:
            if used:
                session.decode(tokens_for(250, seed=5))
                assert not are_equal(session)
                session.decode([7] * 9)
                session.reset()
            assert are_equal(session)
            rows = session.decode(tokens_for(200), all_logits=True)
            results.append((rows.tobytes(), future(session)))
    assert results[0] == results[1]


@each_policy
def test_every_number_of_threads_gives_the_same_numbers(uneven_llama: Path, policy: str) -> None:
    results = []
    for n_threads in (1, 2, 3):
        with session_of(uneven_llama, policy=policy, n_threads=n_threads) as session:
            rows = session.decode(tokens_for(200), all_logits=True)
            assert isinstance(session._slot.store, HeadwiseStore)
            losses = session._slot.store.core.losses()
            assert losses.any() == (policy == "adaptive")
            results.append(
                (rows.tobytes(), losses.tobytes(), session.cache.budgets(), all_entries(session))
            )
    assert results[0] == results[1] == results[2]


@each_policy
@pytest.mark.parametrize("model", ["tiny", "shipped"])
def test_policies_by_name(uneven_llama: Path, policy: str, model: str, tmp_path: Path) -> None:
    path = uneven_llama if model == "tiny" else DEMOS["bitnet"].path
    stats = tmp_path / "stats.json"
    options = ("-m", path, "-c", 256, "--kv-budget", 0.3, "-ub", 64, "--temp", 0, "-t", 1)
    prompt = ("-p", "the and of to in " * 20, "-n", 8, "--no-chat", "--policy", policy)
    result = entropykv("run", *options, *prompt, "--stats-json", stats)
    assert result.returncode == 0, result.stderr
    written = json.loads(stats.read_text())
    assert written["policy"] == policy
    assert written["evictions"] > 0
    assert written["kv_bytes_peak"] <= written["kv_bytes_budget"]


@each_policy
def test_a_damaged_section_is_refused(uneven_llama: Path, policy: str) -> None:
    def last_section(size: int) -> Any:
        return lambda contents: contents["sections"].__setitem__(-1, size)

    with session_of(uneven_llama, policy=policy) as session:
        session.decode(tokens_for(200))
        data = session.files.save_state()
        size = json.loads(data[16 : sections_start(data) - 16])["contents"]["sections"][-1]
        start = len(data) - 16 - size
        session.decode(tokens_for(70, seed=2))
        seen = np.frombuffer(data[start:-16], "<f8")
        for place in (0, 1, len(seen) - 1):
            for value in (float("nan"), -0.5, float("inf")):
                changed = bytearray(data)
                changed[start + 8 * place : start + 8 * place + 8] = struct.pack("<d", value)
                assert_load_refused(session, signed(bytes(changed)), "that cannot be")
        for cut in (1, 8, size):
            body = data[: -16 - cut] + bytes(16)
            if cut == size and policy == "adaptive":
                continue  # A state without measurements is valid.
            words = "a cut number" if cut == 1 else "that cannot be"
            assert_load_refused(session, with_contents(body, last_section(size - cut)), words)
        body = data[:start] + bytes(16)
        without = with_contents(body, lambda contents: contents["sections"].pop())
        assert_load_refused(session, without, "other KV heads")
        check(session)
        session.files.load_state(data)


def test_knots_that_do_not_ascend_are_refused(uneven_llama: Path) -> None:
    with session_of(uneven_llama, policy="adaptive") as session:
        session.decode(tokens_for(200))
        data = session.files.save_state()
        size = json.loads(data[16 : sections_start(data) - 16])["contents"]["sections"][-1]
        start = len(data) - 16 - size
        changed = data[: start + 8] + data[start + 16 : start + 24] + data[start + 8 : start + 16]
        changed += data[start + 24 :]
        assert_load_refused(session, signed(changed), "losses that cannot be")


@pytest.mark.parametrize("policy", BY_LAYER)
def test_heads_of_a_layer_that_hold_different_numbers_are_refused(
    uneven_llama: Path, policy: str
) -> None:
    with session_of(uneven_llama, policy=policy) as session:
        session.decode(tokens_for(200))

        def change(contents: dict[str, Any]) -> None:
            contents["entries"][0][0] -= 1

        lie = with_contents(session.files.save_state(), change)
        assert_load_refused(session, lie, "KV heads of a layer that keep different positions")
