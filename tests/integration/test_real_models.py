"""Gemma 3, which has sliding windows, and Qwen2.5, which has large biases, keep their quality.

`make models` fetches the models. The limits leave room above what was measured when they were set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.inputs import REAL_MODELS, read_texts
from entropykv import EntropyLlama, Pool, Session
from entropykv.evaluation.passkeys import Fact, make_cases
from entropykv.evaluation.stock import StockSession
from entropykv.llamacpp.distributions import mean_divergence
from entropykv.settings.cores import usable_cores
from tests.support.logits import Logits

pytestmark = pytest.mark.models

Record = Callable[[str, object], None]
GEMMA, QWEN, LARGE_QWEN = REAL_MODELS
N_COMPARED = 48
"""The number of rows of logits that are compared; one of Gemma's takes a megabyte."""
THREADS = {"n_threads": usable_cores()}


def path_of(name: str) -> Path:
    model = REAL_MODELS[name]
    if not model.is_there:
        pytest.skip(f"{name} is not at {model.path}: make models")
    return model.path


def text_of(name: str, n_tokens: int, number: int = 0) -> list[int]:
    """Return the first tokens of a held-out text."""
    text = list(read_texts("heldout_prose_*.txt").values())[number]
    with Session(path_of(name), n_ctx=64, **THREADS) as session:
        return session.tokenize(text)[:n_tokens]


def last_rows(session: Session | StockSession, tokens: list[int]) -> Logits:
    """Read a text, and return the logits of its last tokens."""
    session.decode(tokens[:-N_COMPARED])
    return session.decode(tokens[-N_COMPARED:], all_logits=True)


def stocks_rows(name: str, tokens: list[int], *, flash: bool = True) -> Logits:
    stock = StockSession(str(path_of(name)), n_ctx=len(tokens) + 1, flash=flash, **THREADS)
    try:
        return last_rows(stock, tokens)
    finally:
        stock.close()


def our_rows(name: str, tokens: list[int], **options: Any) -> Logits:
    with Session(path_of(name), **{"n_ctx": len(tokens) + 1, **THREADS, **options}) as session:
        return last_rows(session, tokens)


@pytest.mark.parametrize(("name", "n_tokens"), [(GEMMA, 700), (QWEN, 300), (LARGE_QWEN, 160)])
def test_an_ample_budget_gives_stocks_logits(
    name: str, n_tokens: int, record_property: Record
) -> None:
    """With an ample budget, the KL to stock without flash attention is at most twice that of
    stock's flash attention, or 0.004.

    Gemma's prompt is longer than its windows of 512. Measured: 0.0078, 0.0024 and 0.0041, while
    stock's flash attention has 0.0072, 0.0020 and 0.0033.
    """
    tokens = text_of(name, n_tokens)
    plain = stocks_rows(name, tokens, flash=False)
    flash_to_plain = mean_divergence(plain, stocks_rows(name, tokens))
    ours_to_plain = mean_divergence(plain, our_rows(name, tokens, kv_type="f16"))
    record_property(
        "figures", f"stock's flash attention {flash_to_plain:.5f}, ours {ours_to_plain:.5f}"
    )
    assert ours_to_plain < max(0.004, 2 * flash_to_plain)


@pytest.mark.parametrize("name", [QWEN, LARGE_QWEN])
def test_keys_with_large_biases_are_rounded_to_eight_bits(
    name: str, record_property: Record
) -> None:
    """q8_0 stays near stock, though a few channels of Qwen's keys are far larger than others."""
    n_tokens, bar = (300, 0.005) if name == QWEN else (160, 0.0047)
    tokens = text_of(name, n_tokens)
    divergence = mean_divergence(stocks_rows(name, tokens), our_rows(name, tokens, kv_type="q8_0"))
    record_property("figures", f"{divergence:.5f}")
    # Measured: 0.0026 and 0.0035; with the biases in the keys, 0.0130 and 0.0053.
    assert divergence < bar


@pytest.mark.parametrize(("name", "bar"), [(GEMMA, 0.08), (QWEN, 0.3)])
def test_a_fifth_of_the_entries_keeps_the_distribution(
    name: str, bar: float, record_property: Record
) -> None:
    """With a fifth of 1,024 entries, the last tokens keep most of their distribution.

    Measured: a KL of 0.060 and 0.246, and 0.17 and 0.39 with `recency`.
    """
    tokens = text_of(name, 1024, number=1)
    expected = stocks_rows(name, tokens)
    n_kept = len(tokens) // 5
    divergence = {
        policy: mean_divergence(expected, our_rows(name, tokens, kv_budget=n_kept, policy=policy))
        for policy in ("auto", "recency")
    }
    record_property("figures", str(divergence))
    assert divergence["auto"] < bar
    assert divergence["auto"] < divergence["recency"]


