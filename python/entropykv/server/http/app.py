"""Make the app: its routes, with the models of a server behind them.

Settings and request types are llama_cpp.server's, but its app is not used: it keeps the model in
globals of its module, answers errors of a stream with 200, and cannot stop a generation whose
client has disconnected.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from llama_cpp.server.types import DetokenizeInputRequest, TokenizeInputRequest
from starlette.datastructures import State

from entropykv import _version
from entropykv.server.dialects.anthropic_requests import anthropic_error
from entropykv.server.dialects.fields import Name, Tokens
from entropykv.server.dialects.llama_server_routes import (
    TokenizeRequest,
    describe,
    llama_server_routes,
    text_of,
    tokens_of,
)
from entropykv.server.dialects.ollama_routes import PREFIX as OLLAMA_PATH
from entropykv.server.dialects.ollama_routes import ollama_error, ollama_routes
from entropykv.server.dialects.openai_routes import (
    ANTHROPIC_PATH,
    anthropic_routes,
    completion_routes,
    openai_routes,
)
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.routes import document_routes
from entropykv.server.engine.admission import LARGE_BODIES, LARGE_BODY, Limits
from entropykv.server.engine.engine import Engine
from entropykv.server.engine.slot_files import make_directory, slot_file_routes
from entropykv.server.http.access import (
    ApiKeyCheck,
    HostHeaderCheck,
    Keys,
    OriginCheck,
    origins_of,
    shows_text,
    user_of,
)
from entropykv.server.http.bodies import Bodies, BodyRoute
from entropykv.server.http.docs_page import docs_page
from entropykv.server.http.errors import ErrorAnswer, ErrorForms, Form, add_error_handlers
from entropykv.server.http.metrics import PROMETHEUS, as_json, as_prometheus
from entropykv.server.http.request_log import RequestLog
from entropykv.server.models.catalog import ModelCatalog, ServedModel
from entropykv.server.models.loading import cache_options, load_model
from entropykv.server.models.registry import Leases, ModelRegistry, Room
from entropykv.server.models.routes import model_routes
from entropykv.server.options import ModelOptions, ServerOptions
from entropykv.server.page.kv_stream import MOST_SECONDS, kv_stream_routes
from entropykv.server.page.routes import WebDefaults, web_routes

_DESCRIPTION = (
    "A model inside a KV budget, for clients of OpenAI, Anthropic, Ollama, llama-server and "
    "llama_cpp.server."
)

FORMS: dict[str, Form] = {OLLAMA_PATH: ollama_error, ANTHROPIC_PATH: anthropic_error}
"""The function that converts errors of the paths whose API has another form than OpenAI's."""


class _Tokenize(TokenizeInputRequest):
    """A text that is tokenised, and the name of the model."""

    model: Name | None = None


class _Detokenize(DetokenizeInputRequest):
    """Tokens of a text, which are validated up to their first error."""

    model: Name | None = None
    tokens: Tokens


def create_app(
    model: ModelOptions | ModelCatalog,
    server: ServerOptions,
    page: WebDefaults | None = None,
    *,
    viewer_seconds: int = MOST_SECONDS,
) -> FastAPI:
    """Make the app that serves one model, which is loaded at once, or the models of a catalog.

    The shutdown of the app frees the models. app.state.models is the ModelRegistry. For one model,
    app.state.engine is its Engine, which is another one after the model has slept: engine.call()
    calls a function with the LoadedModel in a worker thread, and engine.before_close() registers a
    function for the shutdown (to save sessions, for example). `page`: the initial settings of
    conversations of the page at /. `viewer_seconds`: after how many seconds a viewer of the cache
    has to ask again. Two apps share no models. Raises the errors of load_model() for one model, of
    cache_options() for several, and of Keys.of(), make_directory() and DocumentLibrary().
    """
    keys = Keys.of(server)
    catalog = ModelCatalog.of_one(model) if isinstance(model, ModelOptions) else model
    for each in catalog.models:
        if not catalog.any_name:
            cache_options(each.options, documents=server.documents is not None)
    if server.slot_save_path is not None:
        make_directory(server.slot_save_path)
    documents = _library(catalog, server)
    models = _registry(catalog, server, documents)
    if catalog.any_name:
        models.load_now()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        models.begin()
        try:
            yield
        finally:
            await run_in_threadpool(models.close)

    app = FastAPI(
        title="entropykv",
        description=_DESCRIPTION,
        version=_version.VERSION,
        root_path=server.root_path,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages would load scripts from the internet.
        redoc_url=None,
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
    )
    app.state = _AppState(models, server, has_engine=catalog.any_name)
    _add_middleware(app, server, models, keys)
    add_error_handlers(app)
    ping = not server.disable_ping_events
    app.include_router(openai_routes(models, ping=ping))
    app.include_router(anthropic_routes(models, ping=ping))
    app.include_router(completion_routes(models, ping=ping))
    app.include_router(ollama_routes(models))
    app.include_router(model_routes(models))
    app.include_router(llama_server_routes(models))
    app.include_router(slot_file_routes(models, server.slot_save_path))
    app.include_router(document_routes(models, documents))
    app.include_router(_extra_routes(models))
    app.include_router(_figures(models))
    shown = shows_text(server, keys)
    app.include_router(kv_stream_routes(models, show_text=shown, most_seconds=viewer_seconds))
    if server.web:
        keeps = documents is not None
        app.include_router(web_routes(models, page or WebDefaults(), documents=keeps))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    return app


