"""Load the models of a server when requests need them, and unload unused ones.

Once requests arrive, only the event loop changes which models are loaded. Loading and freeing take
place in threads, one at a time, while the other models continue to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from entropykv import system
from entropykv.errors import SettingsError
from entropykv.server.dialects.fields import MOST_NAME
from entropykv.server.engine.admission import Admission, Limits
from entropykv.server.engine.engine import Engine, shutting_down
from entropykv.server.http.errors import RequestError
from entropykv.server.models.catalog import ModelCatalog, ServedModel
from entropykv.server.models.held_model import (
    DaemonThreads,
    HeldModel,
    ModelState,
    again,
    estimate_memory,
    failure_of,
    not_loaded,
)
from entropykv.server.models.loading import path_of
from entropykv.server.options import ModelOptions

_logger = logging.getLogger("entropykv.server")
_LEASES = "entropykv.leases"
_MOST_NAMED = 20
"""The most models that an error names."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Room:
    """Hold the most models that may be in memory, and the most bytes of all of them; None: no
    limit.
    """

    models: int | None = None
    memory: int | None = None


class ModelRegistry:
    """Own the models of a server: find them by name, load them for requests, unload idle ones."""

    def __init__(
        self,
        catalog: ModelCatalog,
        open_model: Callable[[ServedModel], Engine],
        describe: Callable[[Engine], dict[str, Any]],
        *,
        room: Room,
        limits: Limits,
        autoload: bool = True,
    ) -> None:
        """Create the registry without loading. `open_model` loads a model, `describe` returns what
        HeldModel.about keeps of it.

        `autoload`: whether a request loads the model that it names.
        """
        self.catalog = catalog
        self.created = int(time.time())
        self.admission = Admission(limits, 0)
        """Limits the bodies of all requests."""
        self.room = room
        self.autoload = autoload
        self._open_model = open_model
        self._describe = describe
        self._held = {model.name: HeldModel(model) for model in catalog.models}
        self._by_alias = {
            alias: self._held[model.name] for model in catalog.models for alias in model.aliases
        }
        self._turn = asyncio.Lock()
        """Held while a model is loaded or unloaded, one at a time."""
        self._changed = asyncio.Event()
        """Set and replaced whenever the state of a model may have changed."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._opened = threading.Lock()
        """Held to decide which thread frees a model that was loaded during the shutdown."""
        self._threads = DaemonThreads("entropykv-load")

    @property
    def has_several(self) -> bool:
        """Tell whether the names in requests select a model, as with llama-server's router."""
        return not self.catalog.any_name

    def all(self) -> list[HeldModel]:
        """Return all models in the order of the catalog."""
        return list(self._held.values())

    def loaded(self) -> list[tuple[HeldModel, Engine]]:
        """Return the models in memory, with their engines."""
        return [(each, each.engine) for each in self._held.values() if each.engine is not None]

    @property
    def is_loading(self) -> bool:
        """Tell whether a thread is loading a model, which cannot be stopped."""
        return self._threads.are_busy

    def find(self, name: str | None) -> HeldModel:
        """Return the model with a name or alias, or the default; a server of one model has it under
        any name. Raises RequestError for a name that is missing (400) or unknown (404).
        """
        if self.catalog.any_name or (name is None and self.catalog.default is not None):
            return self._held[str(self.catalog.default)]
        if name is None:
            raise RequestError(
                400,
                f"model: the request must name one; this server has {self._names()}",
                param="model",
            )
        return self.named(name)

    def named(self, name: str) -> HeldModel:
        """Return the model with exactly this name or alias; raises RequestError (404) if there is
        none.
        """
        held = self._held.get(name) or self._by_alias.get(name)
        if held is None:
            verb = "is" if len(self._held) == 1 else "are"
            raise RequestError(
                404,
                f"there is no model {name[:MOST_NAME]!r} here; {self._names()} {verb}",
                param="model",
                code="model_not_found",
            )
        return held

    def _names(self) -> str:
        names = [repr(name) for name in self._held]
        if len(names) > _MOST_NAMED:
            names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} more (/v1/models)"]
        return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

    def engine_of(self, name: str | None) -> Engine:
        """Return the engine of a model that is in memory; raises RequestError for others.

        It loads nothing, and does not keep the model from being unloaded: it is meant for viewers.
        """
        held = self.find(name)
        if held.engine is None:
            raise not_loaded(held)
        return held.engine

    async def use(self, request: Request, name: str | None) -> Engine:
        """Return the engine of a model, which stays in memory until the response was sent.

        If necessary, the model is loaded; the request waits as long as its client is connected.
        Raises RequestError for an unknown model, one that cannot be loaded or that requests must
        not load, too many waiting requests (429), a timeout (504), or a client that disconnects.
        """
        held = self.find(name)
        stack = until_answered(request)
        if held.engine is None or held.leaves:
            if not self._loads(request):
                raise not_loaded(held)
            await self._wait_until_loaded(held, request, stack)
        else:
            stack.enter_context(self._lease(held))
        if held.engine is None or self._closing:
            raise shutting_down()
        return held.engine

    def _loads(self, request: Request) -> bool:
        asked = request.query_params.get("autoload")
        return self.autoload if asked is None else asked in ("true", "1")

    def keep(self, engine: Engine) -> Callable[[], None]:
        """Keep a model in memory until the returned function is called in the event loop."""
        stack = ExitStack()
        for held, own in self.loaded():
            if own is engine:
                stack.enter_context(self._lease(held))
        return stack.close

    @contextlib.contextmanager
    def _lease(self, held: HeldModel) -> Iterator[None]:
        held.users += 1
        try:
            yield
        finally:
            held.users -= 1
            held.last_used = time.monotonic()
            self._tell()
            self._sleep_later(held)

    async def _wait_until_loaded(self, held: HeldModel, request: Request, stack: ExitStack) -> None:
        self.admission.check_waiting(held.waiting + 1)
        held.waiting += 1
        try:
            await self.admission.in_time(request, self._until_loaded(held, stack))
        finally:
            held.waiting -= 1
            self._tell()

    async def _until_loaded(self, held: HeldModel, stack: ExitStack) -> None:
        """Wait for a model, and count as its user before it can be unloaded again."""
        while held.engine is None or held.leaves:
            if self._closing:
                raise shutting_down()
            # A model that is about to be unloaded is loaded again after that.
            attempt = self._begin_loading(held) if held.engine is None else None
            await self._changed.wait()
            if attempt not in (None, held.opening) and held.failure is not None:
                raise again(held.failure)
        stack.enter_context(self._lease(held))

    def load(self, name: str) -> None:
        """Start loading a model; raises RequestError for one that is already loaded, or unknown."""
        held = self.named(name)
        if held.engine is not None or held.opening is not None:
            raise RequestError(400, f"the model {held.name!r} is already loaded, or loading")
        held.wanted = True
        self._begin_loading(held)

    def load_now(self) -> None:
        """Load the only model of the catalog in this thread, before requests arrive.

        Raises the errors of loading, and SettingsError for a model that takes more than the room
        for models.
        """
        (held,) = self._held.values()
        if self.room.memory is not None:
            held.estimate = estimate_memory(path_of(held.served.options), held.served.options)
            if (refusal := self._too_large(held)) is not None:
                raise SettingsError(str(refusal.detail))
        self._adopt(held, self._open_model(held.served))

    def begin(self) -> None:
        """Load the models for startup, and start the sleep timers; called in the event loop."""
        for held in self._held.values():
            if held.engine is not None:
                self._sleep_later(held)
            elif held.served.load_on_startup:
                held.wanted = True
                self._begin_loading(held)

    def _begin_loading(self, held: HeldModel) -> asyncio.Task[None]:
        if held.opening is None:
            held.state = ModelState.LOADING
            held.failure = None
            held.opening = self._spawn(self._load(held))
        return held.opening

    async def _load(self, held: HeldModel) -> None:
        """Load a model into the room for models; if it fails, record why."""
        try:
            options = await self._threads.call(lambda: _with_path(held.served.options))
            held.estimate = await self._threads.call(
                lambda: estimate_memory(Path(options.model), options)
            )
            if (refusal := self._too_large(held)) is not None:
                raise refusal
            async with self._turn:
                await self._make_room(held)
                if self._closing or not held.is_awaited:
                    return
                served = ServedModel(held.name, options, held.served.aliases)
                self._adopt(held, await self._threads.call(lambda: self._open_for(served)))
        except Exception as error:  # An error of any kind concerns only this model.
            held.failure = failure_of(held, error)
        finally:
            held.opening = None
            held.wanted = False
            if held.engine is None:
                held.state = ModelState.UNLOADED
            self._tell()
            self._sleep_later(held)

    def _open_for(self, served: ServedModel) -> Engine:
        """Load a model, in a thread; it is freed again if the server was closed meanwhile."""
        engine = self._open_model(served)
        with self._opened:
            if self._closing:
                engine.close()
        return engine

    def _adopt(self, held: HeldModel, engine: Engine) -> None:
        held.about = self._describe(engine)
        held.engine, held.state, held.failure = engine, ModelState.LOADED, None
        held.last_used = time.monotonic()
        held.loads += 1

    def _too_large(self, held: HeldModel) -> RequestError | None:
        needed, most = held.estimate, self.room.memory
        if needed is None or most is None or needed.total <= most:
            return None
        return RequestError(
            400,
            f"the model {held.name!r} takes about {_mib(needed.total)} ({_mib(needed.weights)} of "
            f"weights, {_mib(needed.cache)} of KV cache), and the models of this server may take "
            f"{_mib(most)} (--models-memory); raise that, or lower --kv-budget",
            code="model_too_large",
        )

    async def _make_room(self, held: HeldModel) -> None:
        """Unload idle models until another one fits, or nobody waits for that one any more.

        If all are busy, the least recently used one accepts no new requests, so that it becomes
        idle.
        """
        leaving: HeldModel | None = None
        try:
            while not await self._has_room(held):
                if self._closing or not held.is_awaited:
                    return
                there = sorted((each for each, _ in self.loaded()), key=lambda each: each.last_used)
                idle = next((each for each in there if each.is_idle), None)
                if idle is not None:
                    await self._free(idle, ModelState.UNLOADED)
                    continue
                if leaving is None:
                    # A model that was just loaded first answers the requests that waited for it.
                    busy = (each for each in there if each.users and not each.leaves)
                    leaving = next(busy, None)
                    if leaving is not None:
                        leaving.leaves = True
                await self._changed.wait()
        finally:
            if leaving is not None:
                leaving.leaves = False
                self._tell()

    async def _has_room(self, held: HeldModel) -> bool:
        there = [each for each, _ in self.loaded()]
        if self.room.models is not None and len(there) >= self.room.models:
            return False
        if self.room.memory is None or held.estimate is None:
            return True
        taken = await asyncio.to_thread(lambda: sum(each.count_bytes() for each in there))
        return taken + held.estimate.total <= self.room.memory

    def unload(self, name: str) -> None:
        """Unload a model after its requests were answered; raises RequestError if it is not loaded.

        A model that is being loaded is unloaded afterwards.
        """
        held = self.named(name)
        if held.engine is None and held.opening is None:
            raise RequestError(400, f"the model {held.name!r} is not loaded")
        self._spawn(self._unload_when_idle(held))

    async def _unload_when_idle(self, held: HeldModel) -> None:
        if held.opening is not None:
            await asyncio.wait({held.opening})
        engine = held.engine
        held.leaves = engine is not None
        try:
            while engine is not None and held.engine is engine and not self._closing:
                if not held.is_idle:
                    await self._changed.wait()
                    continue
                async with self._turn:
                    if held.engine is engine and held.is_idle:
                        await self._free(held, ModelState.UNLOADED)
        finally:
            held.leaves = False
            self._tell()

    def _sleep_later(self, held: HeldModel) -> None:
        """Check after --sleep-idle-seconds whether the model was idle all the time."""
        seconds = held.served.options.sleep_idle_seconds
        if seconds < 0 or held.engine is None or held.users or self._closing:
            return
        if held.timer is not None:
            held.timer.cancel()
        left = max(0.0, held.last_used + seconds - time.monotonic())
        held.timer = asyncio.get_running_loop().call_later(left, self._sleep_now, held)

    def _sleep_now(self, held: HeldModel) -> None:
        held.timer = None
        self._spawn(self._put_to_sleep(held))

    async def _put_to_sleep(self, held: HeldModel) -> None:
        async with self._turn:
            idle_seconds = time.monotonic() - held.last_used
            if held.is_idle and idle_seconds >= held.served.options.sleep_idle_seconds:
                await self._free(held, ModelState.SLEEPING)
            elif held.timer is None:  # uvloop's timers may fire up to a millisecond early.
                self._sleep_later(held)

    async def _free(self, held: HeldModel, state: ModelState) -> None:
        """Free an idle model with its conversations; `_turn` must be held."""
        engine = held.engine
        if engine is None or self._closing:
            return
        held.engine, held.state = None, state
        await asyncio.to_thread(engine.close)
        del engine  # The model's memory is returned only when nothing refers to the engine.
        await asyncio.to_thread(_give_memory_back)
        self._tell()

    def stop(self) -> None:
        """Refuse waiting and new requests; see Engine.stop()."""
        self._closing = True
        for _, engine in self.loaded():
            engine.stop()
        self._tell()

    def close(self, *, wait: bool = True) -> None:
        """Stop, then free all models; `wait`: also wait for one that is being loaded. Called in a
        thread.
        """
        with self._opened:
            self._closing = True
        for _, engine in self.loaded():
            engine.close()
        if wait:
            self._threads.join()

    def _tell(self) -> None:
        """Wake all tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)  # The event loop keeps no reference to tasks.
        task.add_done_callback(self._tasks.discard)
        return task


def until_answered(request: Request) -> ExitStack:
    """Return the ExitStack whose contexts end once the response to a request was sent."""
    stack: ExitStack = request.scope[_LEASES]
    return stack


class Leases:
    """Keep models in memory until the responses to their requests were sent (ASGI middleware)."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an app whose routes use models."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; its leases end when its response was sent."""
        with ExitStack() as leases:
            scope[_LEASES] = leases
            await self._app(scope, receive, send)


def _with_path(options: ModelOptions) -> ModelOptions:
    """Return the options with the path of the model's file, which is fetched from the hub if
    necessary.
    """
    path = path_of(options)
    return options.model_copy(update={"model": str(path), "hf_repo": None, "hf_file": None})


def _give_memory_back() -> None:
    """Return freed memory to the system, including that of objects in reference cycles."""
    gc.collect()
    trim = system.c_function("malloc_trim")  # Only glibc has malloc_trim().
    if trim is not None:
        trim(0)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
