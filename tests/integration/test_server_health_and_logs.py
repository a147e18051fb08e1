"""Operators of `entropykv serve` get its models, health, log and OpenAPI description."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.server.http.running import Starting
from tests.support.running_server import KEY, MODEL, Server
from tests.support.served import ORIGIN, PROMPT, client_of, completion, served, tokens_of


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served("--alias", "tiny", "--cors-origins", ORIGIN, "--api-key", KEY)


def test_models_by_name_and_without_a_path(client: openai.OpenAI, server: Server) -> None:
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    for path in ("/v1/models", "/v1/kv", "/props", "/metrics", "/openapi.json", "/docs"):
        assert str(MODEL.parent) not in server.get(path).text


def test_health_and_docs_need_no_key(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    page = httpx.get(f"{server.url}/docs").text
    assert "/v1/chat/completions" in page
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert httpx.get(f"{server.url}/props").status_code == 401


def test_props_and_tokens_as_llama_server_has_them(server: Server) -> None:
    props = server.get("/props").json()
    assert props["total_slots"] == 1
    assert props["model_alias"] == "tiny"
    assert props["default_generation_settings"]["n_ctx"] == 16384
    ids = tokens_of(server, PROMPT)
    assert tokens_of(server, PROMPT, add_special=True)[-len(ids) :] == ids
    pieces = tokens_of(server, PROMPT, with_pieces=True)
    assert [piece["id"] for piece in pieces] == ids
    assert "".join(piece["piece"] for piece in pieces).strip() == PROMPT
    body = json.dumps({"tokens": ids})
    assert server.post("/detokenize", body).json()["content"].strip() == PROMPT
    assert server.post("/detokenize", '{"tokens": [-1]}').status_code == 400


def test_a_preflight_needs_no_key_and_knows_its_origins(server: Server) -> None:
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    url = f"{server.url}/v1/chat/completions"
    allowed = httpx.options(url, headers={"origin": ORIGIN, **asked})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    other = httpx.options(url, headers={"origin": "http://elsewhere", **asked})
    assert "access-control-allow-origin" not in other.headers
    refused = httpx.post(url, headers={"origin": ORIGIN}, json={})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN


def test_the_log_has_one_line_for_a_request_and_nothing_that_was_said() -> None:
    running = Server("--api-key", KEY)
    with running.client() as client:
        completion(client, "a secret prompt", max_tokens=3)
    running.get("/v1/models?secret=1%0a")
    _, errors = running.end()
    first, second = errors.splitlines()
    end = r"POST /v1/completions 200 \d+\.\d{3} s, \d+ tokens read, 3 written"
    assert re.search(end + "$", first), first
    assert re.search(r"GET /v1/models 200 \d+\.\d{3} s$", second), second
    assert "secret" not in errors


async def test_the_server_listens_while_it_loads() -> None:
    ready, loaded = threading.Event(), asyncio.Event()

    def load() -> Any:
        assert ready.wait(30)
        return create_app(ModelOptions(model=str(MODEL), n_threads=1), ServerOptions(api_key=KEY))

    app = Starting(load)
    app.when_done = loaded.set
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    await incoming.put({"type": "lifespan.startup"})
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    life = asyncio.ensure_future(app({"type": "lifespan"}, incoming.get, send))
    async with client_of(app) as client:
        while not sent:
            await asyncio.sleep(0.01)
        loading = await client.get("/health")
        ollama, anthropic = await client.get("/api/tags"), await client.post("/v1/messages")
        ready.set()
        await loaded.wait()
        healthy, keyless = await client.get("/health"), await client.get("/v1/models")
    await incoming.put({"type": "lifespan.shutdown"})
    await life
    assert loading.status_code == 503
    assert loading.json()["error"]["code"] == "model_loading"
    assert (ollama.status_code, anthropic.status_code) == (503, 503)
    assert ollama.json() == {"error": loading.json()["error"]["message"]}
    assert anthropic.json()["type"] == "error"
    assert healthy.json() == {"status": "ok"}
    assert keyless.status_code == 401


def test_the_description_holds_what_the_server_does(server: Server) -> None:
    described = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/health", "/props", "/tokenize", "/v1/responses", "/v1/models/{name}"} <= set(
        described
    )
    assert "422" not in described["/v1/chat/completions"]["post"]["responses"]
