"""Hold the state of one model of a server: whether it is in memory, and who uses it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from entropykv.errors import EntropyKVError
from entropykv.server.engine.engine import Engine
from entropykv.server.http.errors import RequestError
from entropykv.server.models.catalog import ServedModel
from entropykv.server.models.memory_estimate import MemoryEstimate

_logger = logging.getLogger("entropykv.server")
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[^/\s]+/)+")
"""The folders of a path, which clients must not see."""


class ModelState(Enum):
    """Name whether a model is in memory, in llama-server's words."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    """The model was unloaded because nobody used it; the next request loads it again."""


@dataclass(eq=False)
class HeldModel:
    """Hold the server's current state of one of its models."""

    served: ServedModel
    state: ModelState = ModelState.UNLOADED
    engine: Engine | None = None
    """The engine that answers requests; None if the model is not in memory, or about to be
    unloaded.
    """
    failure: RequestError | None = None
    """Why the latest attempt to load it failed; None if it did not."""
    estimate: MemoryEstimate | None = None
    """The estimated memory of the loaded model; None if not estimated yet."""
    about: dict[str, Any] | None = None
    """The description that the routes had when the model was last loaded."""
    users: int = 0
    """How many requests the model answers, or is about to answer."""
    waiting: int = 0
    """How many requests wait until the model is loaded."""
    leaves: bool = False
    """True if the model accepts no new requests, and is unloaded after its last one."""
    last_used: float = field(default_factory=time.monotonic)
    loads: int = 0
    """How often the model was loaded."""
    opening: asyncio.Task[None] | None = None
    """The task that loads the model."""
    wanted: bool = False
    """True if the model is to be loaded even if no request waits for it."""
    timer: asyncio.TimerHandle | None = None
    """The timer that unloads the model after some time without requests."""

    @property
    def name(self) -> str:
        """Return the name that clients use."""
        return self.served.name

    @property
    def is_idle(self) -> bool:
        """Tell whether no request uses it, and none is about to."""
        return self.users == 0 and (self.waiting == 0 or self.leaves)

    @property
    def is_awaited(self) -> bool:
        """Tell whether a request waits until it is loaded, or it is to be loaded anyway."""
        return self.waiting > 0 or self.wanted

    def count_bytes(self) -> int:
        """Return the estimated bytes that it takes, including those swapped out to memory.

        It may wait for a step of the model, so it must not be called in the event loop.
        """
        total = 0 if self.estimate is None else self.estimate.total
        return total + (0 if self.engine is None else self.engine.moment().pool.swapped_bytes)


def failure_of(held: HeldModel, error: Exception) -> RequestError:
    """Return the error for clients after a failed load, without paths of this machine."""
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, EntropyKVError):
        _logger.error("the model %s cannot be loaded", held.name, exc_info=error)
    said = _FOLDERS.sub("", str(error))
    return RequestError(
        500, f"the model {held.name!r} cannot be loaded: {said}", code="model_load_failed"
    )


def again(error: RequestError) -> RequestError:
    """Return a copy of an error. Each request needs its own, because raising adds a traceback."""
    details = error.body["error"]
    return RequestError(error.status_code, str(details["message"]), code=details["code"])


def not_loaded(held: HeldModel) -> RequestError:
    """Return the error for a request that needs a loaded model but must not load it."""
    return RequestError(
        400,
        f"the model {held.name!r} is not loaded; ask it for an answer, or POST /models/load",
        param="model",
        code="model_not_loaded",
    )
