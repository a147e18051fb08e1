"""Drafts change neither the text nor the entries of sessions, EntropyLlama and the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from entropykv import EntropyLlama, Pool, Session
from entropykv.session.drafting import Drafting
from tests.support.draft_oracles import Oracle, draft_with, held
from tests.support.running_server import Server

N_CTX = 400
PROMPT = [1, *(3 + 7 * i % 50 for i in range(60))]


def options(**given: Any) -> dict[str, Any]:
    common = {"n_ctx": N_CTX, "kv_budget": 48, "spec_type": "ngram", "n_threads": 1}
    return {**common, "policy": "uniform", **given}


@pytest.mark.parametrize(
    "given",
    [
        {"policy": "adaptive:mass+values"},
        {"policy": "uniform:mass+values", "kv_type": "f16", "n_threads": 3},
        {"policy": "uniform", "draft_max": 40},
        {"policy": "recency"},
        {"policy": "uniform:attention", "kv_budget": 0.5},
        {"policy": "auto", "kv_budget": 1.0},
        {"policy": "adaptive", "kv_budget": "40KiB", "n_ubatch": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7, "repeat_penalty": 1.2}])
def test_a_text_is_the_same_with_drafts_and_without(
    pool_llama: Path, given: dict[str, Any], sampling: dict[str, Any]
) -> None:
    with Session(pool_llama, **options(**given)) as session:
        session.reader.drafting = None
        answer = list(session.generate(PROMPT, 250, **sampling))
        expected, logits = held(session), session.logits
    for seed in range(3):
        with Session(pool_llama, **options(**given)) as session:
            drafting = draft_with(session, Oracle([*PROMPT, *answer], seed))
            assert list(session.generate(PROMPT, 250, **sampling)) == answer
            assert held(session) == expected
            np.testing.assert_array_equal(session.logits, logits)
            assert 0 < drafting.counts.accepted < drafting.counts.drafted
            assert session.stats().kv_bytes_peak <= session.stats().kv_bytes_budget


def test_sessions_of_a_pool_draft_side_by_side(pool_llama: Path) -> None:
    """Sessions of a pool that write by turns with drafts write what each writes without drafts."""
    texts = [[1, *(3 + (5 + k) * i % 50 for i in range(40 + k))] for k in range(3)]
    with Pool(pool_llama, **options(n_sequences=3, kv_budget=1.0)) as pool:
        answers = []
        for text in texts:
            with pool.session() as session:
                session.reader.drafting = None
                answers.append(list(session.generate(text, 100)))
        sessions = [pool.session() for _ in texts]
        for k, session in enumerate(sessions):
            draft_with(session, Oracle([*texts[k], *answers[k]], k))
        streams = [s.generate(text, 100) for s, text in zip(sessions, texts, strict=True)]
        found: list[list[int]] = [[] for _ in texts]
        for _ in range(101):
            for k, stream in enumerate(streams):
                found[k] += [token for token in [next(stream, None)] if token is not None]
        assert found == answers
        assert pool.stats().kv_bytes_peak <= pool.stats().kv_bytes_budget
        accepted = [
            s.reader.drafting.counts.accepted for s in sessions if s.reader.drafting is not None
        ]
        assert min(accepted) > 0


def test_a_stream_that_is_closed_early_has_read_nothing_ahead(pool_llama: Path) -> None:
    with Session(pool_llama, **options(kv_budget=1.0)) as session:
        session.reader.drafting = None
        answer = list(session.generate(PROMPT, 50))
    for n in range(1, 30):
        with Session(pool_llama, **options(kv_budget=1.0)) as session:
            draft_with(session, Oracle([*PROMPT, *answer], n))
            stream = session.generate(PROMPT, 50)
            got = [next(stream) for _ in range(n)]
            stream.close()
            assert got == answer[:n]
            assert session.tokens == [*PROMPT, *answer[: n - 1]]


TEXT = [1, *(3 + 7 * i % 50 for i in range(60))]
PLAIN: dict[str, Any] = {
    "n_ctx": 400,
    "kv_budget": 48,
    "policy": "uniform",
    "n_threads": 1,
    "verbose": False,
    "draft_max": 15,
}


def answer(llm: EntropyLlama, n: int, **options: Any) -> list[int]:
    found = []
    for token in llm.generate(TEXT, temp=options.pop("temp", 0.0), **options):
        found.append(token)
        if len(found) == n:
            break
    return found


def drafting(llm: EntropyLlama, text: list[int], seed: int) -> Drafting:
    return draft_with(llm._session, Oracle(text, seed))


@pytest.mark.parametrize("n_sequences", [None, 2])
@pytest.mark.parametrize("options", [{}, {"temp": 0.8, "repeat_penalty": 1.2}], ids=str)
def test_tokens_are_the_same(
    pool_llama: Path, n_sequences: int | None, options: dict[str, Any]
) -> None:
    given = {**PLAIN, "spec_type": "ngram", "n_sequences": n_sequences, "seed": 3}
    if n_sequences:
        given["kv_budget"] = 1.0
    llm = EntropyLlama(str(pool_llama), **given)
    llm._session.reader.drafting = None
    expected = answer(llm, 200, **options)
    for seed in range(3):
        llm = EntropyLlama(str(pool_llama), **given)
        drafts = drafting(llm, [*TEXT, *expected], seed)
        assert answer(llm, 200, **options) == expected
        assert 0 < drafts.counts.accepted < drafts.counts.drafted
        stats = llm.kv_stats()
        assert (stats.drafted_tokens, stats.accepted_drafts) == (
            drafts.counts.drafted,
            drafts.counts.accepted,
        )
        llm.close()


def test_an_answer_that_was_left_early_is_followed_by_others(pool_llama: Path) -> None:
    """If an answer is left early, tokens that were read ahead do not become part of the text."""
    given = {**PLAIN, "spec_type": "ngram", "kv_budget": 1.0}
    llm = EntropyLlama(str(pool_llama), **given)
    llm._session.reader.drafting = None
    expected = answer(llm, 60)
    drafting(llm, [*TEXT, *expected], 5)
    for n in (3, 11, 2, 30, 60):
        assert answer(llm, n) == expected[:n]
        assert llm.input_ids[: llm.n_tokens].tolist() == [*TEXT, *expected][: llm.n_tokens]
    llm.close()


def test_an_answer_never_gets_longer_than_asked(pool_llama: Path) -> None:
    llm = EntropyLlama(str(pool_llama), **{**PLAIN, "spec_type": "ngram", "kv_budget": 1.0})
    for n in (1, 2, 5):
        llm.reset()
        found = llm.create_completion(TEXT, max_tokens=n, temperature=0.0)
        assert found["usage"]["completion_tokens"] <= n
        assert llm._session.position <= len(TEXT) + n
    llm.close()


@pytest.fixture(scope="module")
def server(pool_llama: Path) -> Iterator[Server]:
    usual = ("--kv-budget", 0.5, "--n_ctx", 400, "-t", 1, "-np", 2, "--policy", "uniform")
    with Server("--spec-type", "ngram", "--draft-max", 7, model=pool_llama, usual=usual) as running:
        yield running


def test_the_server_drafts_and_says_so(server: Server) -> None:
    body = {"prompt": "one two three one two three one two", "max_tokens": 40, "temperature": 0}
    first, again = (
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json() for _ in "12"
    )
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "entropykv_drafted_tokens_total" in metrics
    assert "entropykv_accepted_drafts_total" in metrics
