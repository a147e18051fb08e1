"""Serve several tiny models in this process, and control when each of them is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from entropykv.server import ModelCatalog, ModelOptions, ServedModel, ServerOptions, create_app
from entropykv.server.http import app as app_module
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.server.models.loading import load_model
from entropykv.server.models.registry import ModelRegistry
from tests.support.served import client_of
from tests.support.tiny_models import write_llama
from tests.support.waiting import until

WORDS = {"prompt": "The old garden", "max_tokens": 6, "temperature": 0.0}


def write_models(directory: Path, *names: str) -> None:
    """Write tiny models with different weights under these names; "broken" is truncated."""
    for seed, name in enumerate(names):
        path = directory / f"{name}.gguf"
        write_llama(path, seed=seed)
        if name == "broken":
            path.write_bytes(path.read_bytes()[:3000])


def catalog_of(directory: Path, *names: str, default: str | None = None, **fields: Any) -> Any:
    """Return a catalog of these models; `fields` are their ModelOptions."""
    given = {"n_ctx": 256, "kv_budget": "64", "n_threads": 1, **fields}
    models = [
        ServedModel.of(name, ModelOptions(model=str(directory / f"{name}.gguf"), **given))
        for name in names
    ]
    return ModelCatalog.of_several(models, default)


@dataclass
class Gates:
    """Hold models back from loading until a test allows it, and count the loads."""

    loads: list[str] = field(default_factory=list)
    closed: dict[str, threading.Event] = field(default_factory=dict)

    def close(self, name: str) -> threading.Event:
        """Let the thread that loads a model wait until the returned event is set."""
        self.closed[name] = threading.Event()
        return self.closed[name]

    def load(self, options: ModelOptions, *arguments: Any, **named: Any) -> LoadedModel:
        name = options.served_name
        self.loads.append(name)
        if name in self.closed:
            assert self.closed[name].wait(60)
        return load_model(options, *arguments, **named)


@dataclass
class Running:
    """Hold an app that runs in this event loop, its client, and its models."""

    app: FastAPI
    client: httpx.AsyncClient
    gates: Gates

    @property
    def models(self) -> ModelRegistry:
        models: ModelRegistry = self.app.state.models
        return models

    async def ask(self, model: str | None, **fields: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        return await self.client.post("/v1/completions", json={**WORDS, **named, **fields})

    async def ask_and_leave(self, model: str, leaves: asyncio.Event) -> int:
        """Ask as a client that disconnects once the event is set; return the answer's status."""
        body = json.dumps({**WORDS, "model": model}).encode()
        messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
        statuses: list[int] = []

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        await self.app(scope, receive, send)
        return statuses[0]

    async def states(self) -> dict[str, str]:
        listed = (await self.client.get("/v1/models")).json()["data"]
        return {each["id"]: each["status"]["value"] for each in listed}

    async def until(self, name: str, state: str) -> None:
        """Wait until a model is in a state, for at most a minute."""
        await until(lambda: self.models.named(name).state.value == state)

    def counts(self, name: str) -> tuple[int, int]:
        """Return how often a model was loaded, and how many requests use it now."""
        held = self.models.named(name)
        return held.loads, held.users


@contextlib.asynccontextmanager
async def running(models: Any, **server: Any) -> AsyncIterator[Running]:
    """Run the app of a catalog, or of one model, in this event loop; its Gates hold loads back."""
    gates = Gates()
    before = app_module.load_model
    app_module.load_model = gates.load
    try:
        app = await asyncio.to_thread(create_app, models, ServerOptions(**server))
        async with app.router.lifespan_context(app), client_of(app) as client:
            yield Running(app, client, gates)
    finally:
        app_module.load_model = before


def run(talk: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, for at most two minutes."""
    asyncio.run(asyncio.wait_for(talk, 120))
