"""Run replicas of the server under Ray Serve; each conversation stays with the replica that holds
it.

A front (front.py) receives the requests, and its router (affinity.py) sends each to the replica
that has read the beginning of its text. A conversation may also be named by the header
X-Session-Id: the same replica then answers all its turns as long as that replica lives. If the
replicas change (scaling, a rolling restart, a crash), another replica continues from the session
saved after the last turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp

from entropykv import system
from entropykv.errors import EntropyKVError, MissingExtraError, SettingsError
from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.server.engine.admission import Limits
from entropykv.server.engine.turns import Conversations, TurnMiddleware
from entropykv.server.http.access import Keys
from entropykv.server.http.app import limits_of
from entropykv.server.replicas.affinity import Affinity
from entropykv.server.replicas.front import answer_whole, front_app
from entropykv.server.replicas.shared_documents import check_shared, marked
from entropykv.session.object_storage import is_address

ROUTER = "entropykv.server.replicas.affinity_router.AffinityRouter"
"""The path by which Ray Serve imports the router; its module needs Ray."""

try:
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f'replicas need {error.name}, which is not installed; run pip install "entropykv[ray]"'
    ) from None

NAME = "entropykv"
_RESTARTS: int | None = getattr(signal, "SIGHUP", None)
"""The signal that restarts the replicas; Windows has none."""
_logger = logging.getLogger(__name__)
_SECONDS_OF_A_WAIT = 1.0
_SECONDS_OF_A_LOOK = 0.2
"""How many seconds pass between two looks whether the replicas have ended."""
_REPLICA = "replica"
"""The name of the deployment that has the models."""
_LEAST_SLACK = 2
"""How many requests more than the least loaded replica one may have because it holds a text."""
_HEAD_NODE = "node:__internal_head__"
"""The resource that only the head node of a Ray cluster has."""
_VIEWER_SECONDS = 8
"""After how many seconds a viewer of the cache has to ask again. Ray Serve kills a replica that has
requests 20 seconds after it was told to stop, and tells it nothing before its last request ends.
"""
_MOST_ONGOING = 1000
"""The most requests of a replica, waiting ones included."""
_LOOK_BACK_SECONDS = 15.0
"""Over how many seconds Ray Serve takes the mean of the requests. It gets a figure every 10 s, and
needs more time than that.
"""
_ANSWER_SECONDS = 600
"""How many seconds a replica that is no longer needed may take to finish its answers, if requests
have no limit of their own. Ray Serve's default of 20 would break off a slow answer.
"""
_ENDING_SECONDS = 20
"""How many seconds replicas may take to end, after the seconds that running requests have
(drain_seconds).
"""


@dataclass(frozen=True)
class ReplicaOptions:
    """Hold the number of replicas, and what they share."""

    replicas: int = 2
    """How many replicas are started, and kept at least."""
    max_replicas: int | None = None
    """The most replicas when many requests wait; None: always `replicas`."""
    target_ongoing_requests: float | None = None
    """How many requests a replica has, including waiting ones, before another replica is started;
    None: 2, or as many as it answers at a time if these are more.
    """
    scale_up_seconds: float = 10.0
    """For how many seconds there must be more requests than target_ongoing_requests before a
    replica is started.
    """
    scale_down_seconds: float = 600.0
    """For how many seconds fewer replicas must be enough before one is removed."""
    sessions: str | None = None
    """The directory of saved conversations, which every node must be able to access; None: a
    temporary one.
    """
    sessions_bytes: int = 8 << 30
    """The most bytes of all saved conversations; the least recently used are removed first."""
    num_cpus: float = 1.0
    """How many CPUs Ray reserves for a replica."""

    def __post_init__(self) -> None:
        """Raise SettingsError for an impossible number."""
        if self.replicas < 1:
            raise SettingsError(f"{self.replicas} replicas are too few; give 1 or more")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise SettingsError(
                f"at most {self.max_replicas} replicas are fewer than {self.replicas} at first; "
                "raise --max-replicas or lower --replicas"
            )
        for name in ("target_ongoing_requests", "sessions_bytes", "num_cpus"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise SettingsError(f"{name} is {value}; give more than 0")
        for name in ("scale_up_seconds", "scale_down_seconds"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} is {getattr(self, name)}; give 0 or more")


def application(
    model: ModelOptions, server: ServerOptions, options: ReplicaOptions, mark: str | None = None
) -> serve.Application:
    """Return the Ray Serve application; raises SettingsError unless `options.sessions` is set.

    `mark`: the name that shared_documents.marked() gave; replicas that do not see it where
    documents are kept end with a SettingsError.
    """
    sessions = options.sessions
    if sessions is None:
        raise SettingsError("replicas share a directory of sessions; give its path (sessions)")
    # Ray kills replicas that have not ended within this time.
    seconds_to_end = max(
        server.request_seconds or _ANSWER_SECONDS, server.drain_seconds + _ENDING_SECONDS
    )
    at_a_time = max(_LEAST_SLACK, model.parallel or 1)
    number: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=options.replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests or at_a_time,
            look_back_period_s=_LOOK_BACK_SECONDS,
            upscale_delay_s=options.scale_up_seconds,
            downscale_delay_s=options.scale_down_seconds,
        )
        number = {"autoscaling_config": scaling}
    router: dict[str, Any] = {
        "request_router_class": ROUTER,
        "request_router_kwargs": {"slack": at_a_time},
    }
    replicas: Any = serve.deployment(
        Replica,
        name=_REPLICA,
        ray_actor_options={"num_cpus": options.num_cpus},
        # Requests wait in their replica and not in the router: autoscaling counts both equally, and
        # a rejected request would be sent to a replica that does not hold its conversation.
        max_ongoing_requests=_MOST_ONGOING,
        graceful_shutdown_timeout_s=seconds_to_end,
        request_router_config=RequestRouterConfig(**router),
        **number,
    )
    front: Any = serve.deployment(
        serve.ingress(_front_builder(limits_of(model, server)))(),
        name=NAME,
        # The front computes nothing. There is one, because its router counts the requests of
        # replicas. It lives on the head node as Ray Serve's proxy does, so that no other node's
        # death stops it.
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD_NODE: 0.001}},
        graceful_shutdown_timeout_s=seconds_to_end,
        max_ongoing_requests=_MOST_ONGOING * (options.max_replicas or options.replicas),
    )
    bound: serve.Application = front.bind(
        replicas.bind(model, server, sessions, options.sessions_bytes, mark)
    )
    return bound


def _front_builder(limits: Limits) -> Callable[[], ASGIApp]:
    def build() -> ASGIApp:
        """Return the app of the front, in its process."""
        handle: Any = serve.get_deployment_handle(_REPLICA, NAME)

        def answer(*request: object) -> Any:
            return handle.options(stream=True).answer.remote(*request)

        return front_app(answer, ray.exceptions.RayActorError, limits)

    return build


class Replica:
    """Hold the model in a process of its own, and answer requests that the front passes on."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it.
        self,
        model: ModelOptions,
        server: ServerOptions,
        sessions: str,
        sessions_bytes: int,
        mark: str | None,
    ) -> None:
        """Load the model, and begin the app's lifespan, after check_shared() with `mark`.

        `sessions`, `sessions_bytes`: as in ReplicaOptions. `mark`: as in application().
        """
        if server.documents is not None and mark is not None:
            check_shared(server.documents, mark)
        app = create_app(model, server, viewer_seconds=_VIEWER_SECONDS)
        engine = app.state.engine
        turns = Middleware(
            TurnMiddleware,
            engine=engine,
            conversations=Conversations(sessions, sessions_bytes, engine.prefix_cache),
            replica=serve.get_replica_context().replica_id.unique_id,
        )
        # This is the innermost middleware, so that refused requests do not delay other
        # conversations.
        app.user_middleware.append(turns)
        self._app = app
        self._lifespan = app.router.lifespan_context(app)
        await self._lifespan.__aenter__()

    async def __del__(self) -> None:
        """End the app's lifespan; Ray Serve awaits this when it stops the replica."""
        if hasattr(self, "_lifespan"):
            await self._lifespan.__aexit__(None, None, None)

    async def stop(self) -> None:
        """Refuse waiting and new requests, and give running ones the server's `drain_seconds`."""
        self._app.state.models.stop()

    async def answer(
        self, scope: dict[str, Any], body: bytes, _affinity: Affinity
    ) -> AsyncIterator[dict[str, Any]]:
        """Answer a request; yields ASGI messages."""
        async with contextlib.aclosing(answer_whole(self._app, scope, body)) as messages:
            async for message in messages:
                yield message


