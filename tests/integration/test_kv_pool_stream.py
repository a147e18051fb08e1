"""The stream of a pool shows all conversations, and how many entries a new one takes from the
others.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.kv_events import PROMPT, events
from tests.support.running_server import KEY, Server
from tests.support.served import served

POOL = ("--parallel", 2, "--kv-budget", "512KiB", "--n_ctx", 32768, "-t", 1)


@pytest.fixture(scope="module")
def pooled() -> Iterator[Server]:
    yield from served("--show-text", usual=POOL, ENTROPYKV_API_KEY=KEY)


def say(server: Server, name: str, text: str, **options: Any) -> None:
    body = {"prompt": text, "max_tokens": 9, "temperature": 0, "user": name, **options}
    assert server.post("/v1/completions", json.dumps(body)).status_code == 200


def of_name(picture: Any, name: str) -> Any:
    (found,) = [each for each in picture["conversations"] if each["name"] == name]
    return found


def test_a_pool_is_shown_with_all_that_are_in_it(pooled: Server) -> None:
    assert events(pooled, most=1)[0][1]["shared"]
    for name, text in (("anna", PROMPT), ("ben", "A quiet market. " * 9), ("cleo", "In May " * 9)):
        say(pooled, name, text)
    (_, (_, picture)) = events(pooled, "columns=64", most=2)
    states = {each["name"]: each["state"] for each in picture["conversations"]}
    assert states == {"anna": "swapped_out", "ben": "idle", "cleo": "idle"}
    anna, cleo = of_name(picture, "anna"), of_name(picture, "cleo")
    assert picture["map"]["id"] == cleo["id"], "the latest is not the one that is shown"
    there = sum(each["bytes"] for each in picture["conversations"])
    assert cleo["bytes"] < there <= picture["pool"]["used"], "checkpoints have the rest, if any"
    assert anna["bytes"] == 0 < of_name(picture, "ben")["bytes"], "only who filled the pool left it"
    assert cleo["budget"] <= picture["pool"]["budget"]
    assert anna["budget"] == 0
    assert (anna["swapped_out"], cleo["swapped_out"]) == (True, False)
    assert anna["entries"] > 0
    swapped = [each["swapped_bytes"] for each in picture["conversations"]]
    assert sum(swapped) == picture["pool"]["swapped_bytes"]
    chosen = events(pooled, f"conversation={anna['id']}", most=2)[1][1]
    assert chosen["map"] is None, "what is swapped out holds nothing in the pool"
    text = pooled.get(f"/v1/kv/text?conversation={anna['id']}&count=4096").json()
    assert text["swapped_out"]
    assert "".join(text["texts"]).removeprefix("<s>").strip().startswith("The old garden")


@contextlib.contextmanager
def written_on(server: Server, name: str, text: str) -> Iterator[None]:
    """Let a conversation write without an end in the `with` block; its first token is there."""
    body = {"prompt": text, "user": name, "stream": True, "temperature": 0}
    body |= {"max_tokens": 30000, "min_tokens": 30000}
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()  # The answer is closed when this iterator is deleted.
        next(lines)
        yield


def test_what_a_newcomer_costs_is_counted(pooled: Server) -> None:
    with written_on(pooled, "dora", PROMPT):
        alone = of_name(events(pooled, most=2)[1][1], "dora")
        assert (alone["state"], alone["given_up"]) == ("active", 0)
        with written_on(pooled, "emil", "A quiet market. " * 90):
            beside = of_name(events(pooled, most=2)[1][1], "dora")
    assert beside["given_up"] > 0
    assert beside["budget"] <= alone["budget"] // 2
    assert beside["bytes"] <= beside["budget"]


def test_several_look_while_several_write(pooled: Server) -> None:
    enough = threading.Event()

    def write(number: int) -> None:
        turns = 0
        while not enough.is_set():
            say(pooled, f"user {number} {turns}", PROMPT[number:], max_tokens=400)
            turns += 1

    with ThreadPoolExecutor(6) as threads:
        writing = [threads.submit(write, number) for number in range(4)]
        seen = [threads.submit(events, pooled, most=4) for _ in range(2)]
        try:
            assert [len(each.result()) for each in seen] == [4, 4]
        finally:
            enough.set()
        for each in writing:
            each.result()


def test_documents_and_texts_of_other_keys_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\nanother-key\n", encoding="utf-8")
    options = ("--documents", tmp_path / "documents", "--api-key-file", tmp_path / "keys")
    with Server(*options, usual=("-c", 16384, "-t", 1, "--kv-budget", 4096)) as server:
        body = {"name": "book", "text": "A quiet market. " * 30}
        assert server.post("/v1/documents", json.dumps(body)).status_code == 202
        say(server, "anna", "Who is there?", document="book")
        (_, (_, picture)) = events(server, most=2)
        kinds = {each["name"]: each["document"] for each in picture["conversations"]}
        assert kinds == {"book": True, "anna": False}
        assert not picture["pool"]["others"]
        of_another = {"authorization": "Bearer another-key"}
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 2},
            headers=of_another,
            timeout=60,
        )
        assert answer.status_code == 200
        (_, (_, picture)) = events(server, most=2)
        assert len(picture["conversations"]) == 2
        assert picture["pool"]["others"]
