"""What those who watch the cache are shown: the same as the session itself holds."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from entropykv import Session
from entropykv.server.errors import RequestError
from entropykv.server.kv_pictures import Window
from entropykv.server.looks import Looks
from entropykv.store.headwise import HeadwiseStore
from tests.support.running_server import KEY, Server

PROMPT = "The old garden lay beside the road. " * 60
LONG = {"prompt": PROMPT, "max_tokens": 9000, "min_tokens": 9000, "temperature": 0}


def shares(positions: Any, first: int, per_column: int, n_columns: int) -> Any:
    """Return the shares of columns, in 255ths, rounded up."""
    counts = [
        sum(first + i * per_column <= p < first + (i + 1) * per_column for p in positions)
        for i in range(n_columns)
    ]
    return np.ceil(255 * np.array(counts) / per_column).astype(np.uint8)


def frozen_of(session: Session) -> list[set[int]]:
    store = session._store
    assert isinstance(store, HeadwiseStore)
    return [
        set(store.core.frozen_positions(layer, head).tolist())
        for layer, heads in enumerate(session.budgets())
        for head in range(len(heads))
    ]


def held_by(session: Session) -> list[set[int]]:
    return [
        set(session.entries(layer, head).tolist())
        for layer, heads in enumerate(session.budgets())
        for head in range(len(heads))
    ]


@pytest.mark.parametrize(
    ("first", "per_column", "n_columns"), [(0, 8, 40), (37, 1, 30), (64, 3, 5)]
)
def test_a_map_shows_what_is_held_frozen_and_back(
    tiny_llama: Path, first: int, per_column: int, n_columns: int
) -> None:
    random = np.random.default_rng(3)
    came_back = 0
    with Session(tiny_llama, n_ctx=512, kv_budget=48, freeze="ram", n_threads=1) as session:
        look, was_frozen = session.cache_map(), [set[int]()] * 6
        for _ in range(12):
            session.decode(random.integers(0, session.n_vocab, 24).tolist())
            held, frozen, restored = look(first, per_column, n_columns)
            for row, positions in enumerate(held_by(session)):
                back = positions & was_frozen[row]
                came_back += len(back)
                for plane, expected in (
                    (held, positions),
                    (frozen, frozen_of(session)[row]),
                    (restored, back),
                ):
                    columns = shares(expected, first, per_column, n_columns)
                    np.testing.assert_array_equal(plane[row], columns)
            was_frozen = frozen_of(session)
    assert came_back > 0, "nothing came back: the test shows nothing"


def test_of_a_flat_store_there_is_one_row(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=512, kv_budget=40, store="flat", n_threads=1) as session:
        session.decode(list(range(200)))
        held, frozen, restored = session.cache_map()(0, 4, 50)
        expected = shares(session.entries(0, 0).tolist(), 0, 4, 50)
    np.testing.assert_array_equal(held, expected[np.newaxis])
    assert not frozen.any()
    assert not restored.any()


@pytest.mark.parametrize(
    ("window", "position", "expected"),
    [
        (Window(0, None, 512), 0, (0, 1, 1)),
        (Window(0, None, 512), 512, (0, 1, 512)),
        (Window(0, None, 512), 513, (0, 2, 257)),
        (Window(0, None, 512), 131072, (0, 256, 512)),
        (Window(100, 200, 512), 131072, (100, 1, 100)),
        (Window(100, 5000, 64), 131072, (100, 128, 39)),
        (Window(500, 600, 64), 300, (300, 1, 1)),
    ],
)
def test_columns_are_of_a_power_of_two(
    window: Window, position: int, expected: tuple[int, int, int]
) -> None:
    assert window.fit(position) == expected


# --- between two steps ----------------------------------------------------------------------------


def test_looks_are_answered_between_steps_or_at_once() -> None:
    threads: list[int] = []

    def look(llama: Any) -> str:
        threads.append(threading.get_ident())
        return str(llama)

    async def use() -> None:
        with ThreadPoolExecutor(1) as pool:
            looks = Looks("the model", pool.submit)  # type: ignore[arg-type]
            assert await looks.look(look) == "the model"
            go_on = threading.Event()

            def generation() -> None:
                while not go_on.wait(0.001):
                    looks.answer()

            running = pool.submit(generation)
            assert await looks.look(look) == "the model"
            with pytest.raises(ZeroDivisionError):
                await looks.look(lambda _: 1 / 0)
            go_on.set()
            running.result()
        assert len(set(threads)) == 1
        looks.close()
        with pytest.raises(RequestError, match="shutting down"):
            await looks.look(look)

    asyncio.run(use())


# --- the routes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("--freeze", "ram", ENTROPYKV_API_KEY=KEY)
    yield running
    code, errors = running.end()
    assert code == 0
    assert "Traceback" not in errors, errors


def events(server: Server, query: str = "", most: int = 1, seconds: float = 20) -> list[Any]:
    """Return the first events of a stream, as names and data."""
    found: list[Any] = []
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{server.url}/v1/kv/stream?{query}"
    with httpx.stream("GET", url, headers=headers, timeout=seconds) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                found.append([line[7:], time.monotonic()])
            elif line.startswith("data: "):
                found[-1].append(json.loads(line[6:]))
                if len(found) == most:
                    break
    return found


@contextmanager
def writing(server: Server) -> Iterator[None]:
    """Have the server write an answer meanwhile."""
    headers = {"authorization": f"Bearer {KEY}"}
    body = LONG | {"stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()  # once it is gone, the answer is closed
        next(lines)
        yield
    server.idle_figures(20)


def planes_of(picture: Any) -> Any:
    shown = picture["map"]
    data = zlib.decompress(base64.b64decode(shown["planes"]))
    shape = (3, shown["rows"], shown["columns"])
    return np.frombuffer(data, np.uint8).reshape(shape)


def test_a_stream_begins_with_the_model_and_one_picture(server: Server) -> None:
    body = {"prompt": "The old garden", "max_tokens": 9, "temperature": 0}
    server.post("/v1/completions", json.dumps(body))
    (name, _, about), (second, _, picture) = events(server, "columns=64", most=2)
    assert (name, second) == ("model", "kv")
    assert about["layers"] == [4, 4, 4]
    assert about["model"] == "bitnet-facts.gguf"
    (conversation,) = picture["conversations"]
    figures = server.kv()
    assert conversation["id"] == "0"
    assert conversation["entries"] == figures["entries_kept"] == conversation["position"] * 12
    assert picture["pool"]["budget"] == figures["kv_bytes_budget"]
    held, frozen, restored = planes_of(picture)
    assert (held == 255).all()
    assert not frozen.any()
    assert not restored.any()


def test_pictures_come_during_a_generation_at_most_four_a_second(server: Server) -> None:
    with writing(server):
        found = events(server, most=9)
    pictures = [(at, data) for name, at, data in found if name == "kv"]
    times = [at for at, _ in pictures]
    assert times[-1] - times[0] >= 0.9 * 0.25 * (len(times) - 1)
    positions = [data["conversations"][0]["position"] for _, data in pictures]
    assert positions == sorted(set(positions))
    assert pictures[-1][1]["requests"] == 1
    assert pictures[-1][1]["conversations"][0]["frozen_entries"] > 0


def test_nothing_is_sent_twice(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        events(server, most=3, seconds=1.5)


def test_text_tells_who_holds_it(server: Server) -> None:
    server.post("/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 9}))
    (_, (_, _, picture)) = events(server, "first=100&last=164&columns=64", most=2)
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
        for _ in range(16):
            request = client.build_request("GET", url)
            response = client.send(request, stream=True)
            lines = response.iter_raw()
            next(lines)
            open_ones.append((response, lines))
        refused = client.get(url)
        assert refused.status_code == 503
        assert "watch already" in refused.json()["error"]["message"]
        for response, _ in open_ones:
            response.close()
    deadline = time.monotonic() + 10
    while True:
        try:
            events(server, most=1)
            break
        except AssertionError:
            assert time.monotonic() < deadline, "viewers that have gone are still counted"
            time.sleep(0.1)


def test_a_viewer_does_not_keep_the_server_from_stopping() -> None:
    server = Server()
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(lambda: events(server, most=100))
        time.sleep(2)
        start = time.monotonic()
        code, errors = server.end()
        assert time.monotonic() - start < 9, "the server waited for the viewer"
        watching.exception()
    assert code == 0
    assert "Traceback" not in errors, errors


# --- of a pool ------------------------------------------------------------------------------------

POOL = ("--parallel", 2, "--kv-budget", "512KiB", "--n_ctx", 32768, "-t", 1)


@pytest.fixture(scope="module")
def pooled() -> Iterator[Server]:
    running = Server(usual=POOL, ENTROPYKV_API_KEY=KEY)
    yield running
    code, errors = running.end()
    assert code == 0
    assert "Traceback" not in errors, errors


def say(server: Server, name: str, text: str, **options: Any) -> None:
    body = {"prompt": text, "max_tokens": 9, "temperature": 0, "user": name, **options}
    assert server.post("/v1/completions", json.dumps(body)).status_code == 200


def of_name(picture: Any, name: str) -> Any:
    (found,) = [each for each in picture["conversations"] if each["name"] == name]
    return found


def test_a_pool_is_shown_with_all_that_are_in_it(pooled: Server) -> None:
    assert events(pooled, most=1)[0][2]["shared"]
    for name, text in (
        ("anna", PROMPT),
        ("ben", "A quiet market. " * 9),
        ("cleo", "In May " * 9),
    ):
        say(pooled, name, text)
    (_, (_, _, picture)) = events(pooled, "columns=64", most=2)
    states = {each["name"]: each["state"] for each in picture["conversations"]}
    assert states == {"anna": "parked", "ben": "parked", "cleo": "idle"}
    anna, cleo = of_name(picture, "anna"), of_name(picture, "cleo")
    assert picture["map"]["id"] == cleo["id"], "the latest is not the one that is shown"
    there = sum(each["bytes"] for each in picture["conversations"])
    assert cleo["bytes"] < there <= picture["pool"]["used"], "checkpoints have the rest, if any"
    assert anna["bytes"] == 0 < of_name(picture, "ben")["bytes"], "only who filled the pool left it"
    assert cleo["budget"] <= picture["pool"]["budget"]
    assert anna["budget"] == 0
    assert (anna["parked"], cleo["parked"]) == (True, False)
    assert anna["entries"] > 0
    parked = [each["parked_bytes"] for each in picture["conversations"]]
    assert sum(parked) == picture["pool"]["parked_bytes"]
    chosen = events(pooled, f"conversation={anna['id']}", most=2)[1][2]
    assert chosen["map"] is None, "what is parked holds nothing in the pool"
    text = pooled.get(f"/v1/kv/text?conversation={anna['id']}&count=4096").json()
    assert text["parked"]
    assert "".join(text["texts"]).removeprefix("<s>").strip().startswith("The old garden")


def test_what_a_newcomer_costs_is_counted(pooled: Server) -> None:
    body = {"prompt": PROMPT, "user": "dora", "stream": True, "max_tokens": 30000, "temperature": 0}
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{pooled.url}/v1/completions"
    with httpx.stream(
        "POST", url, json=body | {"min_tokens": 30000}, headers=headers, timeout=60
    ) as answer:
        lines = answer.iter_lines()  # once it is gone, the answer is closed
        next(lines)
        alone = of_name(events(pooled, most=2)[1][2], "dora")
        assert (alone["state"], alone["given_up"]) == ("active", 0)
        say(pooled, "emil", "A quiet market. " * 90)
        beside = of_name(events(pooled, most=2)[1][2], "dora")
    assert beside["given_up"] > 0
    assert beside["budget"] <= alone["budget"] // 2
    assert beside["bytes"] <= beside["budget"]


def test_several_look_while_several_write(pooled: Server) -> None:
    with ThreadPoolExecutor(6) as threads:
        written = [
            threads.submit(say, pooled, f"user {i}", PROMPT[i:], max_tokens=400) for i in range(4)
        ]
        seen = [threads.submit(events, pooled, most=4) for _ in range(2)]
        for each in (*written, *seen):
            each.result()


# --- the page -------------------------------------------------------------------------------------


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
    server = Server("--web", "false")
    assert "in a browser" not in server.log[0]
    assert httpx.get(server.url).status_code == 404
    assert server.end()[0] == 0
