"""Interim interface, until the server is merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from llama_cpp.server import app as stock
from llama_cpp.server.model import LlamaProxy
from llama_cpp.server.settings import ModelSettings, ServerSettings

from entropykv.llama import EntropyLlama


@dataclass(frozen=True)
class ModelOptions:
    model: str
    kv_budget: str = "1.0"
    n_ctx: int = 0
    n_threads: int = 1


@dataclass(frozen=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000


def create_app(model: ModelOptions, server: ServerOptions) -> FastAPI:
    del server

    def load(settings: Any) -> EntropyLlama:
        return EntropyLlama(
            settings.model,
            kv_budget=model.kv_budget,
            n_ctx=model.n_ctx,
            n_threads=model.n_threads,
            n_threads_batch=model.n_threads,
            verbose=False,
        )

    LlamaProxy.load_llama_from_model_settings = staticmethod(load)
    app = stock.create_app(
        server_settings=ServerSettings(interrupt_requests=False),
        model_settings=[ModelSettings(model=str(model.model), verbose=False)],
    )
    app.state.llama = stock._llama_proxy()
    return app
