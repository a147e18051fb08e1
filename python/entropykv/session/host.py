"""A loaded model, and the pool of bytes that the sequences of its sessions share."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from entropykv import _core
from entropykv.errors import (
    BudgetError,
    EntropyKVError,
    PoolError,
    SettingsError,
    UnsupportedModelError,
)
from entropykv.llamacpp.batch import MicroBatch
from entropykv.llamacpp.model import Model, offloaded_layers
from entropykv.llamacpp.positions import check_sinks, largest_micro_batch
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.names import Policy, policy_named
from entropykv.policy.plan import kv_type_for
from entropykv.profile.profile import EntropyProfile
from entropykv.session.checkpoints import Checkpoints
from entropykv.session.echo import Echo
from entropykv.session.parking import Parked, Parking
from entropykv.session.profile import given_profile, profile_for
from entropykv.session.scheduler import Scheduler, Work
from entropykv.settings.freezing import RECALL_MICRO_BATCH, Freezing, check_freezing
from entropykv.settings.options import Budget, Settings, at_least, is_number
from entropykv.store.flat import FlatStore, flat_kv_type
from entropykv.store.headwise import HeadwiseStore
from entropykv.store.headwise_context import HeadwiseContext
from entropykv.store.protocol import Part, Store, decode_parts

_LOOK_AGAIN = 0.02
"""Seconds after which it is looked again whether somebody is idle."""
MOST_SEQUENCES = 256
"""Of a llama_context."""
IDLE_SECONDS = 1.0
"""A sequence that was not read on for so long may be parked for another, though nobody said that it
rests."""


@dataclass(frozen=True)
class HostOptions:
    """What sessions of one host have in common: see Session and Pool."""

    n_ctx: int
    kv_budget: Budget | str | float
    policy: str
    kv_type: str
    store: str
    entropy_config: EntropyProfile | str | os.PathLike[str] | None
    n_ubatch: int
    n_threads: int
    n_threads_batch: int
    n_gpu_layers: int
    n_sinks: int
    recent_window: int | None
    freeze: Freezing | str | None
    verbose: bool
    recovers: bool = False
    """Whether what is frozen is to be restored where the output grows uncertain."""
    shared: bool = False
    """Whether it is a pool's, and not of one session."""
    n_sequences: int = 1
    park: str = "ram"
    park_limit: str | int | None = None
    checkpoints: str | int = 0


class Seat:
    """A session's part of its host: a store, and whether it is live."""

    def __init__(self, store: Store, weight: float, number: int, *, live: bool) -> None:
        """A sequence that has read nothing yet."""
        self.store = store
        self.number = number
        """How many had a seat at this host before."""
        self.weight = weight
        """Its part of the pool, relative to the others'."""
        self.live = live
        self.parked: Parked | None = None
        self.position = 0
        """Tokens read, when it was last between two steps."""
        self.rests = False
        """Whether its session has said that no token follows soon."""
        self.last_step = 0.0
        self.inherited = 0
        """Entries that had been evicted of what it is a copy of."""
        self.given_up = 0
        """Entries that left because its share became smaller, for the sake of others."""

    @property
    def evicted(self) -> int:
        """Entries evicted since it is there."""
        return self.store.evicted - self.inherited

    def is_idle(self, now: float) -> bool:
        """Whether it can be parked without making anybody wait."""
        return self.live and (self.rests or now - self.last_step > IDLE_SECONDS)


