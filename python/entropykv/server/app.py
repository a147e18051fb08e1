"""create_app(): the routes of llama_cpp.server, with an EntropyLlama behind them.

Settings and request types are llama_cpp.server's. Its app is not: it keeps the model in globals of
its module, answers errors of a stream with 200, and cannot stop what a client no longer waits for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse, Response
from llama_cpp.server.types import DetokenizeInputRequest, TokenizeInputRequest

from entropykv import _version
from entropykv.server.engine import Engine
from entropykv.server.errors import RequestError, add_error_handlers
from entropykv.server.gate import Gate
from entropykv.server.loading import load_llama
from entropykv.server.metrics import PROMETHEUS, as_json, as_prometheus
from entropykv.server.options import ModelOptions, ServerOptions
from entropykv.server.requests import ChatRequest, CompletionRequest
from entropykv.server.streaming import stream, whole


def create_app(model: ModelOptions, server: ServerOptions) -> FastAPI:
    """Load the model, and make the app that serves it; its shutdown frees the model.

    app.state.engine is the Engine: engine.call() does something with the EntropyLlama between two
    requests, engine.before_close() before the shutdown frees it (to save sessions, say).
    Nothing is shared between two apps. Raises what EntropyLlama raises.
    """
    engine = Engine(load_llama(model), interrupt=server.interrupt_requests)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await run_in_threadpool(engine.close)

    app = FastAPI(
        title="entropykv", version=_version.VERSION, root_path=server.root_path, lifespan=lifespan
    )
    app.state.engine = engine
    app.add_middleware(Gate, api_key=server.api_key, max_body=server.max_body)
    add_error_handlers(app)
    app.include_router(_openai_routes(engine, model, ping=not server.disable_ping_events))
    app.include_router(_extra_routes(engine))
    app.include_router(_figures(engine))
    return app


def _openai_routes(engine: Engine, model: ModelOptions, *, ping: bool) -> APIRouter:
    router = APIRouter(tags=["OpenAI V1"])

    async def answer(request: Request, body: CompletionRequest | ChatRequest) -> Response:
        if body.stream:
            return await stream(request, engine, body.call, ping=ping)
        return await whole(request, engine, body.call)

    @router.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await answer(request, body)

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings() -> Response:
        raise RequestError(
            400, "embeddings are not possible inside a KV budget; use llama_cpp.server for them"
        )

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model.model_alias or model.model, "object": "model"}
        return {"object": "list", "data": [{**entry, "owned_by": "me", "permissions": []}]}

    return router


def _extra_routes(engine: Engine) -> APIRouter:
    """llama_cpp.server's; they only look at the vocabulary, and need not wait for their turn."""
    router = APIRouter(prefix="/extras", tags=["Extras"])

    def ids(body: TokenizeInputRequest) -> list[int]:
        return engine.llama.tokenize(body.input.encode("utf-8"), special=True)

    @router.post("/tokenize")
    def tokenize(body: TokenizeInputRequest) -> dict[str, list[int]]:
        return {"tokens": ids(body)}

    @router.post("/tokenize/count")
    def count(body: TokenizeInputRequest) -> dict[str, int]:
        return {"count": len(ids(body))}

    @router.post("/detokenize")
    def detokenize(body: DetokenizeInputRequest) -> dict[str, str]:
        n_vocab = engine.llama.n_vocab()
        if not all(0 <= token < n_vocab for token in body.tokens):
            raise RequestError(400, f"tokens: they are 0 to {n_vocab - 1}", param="tokens")
        return {"text": engine.llama.detokenize(body.tokens).decode("utf-8", errors="replace")}

    return router


def _figures(engine: Engine) -> APIRouter:
    router = APIRouter(tags=["KV cache"])

    @router.get("/v1/kv")
    async def kv() -> dict[str, Any]:
        return as_json(engine)

    @router.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(as_prometheus(engine), media_type=PROMETHEUS)

    return router
