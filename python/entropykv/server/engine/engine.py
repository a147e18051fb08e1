"""Run the worker threads that use the model, one per lane, and add up their figures."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from starlette.concurrency import run_in_threadpool

from entropykv.errors import EntropyKVError
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.reader import DocumentReader
from entropykv.server.engine.admission import Admission, Limits, too_late
from entropykv.server.engine.answering import COUNTS, Answering, AnswerLane, AskedDocument, Totals
from entropykv.server.engine.prefix_cache import PrefixCache
from entropykv.server.http.access import SOMEBODY, Caller
from entropykv.server.http.errors import RequestError, as_request_error, without_frames
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.session.memory_plan import describe_budget
from entropykv.session.pool import Pool, PoolStats
from entropykv.session.stats import SessionStats


@dataclass(frozen=True)
class Moment:
    """Hold the figures of a pool and of its conversations, taken between two steps."""

    pool: PoolStats
    conversations: list[tuple[Caller, SessionStats, bool]]
    """For each kept conversation: its caller, its figures, and whether it holds entries of the
    pool.
    """


def figures_of_pool(pool: Pool, one: SessionStats, totals: Sequence[Totals]) -> SessionStats:
    """Return the sum over all conversations as SessionStats.

    `one`: the figures of any session, which have the settings; `totals`: those of every lane. The
    figures of a full cache count only conversations that hold entries now.
    """
    with pool.runner.scheduler.between_steps():
        now, counters = pool.stats(), pool.runner.counters()
        n_tokens = sum(each.position for each in pool.sessions() if each.cache.is_live)
    return dataclasses.replace(
        one,
        kv_bytes_full=n_tokens * pool.runner.factory.facts.bytes_full_per_token,
        entries_full=n_tokens * pool.runner.factory.facts.n_kv_heads,
        kv_bytes_budget=now.kv_bytes_budget,
        kv_bytes_now=now.kv_bytes_now,
        kv_bytes_peak=now.kv_bytes_peak,
        kv_bytes_staging=now.kv_bytes_staging,
        kv_bytes_scratch=now.kv_bytes_scratch,
        entries_kept=now.entries_kept,
        evictions=now.evictions,
        **counters,
        climbs=dict(sum((each.climbs for each in totals), Counter())),
        **{name: sum(getattr(each, name) for each in totals) for name in COUNTS},
    )


_STATS_INTERVAL = 0.25
"""Seconds between two updates of the figures during a generation."""
_CHECK_INTERVAL = 0.05
"""Seconds between two checks whether a stopped job has ended."""
Result = TypeVar("Result")
Outcome = Literal["finished", "refused", "failed", "stopped"]


class _StoppedError(Exception):
    """Raised when a generation was told to stop, between two steps."""


@dataclass(eq=False)
class Job:
    """Hold one choice of a request, which waits or runs; see Engine.run_job() for `call`, `emit`
    and `note`.
    """

    call: Callable[[Answering], Any]
    emit: Callable[[Any], None] | None
    note: Callable[[int, int], None] | None
    caller: Caller = SOMEBODY
    document: AskedDocument | None = None
    """The document that the job asks about."""
    arrival: float = field(default_factory=time.monotonic)
    first: float | None = None
    """When the job's first chunk was ready, by time.monotonic(); None before that."""
    stop: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise _StoppedError if the request was told to stop."""
        if self.stop.is_set():
            raise _StoppedError

    def run(self, answering: Answering) -> Any:
        """Return the result of the call; with `emit`, pass on each item of it, and return None."""
        result = self.call(answering)
        if self.emit is None:
            return result
        try:
            for chunk in result:
                if self.first is None:
                    self.first = time.monotonic()
                self.emit(chunk)
                self.check()
        finally:
            if hasattr(result, "close"):  # close() gives the conversation back.
                result.close()
        return None


class Engine:
    """Own a model and the threads that answer requests; a request waits until a thread is free.

    As many choices are answered at a time as the model's pool holds sequences; one sequence less if
    documents are read.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        interrupt: bool = False,
        limits: Limits | None = None,
        shared_prefixes: bool = True,
        documents: DocumentLibrary | None = None,
    ) -> None:
        """Use a loaded model; with `interrupt`, a new request ends the streams of the same user.

        `shared_prefixes`: whether conversations with the same key may reuse each other's prefixes;
        the model gets this setting, too. `documents`: where documents are kept; they are read as
        one of the pool's sequences.
        """
        self.model = model
        """The model, for callers that only use its vocabulary."""
        self.limits = limits or Limits()
        self.outcomes: dict[Outcome, int] = dict.fromkeys(get_args(Outcome), 0)
        self.first_chunks = 0
        """How many streams have sent their first chunk."""
        self.first_chunk_seconds = 0.0
        """The sum of the seconds from the arrival of those streams to their first chunk."""
        self.pool = model.pool
        self.prefix_cache = PrefixCache(
            model.pool, self.limits.conversations, shared_prefixes=shared_prefixes
        )
        """Keeps conversations between two requests."""
        model.shared_prefixes = shared_prefixes
        n_lanes = model.pool.runner.n_sequences - (0 if documents is None else 1)
        self.lanes = [AnswerLane(number) for number in range(n_lanes)]
        """The places in which requests are answered at the same time, one thread each."""
        self.running: dict[AnswerLane, Answering] = {}
        """What is being answered, for each lane that is busy."""
        self._jobs: dict[AnswerLane, Job] = {}
        self._running_lock = threading.Lock()
        """Held while `running` and `_jobs` change and while a job is stopped, so that the next job
        is not stopped instead.
        """
        self.admission = Admission(self.limits, len(self.lanes))
        """Limits what requests may cost."""
        self._moment: tuple[float, Moment] | None = None
        """The latest figures that were requested, and when they were taken."""
        self._moment_lock = threading.Lock()
        self._free_lanes: queue.SimpleQueue[AnswerLane] = queue.SimpleQueue()
        for lane in self.lanes:
            self._free_lanes.put(lane)
        self._interrupt = interrupt
        self._closing = False
        self._stopped_at = 0.0
        self._before_close: list[Callable[[LoadedModel], object]] = []
        self._looked_at = 0.0
        self._thread = ThreadPoolExecutor(len(self.lanes), thread_name_prefix="entropykv")
        self.stats: SessionStats = self._figures()
        """The figures after the last job, or about every quarter of a second between two steps."""
        self.documents: DocumentReader | None = None
        """Reads documents in the background, if the server keeps any."""
        if documents is not None:
            reader = DocumentReader(model, documents)
            self.documents = reader
            self.before_close(lambda _: reader.close())

    def describe(self) -> str:
        """Return in a few words what the budget means for the model."""
        documents = self.documents is not None
        config = self.pool.runner.config
        return describe_budget(config, self.stats.kv_bytes_budget, documents=documents)

    @property
    def waiting(self) -> int:
        """Return how many jobs wait or run."""
        return self.admission.jobs

    async def run_job(
        self,
        call: Callable[[Answering], Any],
        emit: Callable[[Any], None] | None = None,
        note: Callable[[int, int], None] | None = None,
        caller: Caller = SOMEBODY,
    ) -> Any:
        """Run a request's call when a worker is free; cancelling stops it within a micro-batch.

        With `emit`, the call returns an iterator, whose items are passed to `emit` in a worker
        thread. `note` is called at the end with the numbers of tokens read and written. `caller` is
        who sent the request. Raises RequestError for any error; the next request starts from a
        clean state.
        """
        (result,) = await self.run_jobs([Job(call, emit, note, caller)])
        return result

    async def run_jobs(self, jobs: Sequence[Job]) -> list[Any]:
        """Run the jobs of one request, at the same time as far as workers are free; see run_job().

        If one of them fails, the others are stopped.
        """
        if self._closing:
            raise shutting_down()
        with self.admission.jobs_of(len(jobs)):
            if self._interrupt:
                users = {job.caller.user for job in jobs}
                streams = [job for job in list(self._jobs.values()) if job.emit is not None]
                self._stop(job for job in streams if job.caller.user in users)
            try:
                runs = [asyncio.wrap_future(self._thread.submit(self._run, job)) for job in jobs]
                seconds = self.admission.seconds_left(min(job.arrival for job in jobs))
                return await asyncio.wait_for(asyncio.gather(*runs), seconds)
            except asyncio.TimeoutError:
                raise too_late() from None
            finally:
                self._stop_for_sure(jobs)

    def answers(self, caller: Caller) -> bool:
        """Tell whether a request for a caller's conversation is being answered."""
        return any(job.caller == caller for job in list(self._jobs.values()))

    async def call(self, function: Callable[[LoadedModel], Result]) -> Result:
        """Call a function with the model in a worker thread, once one is free, and return its
        result; other workers may answer requests meanwhile.
        """
        return await asyncio.wrap_future(self._thread.submit(function, self.model))

    async def look(self, function: Callable[[LoadedModel], Result]) -> Result:
        """Return what a function shows of the model to a viewer, which waits for a step, but for no
        request; raises RequestError once the server shuts down.
        """
        if self._closing:
            raise shutting_down()
        try:
            return await run_in_threadpool(function, self.model)
        except EntropyKVError:  # The model was freed meanwhile.
            if self._closing:
                raise shutting_down() from None
            raise

    def before_close(self, function: Callable[[LoadedModel], object]) -> None:
        """Register a function that is called with the model in a worker thread before the model is
        freed.
        """
        self._before_close.append(function)

    def stop(self) -> None:
        """Refuse waiting and new requests, and give running ones their time to end."""
        if not self._closing:
            self._stopped_at = time.monotonic()
        self._closing = True
        if self.limits.drain_seconds <= 0:
            self._stop(self._jobs.values())

    def _stop(self, jobs: Iterable[Job]) -> None:
        """Tell jobs to end within a micro-batch, also if they wait for another session's step."""
        for job in list(jobs):
            job.stop.set()
            with self._running_lock:
                for lane, running in self._jobs.items():
                    if running is job:
                        self.running[lane].interrupt()

    def _stop_for_sure(self, jobs: Sequence[Job]) -> None:
        """Stop jobs repeatedly until they have ended.

        A job that was just about to wait for room in the pool would miss a single call.
        """
        self._stop(jobs)
        if any(job in jobs for job in list(self._jobs.values())):
            loop = asyncio.get_running_loop()
            loop.call_later(_CHECK_INTERVAL, self._stop_for_sure, jobs)

    def close(self) -> None:
        """Stop all requests, then free the model. It may be called twice."""
        self.stop()
        while running := list(self._jobs.values()):
            self._stop(running)
            time.sleep(_CHECK_INTERVAL)
        before, self._before_close = self._before_close, []
        try:
            for function in before:
                self._thread.submit(function, self.model).result()
        finally:
            self._thread.shutdown(wait=True)
            self.prefix_cache.close()
            self.model.close()

    def _run(self, job: Job) -> Any:
        lane = self._free_lanes.get()
        check = partial(self._checkpoint, job)
        answering = Answering(
            self.model,
            self.prefix_cache,
            lane,
            check,
            job.caller,
            job.document,
            tell=job.emit,
        )
        with self._running_lock:
            self.running[lane], self._jobs[lane] = answering, job
        outcome: Outcome = "finished"
        refusal: RequestError | None = None
        before = lane.totals.counts()
        try:
            if self._closing:
                raise _StoppedError
            self._checkpoint(job)
            return job.run(answering)
        except _StoppedError:
            outcome = "stopped"
            if self._closing:
                raise shutting_down() from None
        # An error of any kind must not affect the next request.
        except Exception as error:
            # The error may be that of a decode that was interrupted to stop the job.
            if job.stop.is_set():
                outcome = "stopped"
                if self._closing:
                    raise shutting_down() from None
                return None
            refusal = without_frames(as_request_error(error))
            outcome = "refused" if refusal.status_code < 500 else "failed"
        finally:
            with self._running_lock:
                del self.running[lane], self._jobs[lane]
            self._free_lanes.put(lane)
            self._note(job, outcome, before, lane.totals.counts())
        try:
            if refusal is not None:
                raise refusal
            return None
        finally:
            del refusal  # Break the reference cycle between this frame and the traceback.

    def _note(
        self, job: Job, outcome: Outcome, before: tuple[int, int], now: tuple[int, int]
    ) -> None:
        self.outcomes[outcome] += 1
        self._moment = None
        self.stats = self._figures()
        if job.first is not None:
            self.first_chunks += 1
            self.first_chunk_seconds += job.first - job.arrival
        if job.note is not None:
            job.note(now[0] - before[0], now[1] - before[1])

    def _figures(self) -> SessionStats:
        totals = [lane.totals for lane in self.lanes]
        return figures_of_pool(self.pool, self.model.stats(), totals)

    @property
    def n_conversations(self) -> int:
        """Return how many conversations are kept or being answered."""
        n_own = 0 if self.pool.holds_one else 1  # The model's own session reads nothing.
        return self.moment().pool.sessions - n_own

    def moment(self) -> Moment:
        """Return figures of the pool that are at most a quarter of a second old.

        Taking them delays all sessions, so it is done once for any number of clients.
        """
        with self._moment_lock:
            last, now = self._moment, time.monotonic()
            if last is not None and now - last[0] <= _STATS_INTERVAL:
                return last[1]
            self._moment = now, Moment(self.pool.stats(), self.prefix_cache.conversations())
            return self._moment[1]

    def _checkpoint(self, job: Job) -> None:
        job.check()
        now = time.monotonic()
        if self._closing and now - self._stopped_at >= self.limits.drain_seconds:
            raise _StoppedError
        if now - self._looked_at > _STATS_INTERVAL:
            self._looked_at = now
            self.stats = self._figures()


def shutting_down() -> RequestError:
    """Return the error for requests that arrive or wait while the server stops."""
    return RequestError(503, "the server is shutting down; try again later")
