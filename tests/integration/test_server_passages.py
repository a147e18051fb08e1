"""A session reports how much the importance of its entries has risen, and an answer about a
document names the passages that it attended to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from entropykv import Session
from entropykv.session.passages import AttentionSince
from tests.support.pools import PROMPTS, pool_of
from tests.support.running_server import MODEL, Server

FACTS = (
    ("The harbour master of Velden is Anna Brandt.", "Who is the harbour master of Velden?"),
    ("Professor Lin keeps three white rabbits.", "What animals does Professor Lin keep?"),
    ("The train to Osterby leaves at 6:40.", "When does the train to Osterby leave?"),
)
PROSE = Path(__file__).parents[2] / "benchmarks" / "texts" / "heldout_prose_01.txt"


def text_with_facts() -> str:
    sentences = PROSE.read_text(encoding="utf-8")[:6000].replace("\n", " ").split(". ")
    for number, (fact, _) in enumerate(FACTS):
        sentences.insert(len(sentences) * (2 * number + 1) // 6, fact.removesuffix("."))
    return "Å café. " + ". ".join(sentences)


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120)


def read(server: Server, text: str) -> None:
    assert post(server, "/v1/documents", {"name": "book", "text": text}).status_code == 202
    # The question waits until the document is ready.
    assert ask(server, "Well?", passages=0, max_tokens=1).status_code == 200


def ask(server: Server, question: str, **fields: Any) -> httpx.Response:
    body = {"document": "book", "messages": [{"role": "user", "content": question}]}
    options = {"max_tokens": 12, "temperature": 0, "passages": 3}
    return post(server, "/v1/chat/completions", {**body, **options, **fields})


def events_of(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server with a small model, whose answers make no sense."""
    folder = tmp_path_factory.mktemp("documents")
    usual = ("-c", 4096, "-t", 1, "--kv-budget", 1024, "--policy", "adaptive")
    with Server("--documents", folder, usual=usual) as running:
        read(running, text_with_facts()[:2000])
        yield running


def test_the_passage_of_a_fact_is_among_the_first_for_its_question(
    smollm2: Path, tmp_path: Path
) -> None:
    usual = ("-c", 8192, "-t", 1, "--kv-budget", 1024)
    with Server("--documents", tmp_path, model=smollm2, usual=usual) as server:
        text = text_with_facts()
        read(server, text)
        for fact, question in FACTS:
            answer = ask(server, question)
            assert answer.status_code == 200, answer.text
            passages = answer.json()["choices"][0]["passages"]
            assert any(fact.removesuffix(".") in each["text"] for each in passages[:2]), passages
            for each in passages:
                assert text[each["start"] : each["end"]] == each["text"]
            shares = [each["share"] for each in passages]
            assert shares == sorted(shares, reverse=True)
            assert 0 < sum(shares) <= 1


def test_a_stream_has_the_passages_of_the_whole_answer_at_its_end(small: Server) -> None:
    question = "What is said about the sea and the ship in this text?"
    whole = ask(small, question, seed=1).json()["choices"][0]
    events = events_of(ask(small, question, seed=1, stream=True))
    with_reason = [each for each in events if each["choices"][0]["finish_reason"]]
    (last,) = with_reason
    assert last["choices"][0]["passages"] == whole["passages"]
    assert whole["passages"]
    assert not any("passages" in each["choices"][0] for each in events if each is not last)


def test_every_choice_has_passages_of_its_own(small: Server) -> None:
    choices = ask(small, "What?", n=2, temperature=1.5, seed=3).json()["choices"]
    assert all(len(each["passages"]) == 3 for each in choices)


@pytest.mark.parametrize("question", ["Who?", "What is said about the sea and the ship here?"])
def test_a_question_that_is_asked_again_has_the_same_passages(small: Server, question: str) -> None:
    """A repeated question has the same passages, though a checkpoint could answer it without
    reading, and passages come from reading.
    """
    first, second = (ask(small, question).json()["choices"][0] for _ in range(2))
    assert second == first
    follow_up = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": first["message"]["content"]},
        {"role": "user", "content": "Why?"},
    ]
    third, fourth = (
        ask(small, "", messages=follow_up).json()["choices"][0]["passages"] for _ in range(2)
    )
    assert third == fourth


