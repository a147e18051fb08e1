"""Share the pages of a pool among its sequences: who is live, who is parked, who has what.

All of it happens between two steps: see Scheduler.between_steps().
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from entropykv import _core
from entropykv.errors import BudgetError, PoolError
from entropykv.policy.recipe import Recipe
from entropykv.session.parking import Parked, Parking
from entropykv.session.seat import Seat
from entropykv.session.shares import LEAST_CHANGE, Shares
from entropykv.settings.options import Budget


class SharedPool:
    """Hold a pool of pages, and the sequences that hold some of them, or are parked."""

    def __init__(
        self,
        core: _core.SequencePool,
        recipe: Recipe,
        layers: Sequence[_core.LayerShape],
        parking: Parking,
        seats: list[Seat],
        is_waiting: Callable[[Seat], bool],
    ) -> None:
        """Share the pages of `core` by the recipe's budget.

        `seats`: all sequences, as they come and go; `parking`: where idle ones go; `is_waiting`:
        whether tokens of one wait to be read.
        """
        self.core = core
        self.parking = parking
        self._recipe = recipe
        self._layers = layers
        self._seats = seats
        self._is_waiting = is_waiting
        self._n_sequences = recipe.options.n_sequences or 1
        self._free_numbers = list(range(self._n_sequences))
        self.evicted_by_gone = 0
        """How many entries were evicted of texts whose place others took."""
        self._budget = recipe.options.budget
        self._pages = recipe.pool_pages(self._budget, layers)
        self._shares = Shares(recipe, layers)
        core.set_pages(self._pages)
        core.on_full(self.parking.make_room)

    @property
    def live(self) -> list[Seat]:
        """Return the sequences that hold pages."""
        return [seat for seat in self._seats if seat.live]

    def forget(self, seat: Seat) -> None:
        """Drop what a sequence has read; where it shares a pool, it is not live any more."""
        if seat.parked is not None:
            self.parking.drop(seat.parked)
            seat.parked = None
        seat.expected = seat.shared_for = 0
        if seat.live:
            self._vacate(seat)
            self.share()

    def _vacate(self, seat: Seat) -> None:
        """Take a sequence's pages and its number; what it held is kept elsewhere, or not needed."""
        store = seat.headwise
        store.set_aside()
        self._free_numbers.append(store.sequence)
        seat.live = False

    def park(self, seat: Seat) -> None:
        """Keep what a sequence holds elsewhere, and give its pages to others; raises PoolError."""
        if not seat.live:
            return
        parked = self._kept(seat)
        self._vacate(seat)
        seat.headwise.way_back.await_state(seat.position)
        seat.parked = parked

    def _kept(self, seat: Seat) -> Parked:
        """Keep what a live sequence holds; its pages are shared, frozen ones copied. PoolError."""
        store = seat.headwise
        pages = store.checkpoint()
        if pages is None:
            return self.parking.put(seat.position, store.shift, store.state())
        return self.parking.hold(seat.position, pages, store.state_of)

    def somebody_else_reads(self, seat: Seat) -> bool:
        """Tell whether it is worth waiting: another live sequence is in use."""
        now = time.monotonic()
        return any(not each.is_idle(now) for each in self.live if each is not seat)

    def make_live(self, seat: Seat) -> None:
        """Give a sequence a share, first of the idle ones', then of all; raises PoolError."""
        now = time.monotonic()
        full: PoolError | None = None
        for each in self.live:
            if each.is_idle(now) and not self._is_waiting(each):
                try:
                    self.park(each)
                except PoolError as error:
                    full = error
                    break
        if not self._free_numbers or not self._shares.are_possible([*self.live, seat], self._pages):
            self.share()
            raise full or PoolError(
                f"the pool holds {len(self.live)} conversations, and no more; wait for the end of "
                "one, or give it more bytes (kv_budget) and sequences (n_sequences)"
            )
        seat.headwise.take_place(self._free_numbers.pop())
        seat.live = True
        seat.last_step = now
        try:
            self.share()
            if seat.parked is not None:
                self._resume(seat, seat.parked)
        except BaseException:
            self._vacate(seat)
            self.share()
            raise

    def _resume(self, seat: Seat, parked: Parked) -> None:
        store, n_parked = seat.headwise, parked.n_entries
        with self.parking.staying(parked):
            done = parked.pages is not None and store.go_on_from(parked.pages, ends=True)
        if not done:  # its pages are needed to make it smaller
            self.parking.leave_pool(parked)
            store.load_state(self.parking.take(parked))
        if parked.awaits_prediction:
            store.predict_held(parked.position)
        seat.given_up += n_parked - store.core.entries
        self.parking.drop(parked)
        seat.parked = None

    def kept_of(self, seat: Seat) -> Parked:
        """Keep what a sequence holds for another one, in pages of both; raises PoolError."""
        return self._kept(seat) if seat.parked is None else self.parking.copy(seat.parked)

    def give(self, seat: Seat, parked: Parked) -> None:
        """Let a sequence go on from what was kept, in the place of what it has read.

        It is parked until it reads.
        """
        self.forget(seat)
        self.evicted_by_gone += seat.evicted
        store = seat.headwise
        seat.parked, seat.position = parked, parked.position
        store.way_back.await_state(seat.position)
        store.core.set_evicted(parked.evicted)
        seat.inherited = parked.evicted

    def checkpoint_of(self, seat: Seat) -> Parked | None:
        """Return what a sequence holds now, its pages shared; None: they are not in the pool."""
        store = seat.headwise
        if seat.parked is None:
            pages = store.checkpoint() if seat.live else None
        else:
            pages = None if seat.parked.pages is None else seat.parked.pages.copy()
        if pages is None:
            return None
        return self.parking.hold(seat.position, pages, store.state_of, spare=True)

    def describe(self) -> str:
        """Return a sentence that says what each conversation gets while all hold entries."""
        n_sequences, n_bytes = self._n_sequences, self.core.budget_bytes
        head = f"{n_sequences} conversations at a time share {n_bytes / 2**20:.1f} MiB of KV cache"
        try:
            share = self._recipe.equal_share(self._budget, self._layers)
        except BudgetError:
            return (
                f"{head}, which does not hold the sinks and recent windows of all: fewer share it"
            )
        return (
            f"{head}: {share.pool_bytes / 2**20:.1f} MiB each, {share.mean_entries} of "
            f"{self._recipe.n_ctx} tokens per KV head"
        )

    def share(self) -> None:
        """Give every live sequence its share; those that get less evict first."""
        self._shares.give(self.live, self._pages)

    def note_growth(self, seat: Seat) -> None:
        """Share again where a text gets longer than shares have gone by."""
        if seat.expected > seat.shared_for:
            self.share()

    def holds_whole(self, seat: Seat) -> bool:
        """Tell whether a live sequence's share will hold all of its text as it is expected."""
        return self._shares.hold_whole(seat, self.live, self._pages)

    def note_losses(self, seats: Sequence[Seat]) -> None:
        """Share again where prompts have shown what their sequences lose with fewer pages."""
        if self._shares.learn(seats):
            self._shares.give(self.live, self._pages, least_change=LEAST_CHANGE)

    def resize(self, budget: Budget) -> None:
        """Change the pool's bytes: more hold at once, fewer evict; raises BudgetError."""
        pages = self._recipe.pool_pages(budget, self._layers)
        now = time.monotonic()
        for seat in self.live:
            if not self._shares.are_possible(self.live, pages) and seat.is_idle(now):
                self.park(seat)
        if not self._shares.are_possible(self.live, pages):
            self.share()
            raise BudgetError(
                f"a KV budget of {budget} does not hold {len(self.live)} conversations; close "
                "some, or give a larger one"
            )
        self._budget = budget
        former, self._pages = self._pages, pages
        if pages >= former:
            self.core.set_pages(pages)
        self.share()
        self.core.set_pages(pages)
