"""Hold the state of one model of a server: whether it is in memory, who uses it, and how much
memory it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from entropykv.errors import EntropyKVError
from entropykv.model.geometry import read_loadable
from entropykv.model.identity import parts_of
from entropykv.policy.plan import attention_layers
from entropykv.server.engine.engine import Engine
from entropykv.server.http.errors import RequestError
from entropykv.server.models.catalog import ServedModel
from entropykv.server.models.loading import cache_options, for_thoughts
from entropykv.server.options import ModelOptions
from entropykv.session.images import HELD_BYTES
from entropykv.session.memory_plan import make_plan
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import RAM
from entropykv.settings.options import parse_bytes

_FIXED = 32 << 20
"""Bytes of vocabulary, graph and threads for any model."""
_VALUE = 4
"""Bytes of a value of llama.cpp's intermediate results, which are f32."""
_EMBEDDINGS, _FEED_FORWARDS = 4, 3
"""How many embeddings, and how many rows of a feed-forward layer, llama.cpp's graph holds at a time
for a token, besides its logits.
"""


@dataclass(frozen=True)
class MemoryEstimate:
    """Hold the bytes that a model takes once it is loaded and its budget is full."""

    weights: int
    """The model's files, including all parts of a split one, and its projector's."""
    cache: int
    """The KV budget, checkpoints outside it, and frozen entries in memory.

    Conversations that are swapped out to memory are not included; they are counted separately.
    """
    overhead: int
    """The intermediate values of one micro-batch, embeddings of images, and fixed costs."""

    @property
    def total(self) -> int:
        """Return all bytes of the estimate together."""
        return self.weights + self.cache + self.overhead


def estimate_memory(path: Path, options: ModelOptions) -> MemoryEstimate:
    """Estimate the memory of a model from the header of its file, and from its plan, which
    `entropykv plan` makes, too.

    Raises ModelFileError and UnsupportedModelError for the file, and ProfileError, BudgetError and
    SettingsError for the options.
    """
    geometry = read_loadable(path)
    asked = for_thoughts(cache_options(options), options, path)
    n_ctx = options.n_ctx or geometry.n_ctx_train
    micro_batch = options.n_ubatch if "n_ubatch" in options.model_fields_set else asked.micro_batch
    n_ubatch = min(micro_batch, options.n_batch, n_ctx)
    asked = replace(asked, n_ctx=n_ctx, n_ubatch=n_ubatch).going_back()
    cache = 0
    if attention_layers(geometry):
        plan = make_plan(path, asked)
        cache = plan.budget_bytes + _beside_the_budget(asked, plan.saved_bytes)
    values = geometry.n_vocab + _EMBEDDINGS * geometry.n_embd + _FEED_FORWARDS * geometry.n_ff
    files = parts_of(path) + ([] if options.projector is None else [Path(options.projector)])
    embeddings = 0 if options.projector is None else HELD_BYTES
    return MemoryEstimate(
        weights=sum(file.stat().st_size for file in files if file.is_file()),
        cache=cache,
        overhead=_FIXED + n_ubatch * values * _VALUE + embeddings,
    )


def _beside_the_budget(options: CacheOptions, evicted_bytes: int) -> int:
    """Return the bytes of checkpoints, and of frozen entries in memory; `evicted_bytes`: those of a
    full cache that the budget does not hold, all of which are frozen if no limit is set.
    """
    total = 0
    if options.in_pool:
        limit = options.checkpoint_limit
        total += (parse_bytes(limit) or 0) if isinstance(limit, str) else limit
    if options.freezing is not None and options.freezing.where == RAM:
        limit_bytes = options.freezing.limit_bytes
        total += max(0, evicted_bytes) if limit_bytes is None else limit_bytes
    return total


Result = TypeVar("Result")


class DaemonThreads:
    """Call functions in daemon threads, one for each call; the event loop waits for the results.

    With the executors of asyncio and concurrent.futures, the process could not end before a call
    that takes minutes, such as loading a large model.
    """

    def __init__(self, name: str) -> None:
        """Create no thread yet; `name` is the name of all threads."""
        self._name = name
        self._threads: set[threading.Thread] = set()

    @property
    def are_busy(self) -> bool:
        """Tell whether a call has not returned yet."""
        return any(thread.is_alive() for thread in list(self._threads))

    def join(self) -> None:
        """Wait until all calls have returned."""
        for thread in list(self._threads):
            thread.join()

    async def call(self, function: Callable[[], Result]) -> Result:
        """Call a function in a thread of its own; returns its result, or raises its exception."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            self._threads.discard(thread)
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result, failed = None, None
            try:
                result = function()
            except BaseException as error:  # The waiting task raises it again.
                failed = error
            with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile.
                loop.call_soon_threadsafe(finish, result, failed)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()
        return await done


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
    """Why the latest attempt to load the model failed; None if it did not."""
    estimate: MemoryEstimate | None = None
    """The estimated memory of the loaded model; None if not estimated yet."""
    about: dict[str, Any] | None = None
    """What llama_server_routes.describe() returned after the last loading; None before."""
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
        """Tell whether no request uses the model, and none is about to."""
        return self.users == 0 and (self.waiting == 0 or self.leaves)

    @property
    def is_awaited(self) -> bool:
        """Tell whether a request waits until the model is loaded, or it is to be loaded anyway."""
        return self.waiting > 0 or self.wanted

    def count_bytes(self) -> int:
        """Return the estimated bytes that the model takes, including those swapped out to memory.

        It may wait for a step of the model, so it must not be called in the event loop.
        """
        total = 0 if self.estimate is None else self.estimate.total
        return total + (0 if self.engine is None else self.engine.moment().pool.swapped_bytes)


def failure_of(held: HeldModel, error: Exception) -> RequestError:
    """Return the error for clients after `error` while a model was loaded: a RequestError itself,
    others without paths of this machine; errors of unknown kinds are logged.
    """
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, EntropyKVError):
        _logger.error("the model %s cannot be loaded", held.name, exc_info=error)
    said = _FOLDERS.sub("", str(error))
    return RequestError(
        500, f"the model {held.name!r} cannot be loaded: {said}", code="model_load_failed"
    )


def again(error: RequestError) -> RequestError:
    """Return a new error with the status, the message and the code of another one: raising adds a
    traceback, so that each request needs its own.
    """
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