def test_choices_with_equal_texts_have_equal_passages(small: Server) -> None:
    one, other = ask(small, "Where is it?", n=2).json()["choices"]
    assert one["message"] == other["message"]
    assert one["passages"] == other["passages"]


def test_a_completion_has_passages_too(small: Server) -> None:
    body = {"document": "book", "prompt": "Who?", "max_tokens": 4, "passages": 2}
    answer = post(small, "/v1/completions", body)
    assert len(answer.json()["choices"][0]["passages"]) == 2


def test_asking_for_passages_changes_no_answer(small: Server) -> None:
    with_, without = (ask(small, "Where?", passages=n).json()["choices"][0] for n in (4, 0))
    assert with_["message"] == without["message"]
    assert "passages" not in without


def test_passages_need_a_document_and_have_a_limit(small: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "passages": 2, "max_tokens": 1}
    answer = post(small, "/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "those of a document" in answer.json()["error"]["message"]
    too_many = ask(small, "Hi", passages=17)
    assert too_many.status_code == 400
    assert "passages" in too_many.json()["error"]["message"]


def test_a_policy_that_measures_no_attention_gives_no_passages(tmp_path: Path) -> None:
    usual = ("-c", 4096, "-t", 1, "--kv-budget", 1024, "--policy", "streaming")
    with Server("--documents", tmp_path, model=MODEL, usual=usual) as server:
        read(server, text_with_facts()[:2000])
        assert ask(server, "What?").json()["choices"][0]["passages"] is None


def entries_of(session: Session) -> int:
    return session.stats().entries_kept


def test_what_is_remembered_is_counted_and_given_back(pool_llama: Path) -> None:
    with pool_of(pool_llama, n_sequences=2, kv_budget=256, policy="adaptive") as pool:
        first, other = pool.session(), pool.session()
        first.decode(PROMPTS[4])
        other.decode(PROMPTS[1])
        alone, together = first.stats().kv_bytes_scratch, pool.stats().kv_bytes_scratch
        since = AttentionSince(first)
        assert first.stats().kv_bytes_scratch - alone == 8 * entries_of(first)
        assert pool.stats().kv_bytes_scratch - together == 8 * entries_of(first)
        since.close()
        assert first.stats().kv_bytes_scratch == alone
        assert pool.stats().kv_bytes_scratch == together
        assert since.by_position(10) is None


def test_importance_rises_where_later_queries_look_and_never_at_sinks(pool_llama: Path) -> None:
    text = PROMPTS[4]
    with Session(pool_llama, n_ctx=1024, kv_budget=64, policy="adaptive") as session:
        session.decode(text)
        since = AttentionSince(session)
        nothing = since.by_position(len(text))
        assert nothing is not None
        assert not nothing.any()
        session.decode(PROMPTS[1][:4])
        risen = since.by_position(len(text))
        assert risen is not None
        assert risen.shape == (len(text),)
        assert (risen >= 0).all()
        assert risen.any()
        assert not risen[: session.config.options.n_sinks].any()
        kept = np.unique(
            np.concatenate(
                [session.cache.entries(layer, head) for layer in range(3) for head in (0, 1)]
            )
        )
        assert set(np.flatnonzero(risen)) <= set(kept.tolist())


def test_a_policy_that_ranks_by_position_has_nothing_to_compare(pool_llama: Path) -> None:
    with Session(pool_llama, n_ctx=1024, kv_budget=64, policy="streaming") as session:
        session.decode(PROMPTS[4])
        before = session.stats().kv_bytes_scratch
        since = AttentionSince(session)
        assert session.cache.importance() is None
        assert since.by_position(4) is None
        assert session.stats().kv_bytes_scratch == before
