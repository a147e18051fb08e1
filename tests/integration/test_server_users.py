"""Users of one server see, and continue, only what was asked with their own key."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.middleware import Middleware

from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.server.engine.turns import Conversations, TurnMiddleware
from tests.support.running_server import KEY, MODEL, Server
from tests.support.served import client_of, served

ANNA, BEN = "anna-has-this-key", "ben-has-this-key"
SECRET = "The old garden has a secret door beside the wall of the house. " * 8
SESSION = "x-session-id"
POOL = ("--parallel", 2, "--kv-budget", 4000)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# two users\n{ANNA}\n\n{BEN}\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module", params=[POOL, ()], ids=["pool", "one"])
def server(request: pytest.FixtureRequest, keys: Path) -> Iterator[Server]:
    """Run a server with a pool, or one that holds one conversation at a time."""
    yield from served(*request.param, "--api-key-file", keys, "--show-text")


def asked(server: Server, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60)


def tokens_read(server: Server, key: str | None, prompt: str, **options: Any) -> int:
    """Complete a prompt; return the number of its tokens that were read."""
    with asked(server, key) as client:
        before = client.get("/v1/kv").json()["prompt_tokens"]
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **options}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return int(client.get("/v1/kv").json()["prompt_tokens"]) - before


def first_pictures(server: Server, key: str) -> tuple[Any, Any]:
    """Return the first two events of the page's stream: the model, and the state of the cache."""
    found: list[Any] = []
    with asked(server, key) as client, client.stream("GET", "/v1/kv/stream") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
            if len(found) == 2:
                break
    return found[0], found[1]


def test_nobody_sees_another_s_conversations(server: Server) -> None:
    name = "anna@example.org"
    read = tokens_read(server, ANNA, SECRET, user=name)
    assert read > 100
    with asked(server, ANNA) as anna, asked(server, BEN) as ben:
        model, own = first_pictures(server, ANNA)
        assert model["text"]
        (conversation,) = own["conversations"]
        path = f"/v1/kv/text?conversation={conversation['id']}"
        assert "secret door" in "".join(anna.get(path).json()["texts"])

        _, other = first_pictures(server, BEN)
        assert other["conversations"] == []
        assert other["map"] is None
        assert other["pool"]["used"] > 0
        for each in (path, "/v1/kv/text"):
            assert ben.get(each).status_code == 404
        figures = [ben.get(each).text for each in ("/v1/kv", "/metrics", "/slots")]
        for text in (*figures, json.dumps(other)):
            assert name not in text
            assert "secret" not in text
        for route in ("/v1/kv", "/v1/kv/text", "/v1/kv/stream", "/metrics", "/slots"):
            assert httpx.get(server.url + route).status_code == 401
    assert tokens_read(server, BEN, "Another text of the other user.") > 0
    assert first_pictures(server, BEN)[1]["conversations"]


def test_a_prompt_of_another_key_is_read_as_a_new_one(server: Server) -> None:
    prompt = f"What nobody else may guess: {SECRET}"
    whole = tokens_read(server, ANNA, prompt)
    assert tokens_read(server, ANNA, prompt) < whole // 4
    assert tokens_read(server, BEN, prompt) == whole
    assert tokens_read(server, BEN, prompt) < whole // 4


def test_names_of_one_key_share_prefixes_unless_told_otherwise(keys: Path) -> None:
    for options, shares in (((), True), (("--no-shared-prefixes",), False)):
        with contextlib.closing(Closing(*POOL, "--api-key-file", keys, *options)) as server:
            whole = tokens_read(server, ANNA, SECRET, user="work")
            read = tokens_read(server, ANNA, SECRET, user="home")
            assert read < whole // 4 if shares else read == whole
            assert tokens_read(server, ANNA, SECRET, user="home") < whole // 4
            assert tokens_read(server, ANNA, SECRET) == (0 if shares else whole)


class Closing(Server):
    """End the server in close(), and check that its exit code is 0."""

    def close(self) -> None:
        assert self.end()[0] == 0


@pytest.mark.parametrize("key", [None, KEY])
def test_texts_are_off_where_there_is_a_key(key: str | None) -> None:
    """Texts are shown on this machine's own address without a key, and never with one."""
    environment = {} if key is None else {"ENTROPYKV_API_KEY": key}
    with contextlib.closing(Closing(*POOL, "--web", "false", **environment)) as server:
        tokens_read(server, key, SECRET)
        with asked(server, key) as client:
            answer = client.get("/v1/kv/text")
        if key is None:
            assert "secret door" in "".join(answer.json()["texts"])
        else:
            assert answer.status_code == 403
            assert "start it with --show-text" in answer.json()["error"]["message"]
            assert first_pictures(server, key)[0]["text"] is False


@pytest.mark.parametrize("parallel", [1, 2])
async def test_a_name_is_another_conversation_for_another_key_also_of_replicas(
    keys: Path, tmp_path: Path, parallel: int
) -> None:
    model = ModelOptions(
        model=str(MODEL), n_ctx=2048, kv_budget="1500", n_threads=1, parallel=parallel
    )
    app = create_app(model, ServerOptions(api_key_file=str(keys), show_text=True))
    engine = app.state.engine
    conversations = Conversations(tmp_path, 1 << 30, engine.prefix_cache)
    turns = Middleware(
        TurnMiddleware, engine=engine, conversations=conversations, replica="the only one"
    )
    app.user_middleware.append(turns)

    async def read(client: httpx.AsyncClient, key: str, name: str | None) -> int:
        headers = {"authorization": f"Bearer {key}", **({} if name is None else {SESSION: name})}
        body = {"prompt": SECRET, "max_tokens": 2, "temperature": 0}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return int(answer.headers["x-entropykv-tokens-read"])

    with contextlib.closing(engine):
        async with client_of(app) as client:
            whole = await read(client, ANNA, "work")
            assert await read(client, BEN, "work") == whole > 100
            assert await read(client, BEN, None) < whole // 4, "his own text, under no name"
            for key in (ANNA, BEN, ANNA):
                assert await read(client, key, "work") < whole // 4
            shown = await client.get("/v1/kv/text", headers={"authorization": f"Bearer {BEN}"})
            assert shown.status_code == (404 if parallel == 1 else 200)
    assert len(list(tmp_path.glob("*.session"))) == 2


def test_a_new_request_ends_streams_of_the_same_key_alone(keys: Path) -> None:
    body = {"prompt": SECRET, "max_tokens": 9000, "min_tokens": 9000, "stream": True}
    options = ("--interrupt_requests", "true", "--api-key-file", keys)
    with contextlib.closing(Closing(*POOL, *options)) as server, asked(server, ANNA) as anna:
        with anna.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert tokens_read(server, BEN, "Another text.") > 0
            assert [slot["is_processing"] for slot in anna.get("/slots").json()].count(True) == 1
            assert tokens_read(server, ANNA, "Another text.") > 0
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]"
