"""Run replicas of the server under Ray Serve; each conversation stays with the replica that holds
it.

A conversation is identified by the header X-Session-Id. Ray Serve's ConsistentHashRouter sends it
to the same replica as long as that replica lives. If the replicas change (scaling, a rolling
restart, a crash), another replica continues from the session saved after the last turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware

from entropykv import system
from entropykv.errors import EntropyKVError, MissingExtraError, SettingsError
from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.server.conversations import Conversations
from entropykv.server.turns import TurnMiddleware
from entropykv.server.users import Keys

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
_SECONDS_OF_A_WAIT = 1.0
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@dataclass(frozen=True)
class ReplicaOptions:
    """Hold the number of replicas, and what they share; raises SettingsError."""

    replicas: int = 2
    """How many replicas are started, and kept at least."""
    max_replicas: int | None = None
    """The most replicas when many requests wait; None: always `replicas`."""
    target_ongoing_requests: float = 2.0
    """How many requests a replica has, including waiting ones, before another replica is
    started.
    """
    sessions: str | None = None
    """The directory of saved conversations, which every node must be able to access; None: a
    temporary one.
    """
    sessions_bytes: int = 8 << 30
    """The most bytes of all saved conversations; the least recently used are removed first."""
    num_cpus: float = 1.0
    """How many CPUs Ray reserves for a replica."""

    def __post_init__(self) -> None:
        """Check every number."""
        if self.replicas < 1:
            raise SettingsError(f"{self.replicas} replicas are too few; give 1 or more")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise SettingsError(
                f"at most {self.max_replicas} replicas are fewer than {self.replicas} at first; "
                "raise --max-replicas or lower --replicas"
            )
        for name in ("target_ongoing_requests", "sessions_bytes", "num_cpus"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} is {getattr(self, name)}; give more than 0")


def application(
    model: ModelOptions, server: ServerOptions, options: ReplicaOptions
) -> serve.Application:
    """Return the Ray Serve application, for serve.run(); `options.sessions` must be set."""
    sessions = options.sessions
    if sessions is None:
        raise SettingsError("replicas share a directory of sessions; give its path (sessions)")
    number: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=options.replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests,
        )
        number = {"autoscaling_config": scaling}
    replica = serve.ingress(_builder(model, server, sessions, options.sessions_bytes))()
    router: dict[str, Any] = {
        "request_router_class": _ROUTER,
        "request_router_kwargs": {"num_fallback_replicas": 0},
    }
    deployment: Any = serve.deployment(
        replica,
        name=NAME,
        ray_actor_options={"num_cpus": options.num_cpus},
        # Requests wait in their replica and not in the router: autoscaling counts both equally, and
        # a rejected request would be sent to a replica that does not hold its conversation.
        max_ongoing_requests=1000,
        request_router_config=RequestRouterConfig(**router),
        **number,
    )
    bound: serve.Application = deployment.bind()
    return bound


def _builder(
    model: ModelOptions, server: ServerOptions, sessions: str, sessions_bytes: int
) -> Callable[[], FastAPI]:
    def build() -> FastAPI:
        """Load the model in the replica's process, and return the app."""
        app = create_app(model, server)
        engine = app.state.engine
        several = engine.prefix_cache is not None
        turns = Middleware(
            TurnMiddleware,
            engine=engine,
            conversations=Conversations(sessions, sessions_bytes, several=several),
            replica=serve.get_replica_context().replica_id.unique_id,
        )
        # It is the innermost middleware, so that refused requests do not delay other conversations.
        app.user_middleware.append(turns)
        return app

    return build


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
    http = {name: getattr(server, name) for name in ("host", "port", "ssl_keyfile", "ssl_certfile")}
    with _sessions(options) as shared:
        # Ray reports usage statistics by default.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(include_dashboard=False, log_to_driver=False)
        try:
            with _signals() as next_signal:  # After ray.init(), which sets its own handlers.
                serve.start(http_options=http)
                _deploy(application(model, server, shared))
                while next_signal() == _RESTARTS:
                    _deploy(application(model, server, shared))
                serve.delete(NAME)
        finally:
            ray.shutdown()


def _deploy(app: serve.Application) -> None:
    """Start the replicas, or replace the running ones."""
    try:
        serve.run(app, name=NAME)
    except RuntimeError as error:
        deployments = serve.status().applications[NAME].deployments.values()
        said = "".join(deployment.message for deployment in deployments)
        ours = re.findall(r"^(?:\x1b\[\d+m)*entropykv\.errors\.\w+: (.*)$", said, re.MULTILINE)
        reason = ours[-1] if ours else f"the replicas do not start; Ray says: {error}"
        raise EntropyKVError(reason) from None


@contextlib.contextmanager
def _sessions(options: ReplicaOptions) -> Iterator[ReplicaOptions]:
    if options.sessions is not None:
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="entropykv-sessions-") as directory:
        yield dataclasses.replace(options, sessions=directory)


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Yield a function that waits for the next signal, and returns its number."""
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
