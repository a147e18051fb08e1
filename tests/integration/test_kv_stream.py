"""A running server streams pictures of the cache, also of all conversations of a pool, and serves
the page that shows them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from entropykv.server import ModelOptions, ServerOptions, create_app
from tests.support.kv_events import LONG, PROMPT, events, planes_of
from tests.support.running_server import KEY, MODEL, Server
from tests.support.served import client_of, served
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served("--freeze", "ram", "--show-text", ENTROPYKV_API_KEY=KEY)


@contextmanager
def writing(server: Server) -> Iterator[None]:
    """Let the server write an answer during the `with` block."""
    headers = {"authorization": f"Bearer {KEY}"}
    body = LONG | {"stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()  # The answer is closed when this iterator is deleted.
        next(lines)
        yield
    server.idle_figures(60)


def test_a_stream_begins_with_the_model_and_one_picture(server: Server) -> None:
    body = {"prompt": "The old garden", "max_tokens": 9, "temperature": 0}
    server.post("/v1/completions", json.dumps(body))
    (name, about), (second, picture) = events(server, "columns=64", most=2)
    assert (name, second) == ("model", "kv")
    assert about["layers"] == [4, 4, 4]
    assert about["model"] == "bitnet-facts.gguf"
    (conversation,) = picture["conversations"]
    figures = server.kv()
    assert conversation["id"].isdigit()
    assert conversation["entries"] == figures["entries_kept"] == conversation["position"] * 12
    assert picture["pool"]["budget"] == figures["kv_bytes_budget"]
    held, frozen, restored = planes_of(picture)
    assert (held == 255).all()
    assert not frozen.any()
    assert not restored.any()


def test_pictures_come_during_a_generation_at_most_four_a_second(server: Server) -> None:
    with writing(server):
        start = time.monotonic()
        found = events(server, most=9)
        seconds = time.monotonic() - start
    pictures = [data for name, data in found if name == "kv"]
    assert seconds >= 0.9 * 0.25 * (len(pictures) - 1)
    positions = [data["conversations"][0]["position"] for data in pictures]
    assert positions == sorted(set(positions))
    assert pictures[-1]["requests"] == 1
    assert pictures[-1]["conversations"][0]["frozen_entries"] > 0


def test_nothing_is_sent_twice(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        events(server, most=3, seconds=1.5)


def test_a_stream_ends_after_its_seconds(server: Server) -> None:
    start = time.monotonic()
    found = events(server, "seconds=1", most=100)
    assert time.monotonic() - start > 0.9
    assert [name for name, _ in found] == ["model", "kv"]


async def test_a_stream_ends_as_early_as_its_app_says() -> None:
    """Replicas end a stream before the client's limit, because Ray Serve waits until all requests
    have ended.
    """
    model = ModelOptions(model=str(MODEL), n_threads=1)
    app = create_app(model, ServerOptions(), viewer_seconds=1)
    start = time.monotonic()
    async with client_of(app) as client:
        answer = await client.get("/v1/kv/stream?seconds=60")
    app.state.engine.close()
    assert answer.text.startswith("event: model\n")
    assert 0.9 < time.monotonic() - start < 40  # The client asked for 60 seconds.


def test_the_description_says_that_it_is_a_stream_of_events(server: Server) -> None:
    described = server.get("/openapi.json").json()["paths"]["/v1/kv/stream"]["get"]
    assert list(described["responses"]["200"]["content"]) == ["text/event-stream"]


def test_text_tells_who_holds_it(server: Server) -> None:
    server.post("/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 9}))
    (_, (_, picture)) = events(server, "first=100&last=164&columns=64", most=2)
    assert (picture["map"]["first"], picture["map"]["per_column"]) == (100, 1)
    held, frozen, _ = planes_of(picture)
    answer = server.get("/v1/kv/text?first=100&count=64").json()
    assert answer["heads"] == 12
    assert answer["held"] == np.count_nonzero(held, axis=0).tolist()
    assert answer["frozen"] == np.count_nonzero(frozen, axis=0).tolist()
    whole = server.get("/v1/kv/text?first=0&count=4096").json()
    assert "".join(whole["texts"]).removeprefix("<s>").strip().startswith("The old garden")
    assert whole["texts"][100:164] == answer["texts"]
    beyond = server.get("/v1/kv/text?first=100000").json()
    assert beyond["texts"] == []


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v1/kv/text?conversation=7", 404, "no conversation '7'"),
        ("/v1/kv/text?count=5000", 400, "count"),
        ("/v1/kv/stream?columns=0", 400, "columns"),
        ("/v1/kv/stream?seconds=0", 400, "seconds"),
        ("/v1/kv/stream?seconds=3601", 400, "seconds"),
    ],
)
def test_refusals_name_what_is_wrong(server: Server, path: str, status: int, says: str) -> None:
    answer = server.get(path)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def test_a_viewer_needs_the_key_and_there_are_sixteen_at_most(server: Server) -> None:
    assert httpx.get(f"{server.url}/v1/kv/stream").status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(headers=headers, timeout=20, limits=httpx.Limits()) as client:
        url = f"{server.url}/v1/kv/stream"
        open_ones = []

        def sixteen_are_let_in() -> bool:  # Viewers of earlier tests may still be leaving.
            response = client.send(client.build_request("GET", url), stream=True)
            lines = response.iter_raw()
            next(lines)
            if response.status_code == 200:
                open_ones.append((response, lines))
            return len(open_ones) == 16

        wait_for(sixteen_are_let_in)
        refused = client.get(url)
        assert refused.status_code == 503
        assert "watch already" in refused.json()["error"]["message"]
        for response, _ in open_ones:
            response.close()
        # Viewers that have gone are no longer counted.
        wait_for(lambda: client.get(f"{url}?seconds=1").status_code == 200)


def test_a_viewer_does_not_keep_the_server_from_stopping() -> None:
    server = Server()
    with httpx.stream("GET", f"{server.url}/v1/kv/stream", timeout=60) as watching:
        next(watching.iter_raw())
        # The server would wait for the stream for longer than this call's timeout.
        code, errors = server.end()
    assert code == 0
    assert "Traceback" not in errors, errors


def test_the_page_needs_no_key_and_may_ask_no_other_machine(server: Server) -> None:
    answer = httpx.get(server.url)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert "http" not in policy
    for name, kind in (("app.js", "text/javascript"), ("app.css", "text/css")):
        file = httpx.get(f"{server.url}/web/{name}")
        assert file.headers["content-type"].startswith(kind)
        known = {"if-none-match": file.headers["etag"]}
        assert httpx.get(f"{server.url}/web/{name}", headers=known).status_code == 304
    assert "dompurify" in httpx.get(f"{server.url}/web/licenses.txt").text
    assert httpx.get(f"{server.url}/v1/web/defaults").status_code == 401
    assert httpx.get(f"{server.url}/web/../engine.py").status_code in (401, 404)


def test_there_need_be_no_page() -> None:
    with Server("--web", "false") as server:
        assert "in a browser" not in server.log[0]
        assert httpx.get(server.url).status_code == 404


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
    """Let a conversation write without an end in the `with` block, which begins after a token."""
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
