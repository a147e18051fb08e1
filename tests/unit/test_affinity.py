"""Requests go where their text was read, or where few wait; named conversations stay."""

from __future__ import annotations

import json
from typing import Any

import pytest

from entropykv.server.replicas.affinity import (
    MOST_KEYS,
    SHARED_CHARACTERS,
    Affinity,
    Holders,
    affinity_of,
)

SYSTEM = {"role": "system", "content": "You know the whole manual. " * 40}
IDLE = {"a": 0, "b": 0, "c": 0}


def keys(user: str = "", **request: Any) -> tuple[str, ...]:
    return affinity_of(None, user, json.dumps(request).encode()).keys


def turns(*texts: str, system: dict[str, str] = SYSTEM) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [system, *({"role": roles[n % 2], "content": text} for n, text in enumerate(texts))]


def test_later_turns_have_the_keys_of_the_first() -> None:
    first = keys(messages=turns("hello"))
    assert len(first) == 2
    assert keys(messages=turns("hello", "hi", "and now?")) == first
    assert keys(messages=turns("other"))[1] == first[1]
    assert keys(messages=turns("other"))[0] != first[0]


def test_a_short_system_prompt_brings_no_requests_together() -> None:
    short = {"role": "system", "content": "x" * (SHARED_CHARACTERS // 2)}
    assert len(keys(messages=turns("hello", system=short))) == 1


@pytest.mark.parametrize(
    "request_", [{"prompt": "hi"}, {"input": "hi"}, {"messages": turns("hi")}], ids=str
)
def test_a_document_is_a_key_in_every_form_of_request(request_: dict[str, Any]) -> None:
    of_book = keys(document="book", **request_)
    assert len(of_book) == 3
    assert not {*of_book} & {*keys(document="other", **request_)}
    assert not {*of_book} & {*keys("someone", document="book", **request_)}


@pytest.mark.parametrize("root", ["", "/behind/a/proxy"])
def test_one_replica_reads_a_document_and_says_how_far_it_is(root: str) -> None:
    path = f"{root}/v1/documents"
    body = json.dumps({"name": "book", "text": "A cat."}).encode()
    posted = affinity_of("a conversation", "me", body, path)
    assert posted.conversation is not None
    assert affinity_of(None, "me", b"", f"{path}/book") == posted
    assert affinity_of(None, "me", b"", f"{path}/other") != posted
    assert affinity_of(None, "you", b"", f"{path}/book") != posted
    assert affinity_of(None, "me", b"", path) == Affinity()
    assert affinity_of(None, "me", b"--form", path) == Affinity()
    holders = Holders(slack=2)
    chosen = holders.choose(posted, IDLE)
    question = Affinity(keys=keys("me", document="book", prompt="who?"))
    assert holders.choose(question, IDLE) == chosen


def test_a_file_in_a_message_is_a_document() -> None:
    def about(name: str, text: str) -> tuple[str, ...]:
        parts = [{"type": "file", "file": {"file_id": name}}, {"type": "text", "text": text}]
        return keys(messages=[{"role": "user", "content": parts}])

    assert about("book", "who?")[1] == about("book", "where?")[1]
    assert about("book", "who?")[1] != about("other", "who?")[1]
    assert about("book", "who?")[1:] == keys(document="book", prompt="who?")[1:]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"[" * 100_000, b'{"messages": 3}', b'{"messages": [1]}']
)
def test_what_is_no_request_has_no_keys(body: bytes) -> None:
    assert affinity_of(None, "", body) == Affinity()


def test_a_holder_is_chosen_until_too_many_wait_and_then_the_least_loaded_holds_it_too() -> None:
    holders = Holders(slack=2)
    text = Affinity(keys=("turn", "shared"))
    chosen = holders.choose(text, IDLE)
    assert holders.choose(text, IDLE | {chosen: 2}) == chosen
    others = IDLE | {chosen: 3}
    spilt = holders.choose(text, others)
    assert spilt != chosen
    assert holders.choose(text, IDLE | {chosen: 2, spilt: 1}) == spilt


def test_the_conversation_decides_before_what_many_share() -> None:
    holders = Holders(slack=2)
    first = holders.choose(Affinity(keys=("one", "shared")), IDLE)
    second = holders.choose(Affinity(keys=("two", "shared")), IDLE | {first: 3})
    assert second != first
    for load in (0, 1, 2):
        assert holders.choose(Affinity(keys=("two", "shared")), IDLE | {second: load}) == second


def test_a_replica_that_died_holds_nothing() -> None:
    holders = Holders(slack=2)
    text = Affinity(keys=("text",))
    dead = holders.choose(text, IDLE)
    alive = {replica: 0 for replica in IDLE if replica != dead}
    assert holders.choose(text, alive) in alive


def test_a_named_conversation_stays_under_any_load_and_in_every_process() -> None:
    named = Affinity(conversation="name")
    chosen = {Holders(slack=0).choose(named, IDLE | {replica: 99}) for replica in IDLE}
    assert len(chosen) == 1
    spread = {Holders(0).choose(Affinity(conversation=str(n)), IDLE) for n in range(50)}
    assert spread == set(IDLE)


def test_texts_of_nobody_are_spread_and_what_is_remembered_is_bounded() -> None:
    holders = Holders(slack=2)
    chosen = [holders.choose(Affinity(keys=(str(n),)), IDLE) for n in range(MOST_KEYS + 9)]
    assert min(chosen.count(replica) for replica in IDLE) > MOST_KEYS / 4
    assert len(holders._of) == MOST_KEYS