def run_replicas(model: ModelOptions, server: ServerOptions, options: ReplicaOptions) -> None:
    """Serve until SIGINT or SIGTERM; SIGHUP, which Windows lacks, restarts the replicas, a few
    at a time.

    Uses a running Ray cluster, or else starts one on this machine, and ends it again. Raises
    EntropyKVError if the replicas cannot be started.
    """
    if server.port == 0:
        raise SettingsError("replicas need a port of their own; give --port")
    if server.api_key_file is not None:
        Keys.of(server)  # Otherwise, an error in the keys would only appear in Ray's log.
        server = server.model_copy(update={"api_key_file": os.path.abspath(server.api_key_file)})
    if server.documents is not None and not is_address(server.documents):
        server = server.model_copy(update={"documents": os.path.abspath(server.documents)})
    http = {name: getattr(server, name) for name in ("host", "port", "ssl_keyfile", "ssl_certfile")}
    with _sessions(options) as shared, _mark_of(server) as mark:
        # Ray reports usage statistics by default.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(include_dashboard=False, log_to_driver=False)
        try:
            with _signals() as next_signal:  # After ray.init(), which sets its own handlers.
                _start(http)
                _deploy(application(model, server, shared, mark))
                while next_signal() == _RESTARTS:
                    _deploy(application(model, server, shared, mark))
                _end(server.drain_seconds)
        finally:
            ray.shutdown()


