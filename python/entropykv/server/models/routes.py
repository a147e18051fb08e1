"""List the models of a server, and load and unload them, by OpenAI's and llama-server's routes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from entropykv.server.dialects.fields import Name
from entropykv.server.http.bodies import BodyRoute
from entropykv.server.models.held_model import HeldModel, ModelState
from entropykv.server.models.registry import ModelRegistry


class ModelName(BaseModel):
    """The model that is to be loaded or unloaded."""

    model: Name


def model_routes(models: ModelRegistry) -> APIRouter:
    """Return the routes of models; those that load and unload need several models."""
    router = APIRouter(tags=["Models"], route_class=BodyRoute)

    @router.get("/v1/models")
    @router.get("/models", include_in_schema=False)
    async def listed() -> dict[str, Any]:
        return {"object": "list", "data": [_entry(models, each) for each in models.all()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _entry(models, models.named(name))

    if not models.has_several:
        return router

    @router.post("/models/load")
    async def load(body: ModelName) -> dict[str, bool]:
        """Start loading a model; `/v1/models` shows when it is loaded."""
        models.load(body.model)
        return {"success": True}

    @router.post("/models/unload")
    async def unload(body: ModelName) -> dict[str, bool]:
        """Unload a model after its requests have been answered."""
        models.unload(body.model)
        return {"success": True}

    return router


def _entry(models: ModelRegistry, held: HeldModel) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": held.name,
        "object": "model",
        "created": models.created,
        "owned_by": "me",
        "permissions": [],
        "aliases": list(held.served.aliases),
        "tags": held.served.options.served_tags,
    }
    if models.has_several:
        entry["status"] = _status(held)
    if held.about is not None:
        entry["meta"] = held.about["meta"]
    return entry


def _status(held: HeldModel) -> dict[str, Any]:
    """Return the state in llama-server's words; `args` is left out, because it would show local
    paths.
    """
    status: dict[str, Any] = {"value": held.state.value, "args": []}
    if held.failure is not None:
        status |= {"failed": True, "exit_code": 1, "error": held.failure.detail}
    if held.state is not ModelState.UNLOADED and held.estimate is not None:
        status["memory_bytes"] = held.estimate.total
    return status
