"""Spread an evaluation over the nodes of a Ray cluster.

A task measures one item: with stock llama.cpp, and in every combination whose figures are missing.
The log of results stays with the caller, and rows are summed in the order of the items, so that
figures do not depend on which task ends first. Every node finds the model at the same path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from entropykv.cluster import TaskKind, connected
from entropykv.errors import SettingsError
from entropykv.evaluation.combination import Combination, EngineSettings
from entropykv.evaluation.reading import EvalPart, Tick
from entropykv.evaluation.request import EvalRequest
from entropykv.evaluation.results import Record, ResultLog
from entropykv.evaluation.runs import Evaluation
from entropykv.llamacpp.model import Model


@dataclass(frozen=True)
class _Work:
    """Name an item that lacks figures."""

    part: int
    """The number of the evaluation's part with the item, from 0."""
    digest: str
    known: Sequence[Record]
    """The records of the item that are in the log already."""


@dataclass(frozen=True)
class ClusterJob:
    """Hold what every task of an evaluation has in common."""

    request: EvalRequest
    """The request that EvalRequest.with_prompt() returned."""
    engine: EngineSettings
    combinations: Sequence[Combination]
    identity: Mapping[str, object]
    """Model.identity of the model that the evaluation is about."""

    def measure(self, work: _Work) -> list[Record]:
        """Measure one item on this machine; returns the records that `work.known` lacks.

        Raises SettingsError if the model at the same path is another one here.
        """
        with ExitStack() as stack:
            with closing(Model(self.engine.model, n_gpu_layers=0, verbose=False)) as model:
                if dict(model.identity) != dict(self.identity):
                    raise SettingsError(
                        f"{self.engine.model}: a node of the cluster has another model at this "
                        "path; put the same file there on every node"
                    )
                part = self.request.parts(model, stack)[work.part]
            item = next(item for item in part.items if item.digest == work.digest)
            log = ResultLog(None, {}, {}, work.known)
            evaluation = Evaluation(self.engine, self.combinations, [part.with_only(item)], log)
            # The caller counts progress when a task ends.
            for _ in evaluation.run(lambda _: None):
                pass
            before = {record.key for record in work.known}
            return [record for record in evaluation.records() if record.key not in before]


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

    `parts` are those of job.request. `tick` is called with the steps of an item when its task ends,
    and with 0 while tasks run. It may raise to stop; running tasks then end with the connection,
    and what they measured is lost. Raises SettingsError if Ray is missing, the cluster cannot be
    reached, no node has enough CPUs, or a policy learns from earlier items; EntropyKVError if
    workers die MOST_TRIES times at one item; and the errors of the evaluation.
    """
    _check_order(job, parts)
    items = [{item.digest: item for item in part.items} for part in parts]

    def receive(work: _Work, records: Sequence[Record]) -> None:
        item = items[work.part][work.digest]
        for record in records:
            log.add(record.contestant, parts[work.part].name, item, record.values)
        tick(len(records) * item.n_steps)

    kind = TaskKind(
        ClusterJob.measure,
        job,
        lambda work: items[work.part][work.digest].name,
        job.engine.options.threads,
    )
    with connected(address, lambda: tick(0)) as cluster:
        cluster.run(kind, _missing(job, parts, log), receive)


def _missing(job: ClusterJob, parts: Sequence[EvalPart], log: ResultLog) -> Iterator[_Work]:
    """Yield the items for which the log lacks figures."""
    for number, part in enumerate(parts):
        for item in part.items:
            evaluation = Evaluation(job.engine, job.combinations, [part.with_only(item)], log)
            if evaluation.n_steps:
                yield _Work(number, item.digest, evaluation.records())


def _check_order(job: ClusterJob, parts: Sequence[EvalPart]) -> None:
    """Raise SettingsError for policies whose figures depend on the items that the same session read
    before.
    """
    for combination in job.combinations:
        with combination.session(job.engine, parts[0].n_ctx, parts[0].n_ctx) as session:
            if session.cache.predictor_fit is not None:
                raise SettingsError(
                    f"policy {session.config.policy} learns from the texts that a session reads "
                    "first, so that figures depend on their order, and --ray has none; run "
                    "`entropykv calibrate` first, use another --policy, or leave --ray out"
                )
