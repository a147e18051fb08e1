"""Spread an evaluation over the nodes of a Ray cluster.

A task measures one item: with stock llama.cpp, and in every combination whose figures are missing.
The log of results stays with the caller, and rows are summed in the order of the items, so that
figures do not depend on which task ends first. Every node finds the model at the same path.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from entropykv.errors import EntropyKVError, SettingsError
from entropykv.evaluation.combination import Combination, EngineSettings
from entropykv.evaluation.reading import EvalPart, Item, Tick
from entropykv.evaluation.request import EvalRequest
from entropykv.evaluation.results import Record, ResultLog
from entropykv.evaluation.runs import Evaluation
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.stock import StockSession
from entropykv.session.session import Session

MOST_TRIES = 4
"""How often an item is measured at most when the workers that measure it die."""
_MOST_TASKS = 256
"""Tasks that wait or run at a time; the next one is submitted when one ends."""
_POLL_SECONDS = 0.2
"""How long to wait for a task before Ctrl-C is noticed."""


@dataclass(frozen=True)
class ClusterJob:
    """Hold what every task of an evaluation has in common."""

    request: EvalRequest
    """The request that EvalRequest.with_prompt() returned."""
    engine: EngineSettings
    combinations: Sequence[Combination]
    identity: Mapping[str, object]
    """Model.identity of the model that the evaluation is about."""

    def measure(self, number: int, digest: str, known: Sequence[Record]) -> list[Record]:
        """Measure one item of part `number` on this machine; returns what is not `known`.

        Raises SettingsError if the model at the same path is another one here.
        """
        with ExitStack() as stack:
            with closing(Model(self.engine.model, n_gpu_layers=0, verbose=False)) as model:
                if dict(model.identity) != dict(self.identity):
                    raise SettingsError(
                        f"{self.engine.model}: a node of the cluster has another model at this "
                        "path; put the same file there on every node"
                    )
                part = self.request.parts(model, stack)[number]
            item = next(item for item in part.items if item.digest == digest)
            log = ResultLog(None, {}, {}, known)
            evaluation = Evaluation(self.engine, self.combinations, [_OneItem(part, item)], log)
            for _ in evaluation.run(_ignore):
                pass
            before = {record.key for record in known}
            return [record for record in evaluation.records() if record.key not in before]


class _OneItem:
    """A part of an evaluation that measures only one of its items, as the whole part would."""

    def __init__(self, part: EvalPart, item: Item) -> None:
        self._part = part
        self.name = part.name
        self.n_ctx = part.n_ctx
        self.needs_reference = part.needs_reference
        self.items: Sequence[Item] = (item,)

    def reference(self, stock: StockSession, item: Any, tick: Tick) -> dict[str, Any]:
        """Measure the item with stock llama.cpp."""
        return self._part.reference(stock, item, tick)

    def measure(self, session: Session, item: Any, tick: Tick) -> dict[str, Any]:
        """Measure the item with a session."""
        return self._part.measure(session, item, tick)


def with_fixed_threads(engine: EngineSettings) -> EngineSettings:
    """Return the settings with the number of threads of this machine, so that all nodes use as
    many.
    """
    threads = engine.options.threads
    return dataclasses.replace(
        engine, options=dataclasses.replace(engine.options, n_threads=threads)
    )


def measure_on_cluster(
    address: str, job: ClusterJob, parts: Sequence[EvalPart], log: ResultLog, tick: Tick
) -> None:
    """Measure everything that the log lacks on the cluster at `address`, and add it to the log.

    `parts` are those of job.request. `tick` is called with 0 while tasks run, and may raise to
    stop; running tasks are then cancelled, and what they measured is lost. Raises SettingsError if
    Ray is missing, the cluster cannot be reached, no node has enough CPUs, or a policy learns from
    earlier items; EntropyKVError if workers die MOST_TRIES times at one item; and the errors of the
    evaluation.
    """
    _check_order(job, parts)
    with _connected(address) as ray:
        threads = job.engine.options.threads
        _check_cpus(ray, threads)
        shared = ray.put(job)
        task = ray.remote(num_cpus=threads, max_retries=MOST_TRIES - 1)(ClusterJob.measure)
        waiting = _missing(job, parts, log)
        running: dict[Any, tuple[EvalPart, Item]] = {}
        try:
            while True:
                while len(running) < _MOST_TASKS and (work := next(waiting, None)):
                    number, item, known = work
                    reference = task.remote(shared, number, item.digest, known)
                    running[reference] = (parts[number], item)
                if not running:
                    return
                ended, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
                tick(0)
                for reference in ended:
                    part, item = running.pop(reference)
                    records = _result(ray, reference, item)
                    for record in records:
                        log.add(record.contestant, part.name, item, record.values)
                    tick(len(records) * item.n_steps)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


def _missing(
    job: ClusterJob, parts: Sequence[EvalPart], log: ResultLog
) -> Iterator[tuple[int, Item, list[Record]]]:
    """Yield the items that lack figures: the number of the part, the item, and what is known."""
    for number, part in enumerate(parts):
        for item in part.items:
            evaluation = Evaluation(job.engine, job.combinations, [_OneItem(part, item)], log)
            if evaluation.n_steps:
                yield number, item, evaluation.records()


def _result(ray: Any, reference: Any, item: Item) -> list[Record]:
    try:
        records: list[Record] = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, EntropyKVError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise EntropyKVError(
            f"{item.name}: {MOST_TRIES} workers of the cluster died while they measured it "
            f"({type(error).__name__}); look at Ray's logs, or use nodes with more memory"
        ) from None
    return records


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connect to a cluster, or start one on this machine for `local`; disconnect at the end."""
    try:
        import ray  # noqa: PLC0415
    except ImportError:
        raise SettingsError(
            '--ray needs Ray: pip install "entropykv[ray]", or leave --ray out'
        ) from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingsError(
            f"--ray {address}: no cluster answers ({reason}); start one by `ray start --head`, or "
            "use `local`"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_order(job: ClusterJob, parts: Sequence[EvalPart]) -> None:
    """Refuse policies whose figures depend on the items that the same session read before."""
    for combination in job.combinations:
        with combination.session(job.engine, parts[0].n_ctx, parts[0].n_ctx) as session:
            if session.predictor_fit is not None:
                raise SettingsError(
                    f"policy {session.policy} learns from the texts that a session reads first, so "
                    "that figures depend on their order, and --ray has none; run `entropykv "
                    "calibrate` first, use another --policy, or leave --ray out"
                )


def _check_cpus(ray: Any, threads: int) -> None:
    most = max(
        (node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0
    )
    if most < threads:
        raise SettingsError(
            f"no node of the cluster has the {threads} CPUs that a task uses; lower --threads to "
            f"{int(most)} or fewer, which is also a setting of the figures"
        )


def _ignore(n_tokens: int) -> None:
    """Do not report progress: a task is seen when it ends."""
