"""Drafts change neither the text of a session nor its entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Pool, Session
from tests.support.draft_oracles import Oracle, draft_with, held

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
    """The drafts of several sessions are read in one step, beside single tokens and prompts of
    other sessions.
    """
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
