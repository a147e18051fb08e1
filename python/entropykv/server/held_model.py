"""Hold what a server knows of one of its models: whether it is in memory, and who uses it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from entropykv.errors import EntropyKVError
from entropykv.server.engine import Engine
from entropykv.server.errors import RequestError
from entropykv.server.memory_estimate import MemoryEstimate
from entropykv.server.model_catalog import ServedModel

_logger = logging.getLogger("entropykv.server")
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[^/\s]+/)+")
"""The folders of a path, which clients need not know."""


class ModelState(Enum):
    """Say whether a model is in memory, by llama-server's words."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    """It was unloaded because nobody asked for it; the next request loads it again."""


@dataclass(eq=False)
class HeldModel:
    """Hold what a server knows of one of its models at the moment."""

    served: ServedModel
    state: ModelState = ModelState.UNLOADED
    engine: Engine | None = None
    """What answers requests; None: the model is not in memory, or about to leave it."""
    failure: RequestError | None = None
    """Why the latest attempt to load it failed; None: it did not."""
    estimate: MemoryEstimate | None = None
    """What it takes while it is loaded, as far as it was asked."""
    about: dict[str, Any] | None = None
    """What its routes told of it when it was loaded last."""
    users: int = 0
    """How many requests it answers, or is about to."""
    waiting: int = 0
    """How many requests wait until it is loaded."""
    leaves: bool = False
    """Whether it is unloaded once its last request has its answer, and takes no new one."""
    last_used: float = field(default_factory=time.monotonic)
    loads: int = 0
    """How often it was loaded."""
    opening: asyncio.Task[None] | None = None
    """What loads it."""
    wanted: bool = False
    """Whether it is to be loaded also where no request waits for it."""
    timer: asyncio.TimerHandle | None = None
    """What lets it sleep after a while without requests."""

    @property
    def name(self) -> str:
        """Return what clients call it."""
        return self.served.name

    @property
    def is_idle(self) -> bool:
        """Tell whether no request uses it, and none that waited for it is about to."""
        return self.users == 0 and (self.waiting == 0 or self.leaves)

    def count_bytes(self) -> int:
        """Return the estimated bytes that it takes, with what it has swapped out to memory.

        It may wait for a step of the model: call it outside of the event loop.
        """
        total = 0 if self.estimate is None else self.estimate.total
        pool = None if self.engine is None else self.engine.moment().pool
        return total + (pool.swapped_bytes if pool is not None else 0)


def failure_of(held: HeldModel, error: Exception) -> RequestError:
    """Return what clients are told, without the paths of this machine."""
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, EntropyKVError):
        _logger.error("the model %s cannot be loaded", held.name, exc_info=error)
    said = _FOLDERS.sub("", str(error))
    return RequestError(
        500, f"the model {held.name!r} cannot be loaded: {said}", code="model_load_failed"
    )


def again(error: RequestError) -> RequestError:
    """Return an error anew for each request that it answers: a traceback belongs to one."""
    details = error.body["error"]
    return RequestError(error.status_code, str(details["message"]), code=details["code"])


def not_loaded(held: HeldModel) -> RequestError:
    """Return the error for a request that needs a model in memory, and does not load it."""
    return RequestError(
        400,
        f"the model {held.name!r} is not loaded; ask it for an answer, or POST /models/load",
        param="model",
        code="model_not_loaded",
    )
