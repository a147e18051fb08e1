"""Offer Ollama's API, the only one that many tools support: chats, texts and lists of models.

Streams are lines of JSON. The models are those of the server; the routes cannot pull, create or
delete any.
"""

from __future__ import annotations

import hashlib
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, model_validator

from entropykv.errors import EntropyKVError
from entropykv.model.geometry import ModelGeometry, read_chat_template, read_geometry
from entropykv.model.shipped import path_of_model
from entropykv.server.dialects.fields import Name
from entropykv.server.dialects.ollama_requests import (
    OllamaChat,
    OllamaGenerate,
    OllamaRequest,
    now,
    only_loaded,
)
from entropykv.server.dialects.openai_routes import refusing
from entropykv.server.dialects.streaming import Lines, respond
from entropykv.server.engine.admission import arrival_of
from entropykv.server.engine.answering import Answering
from entropykv.server.http.bodies import BodyRoute
from entropykv.server.models.held_model import HeldModel
from entropykv.server.models.registry import ModelRegistry
from entropykv.thinking.tags import tags_of

INTERFACE = "0.12.6"
"""The release of Ollama whose API this is; clients check it to learn which fields they may send."""
PREFIX = "/api"
_NEVER = "2318-01-01T00:00:00Z"
"""Ollama's time of unloading for a model that stays loaded."""
_LINES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, as lines of JSON.",
        "content": {"application/json": {}, "application/x-ndjson": {}},
    }
}
_NOT_HERE = {
    "pull": "models are not pulled here; start the server with -hf user/model, or with -m FILE",
    "push": "models are not pushed from here; copy their files",
    "create": "models are not made here; use `entropykv convert`",
    "copy": "models have the names that the server was started with; use --alias",
    "embed": "embeddings are not possible inside a KV budget; use llama_cpp.server for them",
    "embeddings": "embeddings are not possible inside a KV budget; use llama_cpp.server for them",
}
"""Error messages for routes of Ollama that this server does not offer."""


class OllamaErrorAnswer(BaseModel):
    """The body of every answer of Ollama's routes that is an error."""

    error: str


class ShownModel(BaseModel):
    """Hold the name of the model to show, in its newer or older field."""

    model: Name = ""
    name: Name = ""

    @model_validator(mode="after")
    def _has_name(self) -> ShownModel:
        self.model = (self.model or self.name).removesuffix(":latest")
        return self


def ollama_routes(models: ModelRegistry) -> APIRouter:
    """Return the routes of Ollama's API for the models of a server."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": OllamaErrorAnswer} for status in ("4XX", "5XX")
    }
    router = APIRouter(prefix=PREFIX, tags=["Ollama"], route_class=BodyRoute, responses=errors)

    async def answer(request: Request, body: OllamaRequest) -> Response:
        if body.only_loads:
            await models.use(request, body.model_name)
            return JSONResponse(only_loaded(body))
        started = arrival_of(request.scope)
        return await respond(
            request,
            models,
            lambda: [partial(_call, body=body, started=started, loaded=time.monotonic())],
            model=body.model_name,
            document=body.document,
            streams=body.stream,
            form=Lines,
        )

    @router.post("/chat", response_model=None, responses=_LINES)
    async def chat(request: Request, body: OllamaChat) -> Response:
        return await answer(request, body)

    @router.post("/generate", response_model=None, responses=_LINES)
    async def generate(request: Request, body: OllamaGenerate) -> Response:
        return await answer(request, body)

    router.include_router(_about_models(models))
    for name, why in _NOT_HERE.items():
        router.add_api_route(f"/{name}", refusing(why), methods=["POST"], include_in_schema=False)
    router.add_api_route(
        "/delete",
        refusing("models are not removed from here; delete their files"),
        methods=["DELETE"],
        include_in_schema=False,
    )
    return router


def _call(job: Answering, *, body: OllamaRequest, started: float, loaded: float) -> Any:
    return body.call(job, started, loaded)


def _about_models(models: ModelRegistry) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": INTERFACE}

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        return {"models": await run_in_threadpool(_listed, models.all())}

    @router.get("/ps")
    async def loaded() -> dict[str, Any]:
        held = [each for each, _ in models.loaded()]
        listed = await run_in_threadpool(_listed, held)
        return {"models": [{**each, "expires_at": _NEVER, "size_vram": 0} for each in listed]}

    @router.post("/show")
    async def show(body: ShownModel) -> dict[str, Any]:
        return await run_in_threadpool(_shown, models.find(body.model or None))

    return router


def _listed(held: list[HeldModel]) -> list[dict[str, Any]]:
    return [_entry(each) for each in held]


def _entry(held: HeldModel) -> dict[str, Any]:
    """Return a model's entry in a list; without a local file, its size is 0, and its time now."""
    path = _file_of(held)
    size, modified = 0, now()
    if path is not None:
        status = path.stat()
        size = status.st_size
        modified = datetime.fromtimestamp(status.st_mtime, timezone.utc).isoformat()
    known = f"{held.name} {size} {modified if path is not None else ''}"
    return {
        "name": held.name,
        "model": held.name,
        "modified_at": modified,
        "size": size,
        "digest": hashlib.sha256(known.encode()).hexdigest(),
        "details": _details(path, _geometry_of(path)),
    }


def _details(path: Path | None, geometry: ModelGeometry | None) -> dict[str, Any]:
    family = "" if geometry is None else geometry.architecture
    kind = "" if geometry is None or not geometry.weight_types else geometry.weight_types[0][0]
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": kind if path is not None else "",
    }


def _shown(held: HeldModel) -> dict[str, Any]:
    path = _file_of(held)
    geometry = _geometry_of(path)
    template = held.served.options.chat_template
    if template is None and path is not None and geometry is not None:
        template = read_chat_template(path)
    capabilities = ["completion", "tools", *(["thinking"] if tags_of(template) else [])]
    if held.served.options.projector is not None:
        capabilities.append("vision")
    return {
        "modelfile": "",
        "parameters": "",
        "template": template or "",
        "details": _details(path, geometry),
        "model_info": {} if geometry is None else _facts(geometry),
        "capabilities": capabilities,
        "modified_at": _entry(held)["modified_at"],
    }


def _facts(geometry: ModelGeometry) -> dict[str, Any]:
    """Return the facts of a model's header, with the header's own names."""
    kind = geometry.architecture
    return {
        "general.architecture": kind,
        "general.basename": geometry.name,
        f"{kind}.context_length": geometry.n_ctx_train,
        f"{kind}.block_count": geometry.n_layer,
        f"{kind}.attention.head_count": geometry.n_head,
        f"{kind}.attention.head_count_kv": max(geometry.kv_heads_per_layer, default=0),
    }


def _file_of(held: HeldModel) -> Path | None:
    """Return the local file of a model; None without one, and for models of the hub."""
    options = held.served.options
    if options.hf_repo is not None:
        return None
    try:
        path = Path(path_of_model(options.model))
    except EntropyKVError:
        return None
    return path if path.is_file() else None


def _geometry_of(path: Path | None) -> ModelGeometry | None:
    try:
        return None if path is None else read_geometry(path)
    except EntropyKVError:
        return None


def ollama_error(error: dict[str, Any], _: int) -> dict[str, Any]:
    """Return an error in Ollama's form."""
    return {"error": error["message"]}
