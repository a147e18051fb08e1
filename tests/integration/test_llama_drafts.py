"""Drafts in EntropyLlama and in the server do not change answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from entropykv import EntropyLlama
from entropykv.session.drafting import Drafting
from tests.support.draft_oracles import Oracle, draft_with
from tests.support.running_server import Server

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