class Host:
    """The model, its context, and what is shared among the sequences in it."""

    def __init__(self, model: str | os.PathLike[str] | Model, options: HostOptions) -> None:
        """Load the model; everything is checked before the weights are read."""
        at_least("n_sequences", options.n_sequences, 1)
        if options.n_sequences > MOST_SEQUENCES:
            raise SettingsError(
                f"{options.n_sequences} conversations at a time are too many; use at most "
                f"{MOST_SEQUENCES}, and more sessions, which are parked while they are idle"
            )
        self.options = options
        self.n_sequences = options.n_sequences
        self.parking = Parking(options.park, options.park_limit)
        self.checkpoints = Checkpoints(self.parking, options.checkpoints)
        self.settings = Settings(
            kv_type=options.kv_type,
            store=options.store,
            n_ctx=options.n_ctx,
            n_ubatch=options.n_ubatch,
            n_threads=options.n_threads,
            n_threads_batch=options.n_threads_batch,
            n_gpu_layers=offloaded_layers(options.n_gpu_layers),
            n_sinks=options.n_sinks,
            recent_window=options.recent_window,
        )
        self.budget = Budget.parse(options.kv_budget)
        profile = given_profile(options.entropy_config)
        schedule = policy_named(options.policy, profile, options.store).schedule
        self.freezing = Freezing.parse(options.freeze) or (Freezing() if schedule else None)
        check_freezing(self.freezing, options.store, options.kv_type)
        if options.recovers and not self.freezing:
            raise nothing_to_restore()
        self.model = (
            model
            if isinstance(model, Model)
            else Model(model, n_gpu_layers=options.n_gpu_layers, verbose=options.verbose)
        )
        self.fallback: str | None = None
        """Why the flat store serves the model where either might."""
        self.closed = False
        self.seats: list[Seat] = []
        self.sessions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Those of a pool by their numbers, for who looks at all; nothing keeps them here."""
        self._seats_taken = 0
        self._evicted_by_gone = 0
        self._leaving: list[Seat] = []
        self._in_step = False
        self._context: HeadwiseContext | None = None
        try:
            self._resolve(profile)
            self._spare: Store | None = self._make_store()
        except BaseException:
            self._close_context()
            self.model.close()
            raise
        self.n_kv_heads = self._spare.n_kv_heads
        # All single tokens besides a piece of a prompt.
        n_tokens = self._most_tokens() + self.n_sequences - 1
        self._batch = MicroBatch(n_tokens, self.model.n_vocab)
        self.scheduler = Scheduler(self._admit, self._step, together=not self.recurrent)
        self._free_numbers = list(range(self.n_sequences))
        self._pages = self._total_pages(self.budget)
        if self.core_pool is not None:
            self.core_pool.set_pages(self._pages)
            self.core_pool.on_full(self.parking.make_room)

    def _resolve(self, profile: EntropyProfile | None) -> None:
        options, geometry = self.options, self.model.geometry
        trained = geometry.n_ctx_train
        self.n_ctx = options.n_ctx or trained
        self.profile = profile_for(options.policy, geometry, profile)
        kv_type = kv_type_for(options.kv_type, self.budget, geometry, self.n_ctx * self.n_sequences)
        self.settings = replace(self.settings, kv_type=kv_type)
        if self.freezing:
            cold = self.freezing.type_for(self.settings.kv_type)
            self.freezing = replace(self.freezing, kv_type=cold)
        check_sinks(options.n_sinks, self.n_ctx, trained)

    # --- stores -----------------------------------------------------------------------------------

    def _make_store(self) -> Store:
        """The store that was asked for; with `auto`, flat where headwise cannot serve the model."""
        wanted = self.options.store
        if wanted != "auto":
            return self._store_named(wanted)
        try:
            return self._store_named("headwise")
        except UnsupportedModelError as error:
            if self.freezing:
                raise UnsupportedModelError(
                    f"{error}; the flat store cannot freeze: use it without --freeze (freeze=) and "
                    "without policy freeze"
                ) from error
            if self.options.shared:
                raise
            self.fallback = str(error)
            return self._store_named("flat")

    def _store_named(self, store: str) -> Store:
        if store == "flat" and self.options.shared:
            raise UnsupportedModelError(
                f"{self.model.name}: the flat store holds one conversation, and no pool; use "
                "--store headwise (store='headwise'), or a Session"
            )
        self.policy: Policy = policy_named(
            self.options.policy,
            self.profile,
            store,
            freezes=self.freezing is not None,
            recurrent=is_recurrent(self.model),
        )
        self.n_ubatch = self._largest_micro_batch()
        repeats = self.policy.importance.repeats
        self.echo = Echo(self._tokenize_plainly, self.n_ubatch) if repeats else None
        if store == "flat":
            kv_type = flat_kv_type(self.options.kv_type, self.settings.kv_type, self.model)
            self.settings = replace(self.settings, kv_type=kv_type)
        arguments = (
            self.model,
            self.settings,
            self.n_ctx,
            self.n_ubatch,
            self.budget,
            self.policy,
            self.profile,
        )
        try:
            if store == "flat":
                return FlatStore(*arguments)
            if self._context is None:
                self._context = HeadwiseContext(
                    self.model,
                    self.settings,
                    self._most_tokens(),
                    n_sequences=self.n_sequences,
                    shared=self.options.shared,
                )
            return HeadwiseStore(*arguments, freezing=self.freezing, host=self._context)
        except MemoryError:
            raise self.too_large(self.budget) from None
        except UnsupportedModelError:
            self._close_context()
            raise

    def _tokenize_plainly(self, text: str) -> list[int]:
        return self.model.tokenize(text, add_bos=False, special=False)

    def _most_tokens(self) -> int:
        """Tokens of a sequence in a micro-batch: of text alone, or of a stretch and its echo."""
        return max(self.n_ubatch, self.echo.n_ubatch if self.echo else 0)

    def _largest_micro_batch(self) -> int:
        """Tokens of a micro-batch; few where recall looks for frozen entries with each of them.

        Not with echoes: they find what is needed before anything is frozen.
        """
        n_ubatch, trained = self.settings.n_ubatch, self.model.geometry.n_ctx_train
        recalls = self.freezing is not None and self.freezing.recall_interval > 0
        if recalls and not self.policy.importance.repeats:
            n_ubatch = min(n_ubatch, RECALL_MICRO_BATCH)
        return largest_micro_batch(n_ubatch, self.n_ctx, trained)

    def too_large(self, budget: Budget) -> BudgetError:
        """Return the error of a budget for which there is no memory."""
        return BudgetError(
            f"{self.model.name}: a KV budget of {budget} in a context of {self.n_ctx} tokens does "
            "not fit into this machine's memory; give a smaller one (kv_budget, n_ctx)"
        )

    def _close_context(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None

    @property
    def core_pool(self) -> _core.SequencePool | None:
        """The pages that several sequences share."""
        return None if self._context is None else self._context.pool

    # --- seats ------------------------------------------------------------------------------------

    def take_seat(self, weight: float = 1.0) -> Seat:
        """Make a store for another sequence; it gets a share of the pool when it reads."""
        if not is_number(weight) or not 0.001 <= weight <= 1000.0:
            raise SettingsError(f"a weight cannot be {weight!r}; use a number from 0.001 to 1000")
        with self.scheduler.between_steps():
            if self.closed:
                raise EntropyKVError("the pool is closed; make a new one")
            store, self._spare = self._spare or self._make_store(), None
            seat = Seat(store, weight, self._seats_taken, live=self.core_pool is None)
            self._seats_taken += 1
            self.seats.append(seat)
            return seat

    def leave_seat(self, seat: Seat) -> None:
        """Free all of a sequence; the others get its share."""
        if self.scheduler.leads() and self._in_step:  # garbage was collected within a step
            self._leaving.append(seat)
            return
        with self.scheduler.between_steps():
            if seat not in self.seats:
                return
            self.forget(seat)
            self._evicted_by_gone += seat.evicted
            seat.store.close()
            self.seats.remove(seat)

    def forget(self, seat: Seat) -> None:
        """Drop what a sequence has read; where it shares a pool, it is not live any more."""
        if seat.parked is not None:
            self.parking.drop(seat.parked)
            seat.parked = None
        if self.core_pool is not None and seat.live:
            self._vacate(seat)
            self.share_pages()

    def _vacate(self, seat: Seat) -> None:
        """Take a sequence's pages and its number; what it held is kept elsewhere, or not needed."""
        store = _headwise(seat)
        store.set_aside()
        self._free_numbers.append(store.sequence)
        seat.live = False

    @property
    def evictions(self) -> int:
        """Entries evicted so far, of all sequences that are or were there."""
        return self._evicted_by_gone + sum(seat.evicted for seat in self.seats)

    @property
    def live(self) -> list[Seat]:
        """Sequences that hold pages."""
        return [seat for seat in self.seats if seat.live]

    @contextlib.contextmanager
    def with_seat(self, seat: Seat) -> Iterator[Store]:
        """Use a sequence's store between two steps, live. PoolError where there is no room."""
        while not self._is_live_now(seat):
            time.sleep(_LOOK_AGAIN)
        with self.scheduler.between_steps():
            if not seat.live:  # somebody was faster
                self._make_live(seat)
            yield seat.store

    def _is_live_now(self, seat: Seat) -> bool:
        """Make a sequence live, unless it has to wait for others."""
        with self.scheduler.between_steps():
            if seat.live:
                return True
            try:
                self._make_live(seat)
            except PoolError:
                if self._somebody_else_reads(seat):
                    return False
                raise
            return True

    def park(self, seat: Seat) -> None:
        """Keep what a sequence holds elsewhere, and give its pages to the others. PoolError."""
        if self.core_pool is None or not seat.live:
            return
        parked = self._kept(seat)
        self._vacate(seat)
        _headwise(seat).await_state(seat.position)
        seat.parked = parked

    def _kept(self, seat: Seat) -> Parked:
        """Keep what a live sequence holds: its pages are shared, but for frozen ones. PoolError."""
        store = _headwise(seat)
        pages = store.checkpoint()
        if pages is None:
            return self.parking.put(seat.position, store.shift, store.state())
        return self.parking.hold(seat.position, pages, store.state_of)

    def kept_of(self, seat: Seat) -> Parked:
        """Keep what a sequence holds, for another one, in pages of both. PoolError."""
        with self.scheduler.between_steps():
            return self._kept(seat) if seat.parked is None else self.parking.copy(seat.parked)

    def give(self, seat: Seat, parked: Parked) -> None:
        """Let a sequence go on from what was kept, in the place of what it has read.

        It is parked until it reads.
        """
        with self.scheduler.between_steps():
            self.forget(seat)
            self._evicted_by_gone += seat.evicted
            store = _headwise(seat)
            seat.parked, seat.position = parked, parked.position
            store.await_state(seat.position)
            store.core.set_evicted(parked.evicted)
            seat.inherited = parked.evicted

    def checkpoint_of(self, seat: Seat) -> Parked | None:
        """What a sequence holds now, as long as its pages are in the pool; None: they are not."""
        store = _headwise(seat)
        if seat.parked is None:
            pages = store.checkpoint() if seat.live else None
        else:
            pages = None if seat.parked.pages is None else seat.parked.pages.copy()
        if pages is None:
            return None
        return self.parking.hold(seat.position, pages, store.state_of, spare=True)

    @property
    def recurrent(self) -> bool:
        """Whether sequences have a state that cannot go back."""
        return self._context is not None and self._context.recurrent

    def _admit(self, work: Work) -> bool:
        """Make a sequence live that waits to be read; False: it has to wait for others."""
        seat = cast(Seat, work.owner)
        if seat.live:
            return True
        try:
            self._make_live(seat)
        except PoolError as error:
            if self._somebody_else_reads(seat):
                return False
            work.part.error = error
        except Exception as error:
            work.part.error = error
        return True

    def _somebody_else_reads(self, seat: Seat) -> bool:
        now = time.monotonic()
        return any(not each.is_idle(now) for each in self.live if each is not seat)

    def _make_live(self, seat: Seat) -> None:
        """Give a sequence a share: of the idle ones' first, then of all. PoolError."""
        now = time.monotonic()
        full: PoolError | None = None
        for each in self.live:
            if each.is_idle(now) and not self.scheduler.is_waiting(each):
                try:
                    self.park(each)
                except PoolError as error:
                    full = error
                    break
        if not self._free_numbers or not self._holds([*self.live, seat]):
            self.share_pages()
            raise full or PoolError(
                f"the pool holds {len(self.live)} conversations, and no more; wait for the end of "
                "one, or give it more bytes (kv_budget) and sequences (n_sequences)"
            )
        _headwise(seat).take_place(self._free_numbers.pop())
        seat.live = True
        seat.last_step = now
        try:
            self.share_pages()
            if seat.parked is not None:
                self._resume(seat, seat.parked)
        except BaseException:
            self._vacate(seat)
            self.share_pages()
            raise

    def _resume(self, seat: Seat, parked: Parked) -> None:
        store, n_parked = _headwise(seat), parked.n_entries
        with self.parking.staying(parked):
            done = parked.pages is not None and store.go_on_from(parked.pages, ends=True)
        if not done:  # its pages are needed to make it smaller
            self.parking.leave_pool(parked)
            store.load_state(self.parking.take(parked))
        seat.given_up += n_parked - store.core.entries
        self.parking.drop(parked)
        seat.parked = None

    # --- shares -----------------------------------------------------------------------------------

    def _total_pages(self, budget: Budget) -> int:
        """Pages of the pool: as many as all sequences can use, at most."""
        store = self._spare or self.seats[0].store
        if not isinstance(store, HeadwiseStore):
            return 0
        most = self.n_sequences * store.plan_of(Budget("fraction", 1.0)).pool_pages
        plan = store.plan_of(budget)
        if budget.kind == "bytes":
            return min(most, int(budget.value) // plan.page_bytes)
        if budget.kind == "tokens" and budget.value > self.n_ctx:
            tokens = min(int(budget.value), self.n_sequences * self.n_ctx)
            return min(most, sum(_core.pages_for(tokens, n) for n in plan.entries_per_page))
        return plan.pool_pages

    def _shares(self, seats: list[Seat], pages: int) -> list[int]:
        """Pages of each: equal ones, but for weights."""
        weights = sum(seat.weight for seat in seats)
        return [int(pages * seat.weight / weights) for seat in seats]

    def _holds(self, seats: list[Seat], pages: int | None = None) -> bool:
        """Whether every share would hold what no eviction takes."""
        total = self._pages if pages is None else pages
        try:
            for seat, share in zip(seats, self._shares(seats, total), strict=True):
                _headwise(seat).plan_of(_budget_of(seat, share))
        except BudgetError:
            return False
        return True

    def share_pages(self) -> None:
        """Give every live sequence its share; those that get less evict first."""
        live = self.live
        if self.core_pool is None or not live:
            return
        shares = dict(zip(live, self._shares(live, self._pages), strict=True))
        for seat in sorted(live, key=lambda each: shares[each] - _headwise(each).share_pages):
            store, share = _headwise(seat), shares[seat]
            if store.share_pages != share:
                held = store.core.entries
                store.resize(_budget_of(seat, share))
                store.share_pages = share
                seat.given_up += held - store.core.entries

    def resize(self, budget: Budget) -> None:
        """Change the pool's bytes; it grows at once, and shrinks by evicting. BudgetError."""
        with self.scheduler.between_steps():
            if self.core_pool is None:
                for seat in self.seats:
                    seat.store.resize(budget)
            else:
                self._resize_pool(self.core_pool, budget)
            self.budget = budget

    def _resize_pool(self, pool: _core.SequencePool, budget: Budget) -> None:
        pages = self._total_pages(budget)
        now = time.monotonic()
        for seat in self.live:
            if not self._holds(self.live, pages) and seat.is_idle(now):
                self.park(seat)
        if not self._holds(self.live, pages):
            self.share_pages()
            raise BudgetError(
                f"a KV budget of {budget} does not hold {len(self.live)} conversations; close "
                "some, or give a larger one"
            )
        former, self._pages = self._pages, pages
        if pages >= former:
            pool.set_pages(pages)
        self.share_pages()
        pool.set_pages(pages)

    # --- steps ------------------------------------------------------------------------------------

    def read(self, seat: Seat, part: Part, arrival: int) -> None:
        """Read the next tokens of a sequence, in one step with those of others."""
        seat.rests = False
        self.scheduler.submit(seat, part, arrival)

    def rest(self, seat: Seat) -> None:
        """Say that nothing more of a sequence is read soon: it may be parked for another."""
        seat.rests = True
        self.scheduler.rest(seat)

    def _step(self, works: list[Work]) -> None:
        self._in_step = True
        try:
            decode_parts([work.part for work in works], self._batch, self.model.name)
        finally:
            self._in_step = False
            while self._leaving:
                self.leave_seat(self._leaving.pop())
        now = time.monotonic()
        for work in works:
            seat = cast(Seat, work.owner)
            seat.last_step = now
            if work.part.error is None:
                seat.position = work.part.position + len(work.part.tokens)

    def close(self) -> None:
        """Free everything."""
        with self.scheduler.between_steps():
            if self.closed:
                return
            self.closed = True
            self.scheduler.refuse(EntropyKVError("the pool is closed; make a new one"))
            self.checkpoints.clear()
            for seat in list(self.seats):
                with contextlib.suppress(EntropyKVError):
                    self.leave_seat(seat)
            if self._spare is not None:
                self._spare.close()
                self._spare = None
            self._batch.close()
            self._close_context()
            self.model.close()


def _headwise(seat: Seat) -> HeadwiseStore:
    """Return the store of a sequence that shares a pool: no other store does."""
    return cast(HeadwiseStore, seat.store)


def _budget_of(seat: Seat, share: int) -> Budget:
    return Budget("bytes", max(1, share * _headwise(seat).plan.page_bytes))


def nothing_to_restore() -> SettingsError:
    """Return the error of recovery where nothing is frozen."""
    return SettingsError(
        "recovery restores what is frozen, and nothing is; use --freeze ram or --policy "
        "freeze (freeze=), or leave recovery out"
    )
