"""Save and restore a slot's conversation by llama-server's route: POST /slots/{id}?action=save.

A slot of these routes is an AnswerLane of the engine, with the conversation that was answered there
last. The files are sessions in the directory of --slot-save-path, in a separate folder for each API
key.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any, Literal, cast

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from entropykv import system
from entropykv.errors import EntropyKVError, SettingsError
from entropykv.files import make_folder
from entropykv.server.dialects.fields import Name
from entropykv.server.engine.answering import Answering, AnswerLane
from entropykv.server.engine.engine import Engine
from entropykv.server.engine.prefix_cache import PrefixCache
from entropykv.server.http.access import Caller, user_of
from entropykv.server.http.bodies import read_body
from entropykv.server.http.errors import RequestError
from entropykv.server.models.catalog import model_folder
from entropykv.server.models.registry import ModelRegistry

MOST_FILES = 256
"""The most files of one user; each is as large as the entries that its conversation keeps."""
MOST_FILE_NAME = 128
_FILE_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MOST_FILE_NAME - 1}}}", re.ASCII)

Action = Literal["save", "restore", "erase"]


class SlotFile(BaseModel):
    """The file that a conversation is saved to or restored from."""

    filename: str = Field(max_length=MOST_FILE_NAME, description="A name without a folder.")
    model: Name | None = None


async def _done(
    engine: Engine, number: int, action: Action, name: str | None, folder: Path, user: str
) -> dict[str, Any]:
    """Execute an action when a worker is free; returns llama-server's answer, or raises
    RequestError.

    `name`: the file in the folder, which make_directory() has made; None: no file is needed.
    """
    if not 0 <= number < len(engine.lanes):
        raise RequestError(404, f"there is no slot {number}; they are 0 to {len(engine.lanes) - 1}")
    caller = Caller(user)
    lane, prefix_cache = engine.lanes[number], engine.prefix_cache
    path = None if name is None else await asyncio.to_thread(_path, folder, action, name, user)

    def call(_: Answering) -> dict[str, Any]:
        start = time.perf_counter()
        if path is None:
            return {"id_slot": number, "n_erased": _erase(lane, prefix_cache, caller)}
        try:
            done = _save_or_restore(action, lane, prefix_cache, caller, path)
        except EntropyKVError as error:  # Clients must not learn the paths of files.
            raise RequestError(400, str(error).replace(str(path), str(name))) from None
        took = round(1000 * (time.perf_counter() - start), 3)
        timings = {f"{action}_ms": took}
        return {"id_slot": number, "filename": name, **done, "timings": timings}

    result: dict[str, Any] = await engine.run_job(call, caller=caller)
    return result


def _path(directory: Path, action: Action, name: str, user: str) -> Path:
    """Return the path of a file in the user's folder, which is made if necessary; raises
    RequestError for an impossible name, a file that is missing, and too many files.
    """
    if not _FILE_NAME.fullmatch(name):
        raise RequestError(
            400,
            "filename: give a name of letters, digits, dots, dashes and underscores, without a "
            "folder, that begins with no dot",
            param="filename",
        )
    obstacle = system.name_obstacle(name)
    if obstacle is not None:
        raise RequestError(400, f"filename: {obstacle}; give another", param="filename")
    folder = directory / user if user else directory
    make_directory(folder)
    path = folder / name
    if action == "save" and not path.exists() and _n_files(folder) >= MOST_FILES:
        raise RequestError(
            400,
            f"{MOST_FILES} files are saved, and there may be no more; save to one of them",
            param="filename",
        )
    if action == "restore" and not path.is_file():
        raise RequestError(400, f"{name}: no such file", param="filename")
    return path


def make_directory(path: str | os.PathLike[str]) -> None:
    """Make a directory that only its owner can read; raises SettingsError if that fails."""
    try:
        make_folder(path)
    except OSError as error:
        raise SettingsError(
            f"{path}: conversations cannot be saved there ({error.strerror}); give another "
            "directory (--slot-save-path)"
        ) from None


def _n_files(folder: Path) -> int:
    return sum(each.is_file() for each in folder.iterdir())


def _save_or_restore(
    action: Action, lane: AnswerLane, prefix_cache: PrefixCache, caller: Caller, path: Path
) -> dict[str, Any]:
    """Save the conversation in a slot, or load a file into it, so that later requests can reuse its
    text.

    Raises RequestError if there is no conversation of the caller.
    """
    if action == "restore":
        lane.latest = prefix_cache.load(caller, path, replaces=False)
        return {"n_restored": lane.latest.position, "n_read": path.stat().st_size}
    latest = lane.latest
    contents = None if latest is None else prefix_cache.save(caller, path, latest)
    if contents is None:
        raise _holds_nothing()
    return {"n_saved": contents.n_tokens, "n_written": path.stat().st_size}


def _erase(lane: AnswerLane, prefix_cache: PrefixCache, caller: Caller) -> int:
    """Remove the caller's conversation from a slot; returns how many tokens it had, or raises
    RequestError if there is none.
    """
    erased = 0 if lane.latest is None else prefix_cache.forget(caller, lane.latest)
    if not erased:
        raise _holds_nothing()
    return erased


def _holds_nothing() -> RequestError:
    return RequestError(
        400, "the slot holds no conversation of yours, or is answering it; ask for /slots"
    )


def slot_file_routes(models: ModelRegistry, directory: str | None) -> APIRouter:
    """Return the route; without a directory it answers 501, as llama-server does."""
    router = APIRouter(tags=["llama-server"])

    @router.post("/slots/{number}")
    async def slots(
        number: int, action: Action, request: Request, model: Name | None = None
    ) -> dict[str, Any]:
        if directory is None:
            raise RequestError(
                501, "slots are not saved by this server; start it with --slot-save-path DIR"
            )
        name = None
        if action != "erase":
            body = cast(SlotFile, read_body(SlotFile, await request.body()))
            name, model = body.filename, body.model or model
        engine = await models.use(request, model)
        folder = Path(directory) / (model_folder(engine.model.name) if models.has_several else "")
        return await _done(engine, number, action, name, folder, user_of(request.scope))

    return router
