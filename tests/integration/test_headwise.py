"""The headwise store computes in real llama.cpp what stock computes, inside the budget."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from entropykv import (
    BudgetError,
    ContextError,
    EntropyKVError,
    EntropyProfile,
    ModelFileError,
    Session,
)
from tests.support.logits import relative_error, stock_logits, tokens_for


@pytest.mark.parametrize("steps", [[300], [1] * 40, [7, 1, 64, 1, 129], [5, 200, 1, 1]])
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_bitnet"])
def test_ample_budget_gives_the_logits_of_stock(
    model: str, steps: list[int], request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    tokens = tokens_for(sum(steps))
    expected = stock_logits(path, tokens)
    with Session(path, n_ctx=512, kv_type="f16", n_threads=2, n_ubatch=128) as session:
        rows = []
        done = 0
        for step in steps:
            rows.append(session.decode(tokens[done : done + step], all_logits=True))
            done += step
        assert session.position == done
    assert relative_error(np.concatenate(rows), expected) < 2e-3


def test_q8_0_is_close_to_f16(tiny_llama: Path) -> None:
    tokens = tokens_for(200)
    expected = stock_logits(tiny_llama, tokens)
    with Session(tiny_llama, n_ctx=256, kv_type="q8_0", n_threads=2) as session:
        error = relative_error(session.decode(tokens, all_logits=True), expected)
    assert 1e-5 < error < 3e-2


def test_every_number_of_threads_gives_the_same_numbers(tiny_llama: Path) -> None:
    tokens = tokens_for(260)
    results = []
    for n_threads in (1, 2, 3, 4):
        with Session(
            tiny_llama, n_ctx=400, kv_budget=96, kv_type="f16", n_threads=n_threads
        ) as session:
            prompt = session.decode(tokens[:200], all_logits=True)
            rest = [session.decode([token]) for token in tokens[200:]]
            results.append((np.concatenate([prompt, *rest]), session.cache.entries(1, 0).tolist()))
    for logits, entries in results[1:]:
        assert entries == results[0][1]
        np.testing.assert_array_equal(logits, results[0][0])


@pytest.mark.parametrize(
    "policy",
    [
        *("streaming", "recency", "uniform", "entropy", "entropy:attention+values"),
        *("uniform:products", "uniform:attention+values"),
    ],
)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_sinks_and_recent_window_survive(tiny_llama: Path, policy: str, kv_type: str) -> None:
    entropies = np.random.default_rng(1).uniform(0.1, 4.0, (3, 6))
    profile = EntropyProfile(3, 6, 2, 512, entropies)
    with Session(
        tiny_llama,
        n_ctx=512,
        kv_budget=0.25,
        policy=policy,
        kv_type=kv_type,
        n_ubatch=64,
        n_threads=2,
        entropy_config=profile,
    ) as session:
        for step in (300, 1, 1, 64, 30):
            session.decode(tokens_for(step))
            stats = session.stats()
            assert stats.kv_bytes_now <= stats.kv_bytes_peak <= stats.kv_bytes_budget
            for layer, budgets in enumerate(session.cache.budgets()):
                for head, budget in enumerate(budgets):
                    kept = session.cache.entries(layer, head).tolist()
                    assert kept == sorted(set(kept))
                    assert len(kept) <= budget
                    assert set(range(4)) <= set(kept)
                    recent = range(session.position - 64, session.position)
                    assert set(recent) <= set(kept)
        assert stats.evictions > 0
        assert stats.entries_kept <= 128 * 6
        different = len({budget for layer in session.cache.budgets() for budget in layer})
        assert different > 1 if policy.startswith("entropy") else different == 1


def test_entropy_gives_more_to_heads_with_more_entropy(tiny_llama: Path) -> None:
    entropies = np.full((3, 6), 0.2)
    entropies[1, 3:] = 4.0
    profile = EntropyProfile(3, 6, 2, 512, entropies)
    options = {"kv_budget": 0.25, "entropy_config": profile, "policy": "entropy"}
    with Session(tiny_llama, n_ctx=512, **options) as session:  # type: ignore[arg-type]
        budgets = np.array(session.cache.budgets())
    assert budgets[1, 1] > 1.5 * budgets[1, 0]
    assert budgets.sum() <= 128 * budgets.size
    assert budgets.min() >= 4 + 64


def test_uniform_keeps_what_gets_attention(tiny_llama: Path) -> None:
    """Choosing by attention mass is closer to the full cache than keeping the newest entries."""
    tokens = tokens_for(400)
    expected = stock_logits(tiny_llama, tokens)[350:]
    errors = {}
    for policy in ("streaming", "uniform"):
        with Session(
            tiny_llama, n_ctx=512, kv_budget=100, policy=policy, kv_type="f16", n_threads=2
        ) as session:
            session.decode(tokens[:350])
            session.cache.resize(200)
            errors[policy] = relative_error(session.decode(tokens[350:], all_logits=True), expected)
    assert errors["uniform"] < errors["streaming"]


def test_resize_shrinks_and_grows_at_once(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=512, policy="uniform", n_threads=2) as session:
        session.decode(tokens_for(300))
        before = session.stats()
        session.cache.resize(0.1)
        after = session.stats()
        assert after.kv_bytes_budget < 0.15 * before.kv_bytes_budget
        assert after.kv_bytes_now <= after.kv_bytes_budget
        assert all(len(session.cache.entries(layer, 0)) == 51 for layer in range(3))
        session.cache.resize(1.0)
        session.decode(tokens_for(100))
        assert len(session.cache.entries(0, 0)) == 151
        with pytest.raises(BudgetError, match="smallest budget"):
            session.cache.resize(3)
        session.decode([5])


def test_truncate_continues_as_if_the_rest_had_not_been_read(tiny_llama: Path) -> None:
    tokens = tokens_for(120)
    with Session(tiny_llama, n_ctx=256, kv_type="f16", n_threads=2) as session:
        session.decode(tokens)
        session.text.truncate(80)
        again = session.decode(tokens[80:], all_logits=True)
        session.reset()
        fresh = session.decode(tokens, all_logits=True)[80:]
    assert relative_error(again, fresh) < 1e-4


def test_context_errors(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=64) as session:
        with pytest.raises(ContextError, match="nothing to read"):
            session.decode([])
        with pytest.raises(ContextError, match="do not fit"):
            session.decode(tokens_for(65))
        with pytest.raises(ContextError, match="vocabulary"):
            session.decode([10**9])
        with pytest.raises(IndexError):
            session.cache.entries(99, 0)
        session.decode(tokens_for(64))
        assert len(list(session.cache.entries(0, 0))) == 64


def test_a_chat_template_that_cannot_be_used(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(tiny_llama, n_ctx=64) as session:
        assert session.model.chat_prompt("hello") is None
        with pytest.raises(ContextError, match="no chat template"):
            session.tokenize(session.model.chat_prompt("hello"))
    for template in (b"{% for %}", b"{{ raise_exception('no user turn') }}"):
        monkeypatch.setattr(llama_cpp, "llama_model_chat_template", lambda *_, t=template: t)
        with (
            Session(tiny_llama, n_ctx=64) as session,
            pytest.raises(ModelFileError, match="--no-chat"),
        ):
            session.model.chat_prompt("hello")


def test_a_closed_session_says_so(tiny_llama: Path) -> None:
    session = Session(tiny_llama, n_ctx=64)
    session.close()
    session.close()
    with pytest.raises(EntropyKVError, match="closed"):
        session.decode([5])