def _start(http: dict[str, Any]) -> None:
    """Start Ray Serve and its proxy; raises EntropyKVError if the proxy cannot be started."""
    try:
        try:
            serve.start(http_options=http)
        except TimeoutError:
            # Ray waits for a minute, which a busy machine may exceed. This call finds the running
            # controller and returns, and serve.run() waits for the proxy once more.
            serve.start(http_options=http)
    except (TimeoutError, ray.exceptions.RayActorError) as error:
        raise _no_proxy(error) from None


def _no_proxy(error: Exception) -> EntropyKVError:
    return EntropyKVError(
        "Ray Serve's proxy does not start: the machine is too busy, or its ports are taken "
        f"({type(error).__name__}); try again, or look at Ray's logs"
    )


def _deploy(app: serve.Application) -> None:
    """Start the replicas, or replace the running ones."""
    try:
        serve.run(app, name=NAME)
    except TimeoutError as error:
        raise _no_proxy(error) from None
    except RuntimeError as error:
        deployments = serve.status().applications[NAME].deployments.values()
        said = "".join(deployment.message for deployment in deployments)
        ours = re.findall(r"^(?:\x1b\[\d+m)*entropykv\.errors\.\w+: (.*)$", said, re.MULTILINE)
        reason = ours[-1] if ours else f"the replicas do not start; Ray says: {error}"
        raise EntropyKVError(reason) from None


def _end(drain_seconds: float) -> None:
    """End the replicas: running requests have `drain_seconds`, as they have at a single server.

    Ray itself would wait for the last request, and tell the replicas nothing before.
    """
    end = time.monotonic() + drain_seconds + _ENDING_SECONDS
    replicas: Any = serve.get_deployment_handle(_REPLICA, NAME)
    try:
        replicas.broadcast("stop").results(timeout_s=_ENDING_SECONDS)
    except (ray.exceptions.RayError, serve.exceptions.RayServeException, TimeoutError):
        _logger.warning("a replica did not say that it stops; Ray ends it")
    serve.delete(NAME, _blocking=False)
    while NAME in serve.status().applications and time.monotonic() < end:
        time.sleep(_SECONDS_OF_A_LOOK)


@contextlib.contextmanager
def _mark_of(server: ServerOptions) -> Iterator[str | None]:
    if server.documents is None:
        yield None
        return
    with marked(server.documents) as mark:
        yield mark


@contextlib.contextmanager
def _sessions(options: ReplicaOptions) -> Iterator[ReplicaOptions]:
    if options.sessions is not None:
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="entropykv-sessions-") as directory:
        yield dataclasses.replace(options, sessions=directory)


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Catch SIGINT, the signals that end a process and that of a restart inside the `with` block;
    yields a function that waits for the next of them and returns its number.
    """
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    numbers = [*system.ending_signals(), signal.SIGINT]
    if _RESTARTS is not None:
        numbers.append(_RESTARTS)

    def next_signal() -> int:
        while True:
            with contextlib.suppress(
                queue.Empty
            ):  # Windows calls handlers after a wait, not in it.
                return received.get(timeout=_SECONDS_OF_A_WAIT)

    before = [signal.signal(number, lambda got, _: received.put(got)) for number in numbers]
    try:
        yield next_signal
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
