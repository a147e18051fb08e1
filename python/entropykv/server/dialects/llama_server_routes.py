"""Define llama-server's routes that generate nothing: health, properties, slots, tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from entropykv import _version
from entropykv.server.chat.chat_request import ChatRequest
from entropykv.server.dialects.fields import FIRST_ERROR, MOST_PIECES, Name, Tokens
from entropykv.server.dialects.requests import check_tokens, mixed_tokens
from entropykv.server.dialects.responses import ResponsesRequest
from entropykv.server.engine.engine import Engine
from entropykv.server.http.access import user_of
from entropykv.server.http.bodies import BodyRoute
from entropykv.server.http.errors import RequestError
from entropykv.server.models.held_model import ModelState
from entropykv.server.models.registry import ModelRegistry
from entropykv.settings.sampling import RANDOM_SEED


class TokenizeRequest(BaseModel):
    """A text, and how it is tokenised."""

    content: str | Annotated[list[int | str], FIRST_ERROR] = Field(
        description="A text, or a list of texts and tokens."
    )
    model: Name | None = None
    add_special: bool = Field(default=False, description="Begin with the BOS token.")
    parse_special: bool = Field(default=True, description="Read control tokens, such as <s>.")
    with_pieces: bool = Field(default=False, description="Also return the text of every token.")


class DetokenizeRequest(BaseModel):
    """Tokens of a text."""

    tokens: Tokens = Field(description="Tokens, as numbers.")
    model: Name | None = None


def llama_server_routes(models: ModelRegistry) -> APIRouter:
    """Return llama-server's routes that generate nothing; some load the model of a request."""
    router = APIRouter(tags=["llama-server"], route_class=BodyRoute)

    @router.get("/health")
    @router.get("/v1/health", include_in_schema=False)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/props")
    async def props(request: Request, model: Name | None = None) -> dict[str, Any]:
        if model is None and models.catalog.default is None:
            return _props_of_several(models)
        held = models.find(model)
        if held.about is None:
            await models.use(request, model)
        about = held.about or {}
        return {**about["props"], "is_sleeping": held.state is ModelState.SLEEPING}

    @router.get("/slots")
    async def slots(request: Request, model: Name | None = None) -> list[dict[str, Any]]:
        engine = models.engine_of(model)
        user = user_of(request.scope)
        return [_slot(engine, number, user) for number in range(len(engine.lanes))]

    @router.get("/lora-adapters")
    async def adapters() -> list[Any]:
        """Return no adapters, because requests cannot scale any."""
        return []

    # A long answer is written in a thread: FastAPI would do it in the event loop.
    @router.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> JSONResponse:
        engine = await models.use(request, body.model)
        return await run_in_threadpool(lambda: JSONResponse({"tokens": tokens_of(engine, body)}))

    @router.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
        engine = await models.use(request, body.model)
        return {"content": await run_in_threadpool(text_of, engine, body.tokens)}

    router.include_router(_prompt_routes(models))
    return router


def _prompt_routes(models: ModelRegistry) -> APIRouter:
    """Return the routes that show what the model would read, without an answer."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/apply-template")
    async def apply_template(request: Request, body: ChatRequest) -> dict[str, str]:
        engine = await models.use(request, body.model)
        text, _ = await run_in_threadpool(body.prompt_text, engine.model)
        return {"prompt": text}

    @router.post("/v1/chat/completions/input_tokens")
    @router.post("/chat/completions/input_tokens", include_in_schema=False)
    async def count(request: Request, body: ChatRequest) -> dict[str, Any]:
        return await _counted(request, models, body)

    @router.post("/v1/responses/input_tokens")
    @router.post("/responses/input_tokens", include_in_schema=False)
    async def count_response(request: Request, body: ResponsesRequest) -> dict[str, Any]:
        return await _counted(request, models, body.chat())

    return router


async def _counted(request: Request, models: ModelRegistry, chat: ChatRequest) -> dict[str, Any]:
    """Return how many tokens the prompt of a chat has."""
    engine = await models.use(request, chat.model)
    _, tokens = await run_in_threadpool(chat.prompt_text, engine.model)
    return {"object": "response.input_tokens", "input_tokens": len(tokens)}


def text_of(engine: Engine, tokens: list[int]) -> str:
    """Return the text of tokens; raises RequestError for tokens that are not in the vocabulary."""
    check_tokens(tokens, engine.model, "tokens")
    return engine.model.model.detokenize(tokens, special=False)


def tokens_of(engine: Engine, body: TokenizeRequest) -> list[Any]:
    """Return the tokens of a text, with their texts if they are wanted; raises the errors of
    mixed_tokens(), and RequestError for more than MOST_PIECES texts.
    """
    model = engine.model
    ids = mixed_tokens(
        body.content,
        model,
        begins=body.add_special,
        special=body.parse_special,
        param="content",
    )
    if not body.with_pieces:
        return ids
    if len(ids) > MOST_PIECES:
        raise RequestError(
            400,
            f"with_pieces: the text has {len(ids):,} tokens, and {MOST_PIECES:,} are the most; "
            "leave it out, or send the text in parts",
            param="with_pieces",
        )
    return [
        {"id": token, "piece": _piece(model.model.token_bytes(token, special=True))}
        for token in ids
    ]


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if they are a part of a character."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def describe(engine: Engine) -> dict[str, Any]:
    """Return what stays the same while a model is loaded: `props`, the answer of /props, and
    `meta`, a field of its entry in /v1/models.
    """
    meta = {"n_ctx": engine.model.n_ctx, "n_vocab": engine.model.model.n_vocab}
    return {"props": _props(engine), "meta": meta}


def _props_of_several(models: ModelRegistry) -> dict[str, Any]:
    """Return what llama-server's router reports about itself."""
    return {
        "role": "router",
        "max_instances": models.room.models or 0,
        "models_autoload": models.autoload,
        "default_generation_settings": {"n_ctx": 0, "params": {}},
        "model_alias": "entropykv",
        "model_path": "none",
        "build_info": f"entropykv {_version.VERSION}",
    }


def _props(engine: Engine) -> dict[str, Any]:
    model, template = engine.model, engine.model.model.chat_template
    defaults = ChatRequest.model_construct(messages=[])
    sampling = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty")
    return {
        "default_generation_settings": {
            "n_ctx": model.n_ctx,
            "params": {
                "seed": model.request_defaults.get("seed", RANDOM_SEED),
                **{n: model.request_defaults.get(n, getattr(defaults, n)) for n in sampling},
            },
        },
        "total_slots": len(engine.lanes),
        "model_alias": model.name,
        "model_path": model.model.geometry.path.name,  # Clients must not learn the folder.
        "modalities": {"vision": model.images is not None, "audio": False},
        "chat_template": "" if template is None else template.source,
        "bos_token": model.model.token_name(model.model.bos),
        "eos_token": model.model.token_name(model.model.eos),
        "build_info": f"entropykv {_version.VERSION}",
    }


def _slot(engine: Engine, number: int, user: str) -> dict[str, Any]:
    """Return what a slot is doing, in llama-server's words.

    Of another user's request, it shows only that the slot is busy, because lengths reveal what is
    asked.
    """
    answering = engine.running.get(engine.lanes[number])
    own = answering if answering is not None and answering.caller.user == user else None
    return {
        "id": number,
        "n_ctx": engine.model.n_ctx,
        "speculative": False,
        "is_processing": answering is not None,
        "n_prompt_tokens": 0 if own is None else own.n_prompt,
        "next_token": [{"n_decoded": 0 if own is None else own.n_written, "n_remain": -1}],
    }
