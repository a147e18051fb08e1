"""Send requests to a running server, as its clients do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import openai

from entropykv import EntropyLlama
from tests.support.running_server import MODEL, N_CTX, OPTIONS, Server

PROMPT = "The old garden"
MESSAGES: list[Any] = [{"role": "user", "content": "Where is the garden?"}]
LONG = {"max_tokens": N_CTX - 100, "extra_body": {"min_tokens": N_CTX}}


def served(
    *options: object, usual: tuple[object, ...] = OPTIONS, **environment: str
) -> Iterator[Server]:
    """Run a server for the tests of a module, and check that it ends without an error."""
    with Server(*options, usual=usual, **environment) as running:
        yield running


def complete(client: openai.OpenAI, prompt: str = PROMPT, **options: Any) -> str:
    options = {"max_tokens": 12, "temperature": 0.0, **options}
    return str(client.completions.create(model="any", prompt=prompt, **options).choices[0].text)


def completion(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    """Return the response to a prompt, by default greedy and of up to 6 tokens."""
    given = {"max_tokens": 6, "temperature": 0.0, **options}
    return client.completions.create(model="tiny", prompt=prompt, **given)


def assert_next_is_right(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with closing(EntropyLlama(MODEL, n_ctx=N_CTX, kv_budget="256", **arguments)) as llama:
        expected: Any = llama(PROMPT, max_tokens=12, temperature=0.0)["choices"][0]["text"]
    assert complete(client) == expected


ORIGIN = "http://localhost:3000"


def tokens_of(server: Server, text: str, **options: Any) -> Any:
    body = {"content": text, **options}
    return server.post("/tokenize", json.dumps(body)).json()["tokens"]


def client_of(app: Any) -> httpx.AsyncClient:
    """Return a client of an app that runs in this event loop."""
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)
