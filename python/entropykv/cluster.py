"""Run tasks on the machines of a Ray cluster, and receive their results on this one.

A task may run on any node, so that every file that it opens must be at the same path on all nodes.
What the tasks need in common is sent to a node once. A task whose worker dies runs again on another
one, MOST_TRIES times in all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from entropykv.errors import EntropyKVError, SettingsError

MOST_TRIES = 4
"""How often a task runs at most when the workers that run it die."""
_MOST_TASKS = 256
"""Tasks that wait or run at a time; the next one is submitted when one ends."""
_POLL_SECONDS = 0.2
"""How long to wait for a task before Ctrl-C is noticed."""

RAY_HELP = "auto, local, HOST:PORT or ray://HOST:PORT (extra ray)"
"""The addresses that --ray takes, for the help of commands."""

Shared = TypeVar("Shared")
Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TaskKind(Generic[Shared, Work, Result]):
    """Describe the tasks of one Cluster.run(): what each does, and the data that they share."""

    function: Callable[[Shared, Work], Result]
    """Runs on a node; arguments and result are pickled, and so are its EntropyKVErrors."""
    shared: Shared
    name: Callable[[Work], str]
    """Names a task for error messages."""
    threads: int
    """The CPUs that Ray reserves for a task."""


class Cluster:
    """Hold a connection to a Ray cluster; connected() opens it."""

    def __init__(self, ray: Any, tick: Callable[[], object]) -> None:
        """Use the package `ray`, which is connected.

        `tick` is called several times a second while tasks run, and may raise to stop. Leaving
        connected() then ends the running tasks, whose results are lost. They are not cancelled one
        by one: Ray 2.60 aborts the process if a task ends while ray.cancel(force=True) runs.
        """
        self._ray = ray
        self._tick = tick

    def run(
        self,
        kind: TaskKind[Shared, Work, Result],
        work: Iterable[Work],
        receive: Callable[[Work, Result], object],
    ) -> None:
        """Run a task for every element of `work`, which is read as tasks are submitted.

        `receive` gets every result as soon as its task ends, in any order. Raises SettingsError if
        no node has enough CPUs, EntropyKVError if the workers of a task die MOST_TRIES times, the
        EntropyKVErrors of tasks, and Ray's RayTaskError for their other errors.
        """
        self._check_cpus(kind.threads)
        shared = self._ray.put(kind.shared)
        retries = MOST_TRIES - 1
        task = self._ray.remote(num_cpus=kind.threads, max_retries=retries)(kind.function)
        waiting = iter(work)
        running: dict[Any, Work] = {}
        while True:
            while len(running) < _MOST_TASKS:
                try:
                    each = next(waiting)
                except StopIteration:
                    break
                running[task.remote(shared, each)] = each
            if not running:
                return
            ended, _ = self._ray.wait(list(running), timeout=_POLL_SECONDS)
            self._tick()
            for reference in ended:
                each = running.pop(reference)
                receive(each, self._result(reference, kind.name(each)))

    def _result(self, reference: Any, name: str) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EntropyKVError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:
            raise EntropyKVError(
                f"{name}: {MOST_TRIES} workers of the cluster died at it "
                f"({type(error).__name__}); look at Ray's logs, or use nodes with more memory"
            ) from None

    def _check_cpus(self, threads: int) -> None:
        most = max(
            (node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]),
            default=0,
        )
        if most < threads:
            raise SettingsError(
                f"no node of the cluster has the {threads} CPUs that a task uses; lower --threads "
                f"to {int(most)} or fewer"
            )


@contextmanager
def connected(address: str, tick: Callable[[], object]) -> Iterator[Cluster]:
    """Connect to a cluster, or start one on this machine for `local`; disconnect at the end.

    `tick`: see Cluster. Raises SettingsError if Ray is missing or no cluster answers.
    """
    try:
        import ray  # noqa: PLC0415
    except ImportError:
        raise SettingsError(
            '--ray needs Ray: pip install "entropykv[ray]", or leave --ray out'
        ) from None
    # Ray prints notes about nodes that died to stdout, which is the output of commands.
    worker = ray._private.worker  # noqa: SLF001
    prints, worker._worker_logs_enabled = worker._worker_logs_enabled, False  # noqa: SLF001
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingsError(
            f"--ray {address}: no cluster answers ({reason}); start one by `ray start --head`, or "
            "use `local`"
        ) from None
    try:
        yield Cluster(ray, tick)
    finally:
        ray.shutdown()
        worker._worker_logs_enabled = prints  # noqa: SLF001