@pytest.mark.parametrize("name", [GEMMA, QWEN])
def test_a_fifth_of_the_entries_keeps_most_facts(name: str, record_property: Record) -> None:
    """With a fifth of the entries, most of eight facts are told; measured: Gemma 8, Qwen 7."""
    known = kept = 0
    path = path_of(name)
    with (
        Session(path, n_ctx=1100, **THREADS) as full,
        Session(path, n_ctx=1100, kv_budget=200, **THREADS) as small,
    ):
        cases = make_cases(
            list(read_texts("heldout_prose_*.txt").values()),
            lambda text: len(full.tokenize(text, add_bos=False)),
            n_cases=2,
            n_tokens=1000,
            facts_per_text=4,
            seed=1,
        )
        for case in cases:
            told = told_by(full, case.text, case.facts)
            known += sum(told)
            of_small = told_by(small, case.text, case.facts)
            kept += sum(a and b for a, b in zip(told, of_small, strict=True))
    record_property("figures", f"{kept} of {known} facts")
    assert known >= 5
    assert kept >= 0.75 * known


def told_by(session: Session, text: str, facts: tuple[Fact, ...]) -> list[bool]:
    """Return for each fact of a text whether the session tells it."""
    session.reset()
    session.decode(session.tokenize(text))
    state, told = session.files.save_state(), []
    for fact in facts:
        session.files.load_state(state)
        prompt = session.tokenize(fact.prompt, add_bos=False)
        answer = list(session.generate(prompt, 12))
        told.append(fact.is_answered_by(session.detokenize(answer)))
    return told


def test_windows_go_back_as_long_as_nothing_has_left_them() -> None:
    """A rollback is possible until a token has left Gemma's windows of 512, also after loading."""
    tokens = text_of(GEMMA, 700)
    with Session(path_of(GEMMA), n_ctx=1024, kv_type="f16", **THREADS) as session:
        session.decode(tokens[:460])
        expected = session.decode(tokens[460:500], all_logits=True)
        session.files.load_state(session.files.save_state())
        session.text.truncate(460)
        again = session.decode(tokens[460:500], all_logits=True)
        assert mean_divergence(expected, again) < 1e-6
        session.decode(tokens[500:])
        session.files.load_state(session.files.save_state())
        assert session.text.held().can_return_to(700)
        assert not session.text.held().can_return_to(100)


def test_a_checkpoint_beyond_the_windows_is_reused() -> None:
    tokens = text_of(GEMMA, 760)
    options = {"n_sequences": 2, "n_ctx": 1024, "kv_budget": 2000, "kv_type": "f16", **THREADS}
    with Pool(path_of(GEMMA), **options) as pool:
        first = pool.session()
        first.decode(tokens[:700])
        first.text.checkpoint_at_turn(writes=True)
        second = pool.session_for(tokens)
        assert second.position == 700
        rows = second.decode(tokens[700:], all_logits=True)
    expected = our_rows(GEMMA, tokens, kv_type="f16")
    assert mean_divergence(expected, rows[-N_COMPARED:]) < 1e-2


@pytest.mark.parametrize("name", [GEMMA, QWEN])
def test_a_text_is_the_same_with_drafts(name: str) -> None:
    """Drafts do not change the text; files in Q4_K_M also have Q6_K, where llama.cpp may compute
    single tokens.
    """
    prompt = "One, two, three, four. One, two, three, four. One, two, three, four. One, two,"
    texts, n_accepted = [], 0
    for spec_type in ("none", "ngram"):
        options = {"n_ctx": 256, "kv_budget": 0.5, "spec_type": spec_type, **THREADS}
        with Session(path_of(name), **options) as session:
            texts.append(list(session.generate(session.tokenize(prompt), 60)))
            if session.reader.drafting is not None:
                n_accepted = session.reader.drafting.counts.accepted
    assert texts[0] == texts[1]
    assert n_accepted > 0


@pytest.fixture
def assistant() -> Iterator[EntropyLlama]:
    llm = EntropyLlama(
        model_path=str(path_of(QWEN)), n_ctx=512, kv_budget=0.5, verbose=False, **THREADS
    )
    yield llm
    llm.close()


def test_the_template_of_a_model_is_used(assistant: EntropyLlama) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    answer: Any = assistant.create_chat_completion(messages, max_tokens=24, temperature=0.0)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_base_model_has_no_template() -> None:
    with Session(path_of(GEMMA), n_ctx=64, **THREADS) as session:
        assert session.model.chat_prompt("Hello.") is None
        session.decode(session.tokenize("The capital of France is"))
        assert np.isfinite(session.logits).all()