class _AppState(State):
    """Hold what app.state offers to the code that embeds the app."""

    def __init__(self, models: ModelRegistry, server: ServerOptions, *, has_engine: bool) -> None:
        ignores = server.ignore_unknown_fields
        super().__init__(
            {"models": models, "ignores_unknown_fields": ignores, "_has_engine": has_engine}
        )

    @property
    def engine(self) -> Engine:
        """Return the engine of the only model, which is another one after the model has slept.

        Raises RequestError while the model is not in memory, and AttributeError for several models.
        """
        if not self._has_engine:
            raise AttributeError("an app of several models has no engine; use app.state.models")
        engine: Engine = self.models.engine_of(None)
        return engine


def limits_of(model: ModelOptions | ModelCatalog, server: ServerOptions) -> Limits:
    """Return the limits of requests: on a server that reads images or documents, bodies may be
    larger, unless the options say how large.
    """
    catalog = ModelCatalog.of_one(model) if isinstance(model, ModelOptions) else model
    alike = {each.name for each in fields(Limits)} & ServerOptions.model_fields.keys()
    given = {name: getattr(server, name) for name in alike}
    if server.documents is not None or any(each.options.projector for each in catalog.models):
        larger = {"max_body": LARGE_BODY, "max_bodies": LARGE_BODIES}
        given.update({n: size for n, size in larger.items() if n not in server.model_fields_set})
    return Limits(**given)


def _library(catalog: ModelCatalog, server: ServerOptions) -> DocumentLibrary | None:
    if server.documents is None:
        return None
    limit = server.documents_limit_bytes
    return DocumentLibrary(server.documents, limit, several=not catalog.any_name)


def _registry(
    catalog: ModelCatalog, server: ServerOptions, documents: DocumentLibrary | None
) -> ModelRegistry:
    limits = limits_of(catalog, server)

    def open_model(model: ServedModel) -> Engine:
        """Load a model, in a thread."""
        engine = Engine(
            load_model(model.options, limits.images, documents=documents is not None),
            interrupt=server.interrupt_requests,
            limits=replace(limits, conversations=model.options.conversations),
            shared_prefixes=server.shared_prefixes,
            documents=documents,
        )
        if not catalog.any_name:
            sys.stderr.write(f"entropykv: {model.name}: {engine.describe()}\n")
        return engine

    room = Room(server.models_max or None, server.models_memory_bytes)
    catalog.check_startup(room.models)
    return ModelRegistry(
        catalog,
        open_model,
        describe,
        room=room,
        limits=limits,
        autoload=server.models_autoload,
    )


def _add_middleware(app: FastAPI, server: ServerOptions, models: ModelRegistry, keys: Keys) -> None:
    """Let requests pass in this order: log, form of errors, host, CORS (a preflight has no key),
    origin, key, body, leases of models.
    """
    app.add_middleware(Leases)
    app.add_middleware(Bodies, admission=models.admission)
    app.add_middleware(ApiKeyCheck, keys=keys)
    origins, pattern = origins_of(server.cors_origins)
    app.add_middleware(OriginCheck, origins=origins, pattern=pattern)
    if server.cors_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_origin_regex=pattern,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(HostHeaderCheck, host=server.host, allowed=server.allowed_hosts)
    app.add_middleware(ErrorForms, forms=FORMS, root_path=server.root_path)
    app.add_middleware(RequestLog)


def _extra_routes(models: ModelRegistry) -> APIRouter:
    """Return routes of llama_cpp.server that only need the vocabulary, and do not wait for a
    worker.
    """
    router = APIRouter(prefix="/extras", tags=["Extras"], route_class=BodyRoute)

    def ids(engine: Engine, body: _Tokenize) -> list[Any]:
        return tokens_of(engine, TokenizeRequest(content=body.input, add_special=True))

    # A long answer is written in a thread: FastAPI would do it in the event loop.
    @router.post("/tokenize")
    async def tokenize(request: Request, body: _Tokenize) -> JSONResponse:
        engine = await models.use(request, body.model)
        return await run_in_threadpool(lambda: JSONResponse({"tokens": ids(engine, body)}))

    @router.post("/tokenize/count")
    async def count(request: Request, body: _Tokenize) -> dict[str, int]:
        engine = await models.use(request, body.model)
        return {"count": len(await run_in_threadpool(ids, engine, body))}

    @router.post("/detokenize")
    async def detokenize(request: Request, body: _Detokenize) -> dict[str, str]:
        engine = await models.use(request, body.model)
        return {"text": await run_in_threadpool(text_of, engine, body.tokens)}

    return router


def _figures(models: ModelRegistry) -> APIRouter:
    router = APIRouter(tags=["KV cache"])

    # FastAPI runs it in a thread: figures of a pool are taken between two steps, and the event loop
    # must not wait for that.
    @router.get("/v1/kv")
    def kv(request: Request, model: Name | None = None) -> dict[str, Any]:
        return as_json(models.engine_of(model), user_of(request.scope))

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(as_prometheus(models), media_type=PROMETHEUS)

    return router
