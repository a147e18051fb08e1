"""A running server streams pictures of the cache, and serves the page that shows them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from entropykv.server import ModelOptions, ServerOptions, create_app
from tests.support.kv_events import LONG, PROMPT, events, planes_of
from tests.support.running_server import KEY, MODEL, Server
from tests.support.served import served
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


def test_a_stream_ends_as_early_as_its_app_says() -> None:
    """Replicas end a stream before the client's limit, because Ray Serve waits until all requests
    have ended.
    """

    async def talk() -> tuple[float, str]:
        model = ModelOptions(model=str(MODEL), n_threads=1)
        app = create_app(model, ServerOptions(), viewer_seconds=1)
        transport = httpx.ASGITransport(app)
        start = time.monotonic()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.get("/v1/kv/stream?seconds=60")
        app.state.engine.close()
        return time.monotonic() - start, answer.text

    seconds, text = asyncio.run(talk())
    assert text.startswith("event: model\n")
    assert 0.9 < seconds < 40  # The client asked for 60 seconds.


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
