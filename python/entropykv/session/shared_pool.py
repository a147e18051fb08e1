"""Share the pages of a pool among its sequences: which are live, which are swapped out, and their
shares.

Shares change only between two steps: see Scheduler.between_steps(). Within one, a store that needs
pages may have texts leave the pool: see SharedPool._free_pages().

Three things end, each in an order of its own:

- The share of an idle sequence (_swap_out_idle), when another one becomes live or its text longer,
  and there is no place or not all texts have room: the lowest last_step first.
- The pages that hold kept texts (_free_pages), when a store needs pages and too few are free: the
  least recently used checkpoint first; then the text that was swapped out first.
- A session that its user has put aside (let_go), when there would be a PoolError otherwise: the
  least recently used IdleSession first.

Swapping out moves nothing where stores can share pages: the text stays in the pool (InPool) until
the pages are needed, and leaves then (Outside). Device stores, and those that freeze, copy at once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from entropykv import _core
from entropykv.errors import BudgetError, PoolError
from entropykv.policy.division import Claim, LossCurve, divide, parts_by_weight
from entropykv.policy.plan import HeadwisePlan, WholeTexts
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.session.kept_texts import (
    IdleSession,
    InPool,
    KeptText,
    KeptTexts,
    TextTooLargeError,
)
from entropykv.session.sequence import TokenSequence
from entropykv.session.stats import Trajectory
from entropykv.settings.options import Budget
from entropykv.store.protocol import Places, Pooled, Store, StoreContext

GROWTH_STEP = 64
"""Expected lengths of texts are rounded up to multiples of this many tokens, so that shares do not
change with every token.
"""
INTERVAL = 1024
"""Within a long prompt, a checkpoint may be kept every INTERVAL tokens: see
SessionText.checkpoint_at_interval().
"""
LEAST_CHANGE = 1 / 16
"""After losses were measured anew, shares change only if one changes by at least this fraction."""

MOST_FLOORS = 64
"""For how many sizes of a share, in pages, the pages of its protected entries are cached."""


IDLE_SECONDS = 1.0
"""After this many seconds without reading, a sequence counts as idle, and may be swapped out."""


class SequenceSlot:
    """Hold everything that belongs to one sequence; a session is a handle on it."""

    def __init__(
        self, store: Store, weight: float, number: int, text: TokenSequence, *, live: bool
    ) -> None:
        """Start with nothing read; `live`: the sequence has its share of the pool already."""
        self.store = store
        self.number = number
        """A unique number: how many slots the runner has made before."""
        self.weight = weight
        """The weight of the sequence, relative to the other sequences of the pool."""
        self.live = live
        self.gone = False
        """True once the session of the slot is closed; then nothing more can be read."""
        self.swapped: KeptText | None = None
        """The text that is kept of the sequence while it is swapped out; None while it is live or
        empty.
        """
        self.text = text
        """The text that was read; loading and forking replace it."""
        self.trajectory: Trajectory | None = None
        """How many entries were held as the text grew; None unless entries are frozen."""
        self.broken = False
        """True while a decode of the sequence runs, and if the last decode has failed half-way."""
        self.half_read = False
        """True if the last step has failed half-way, so that the store may hold entries beyond
        `position`.
        """
        self.writes = False
        """True if the latest tokens were written one by one, and are not a prompt."""
        self.position = 0
        """How many tokens had been read at the end of the last step."""
        self.expected = 0
        """The length in tokens that the text is expected to reach at least; pages that a text of
        this length does not need go to other sequences.
        """
        self.shared_for = 0
        """The length of text, in tokens, that the current shares have room for, or were planned
        with.
        """
        self.loss_curve: LossCurve | None = None
        """The loss curve that current shares of the pool are based on; None if there is none."""
        self.rests = False
        """True if Session.rest() has said that no token follows soon."""
        self.last_step = 0.0
        self.n_others = 0
        """How many other sequences wrote a token in the last step of this sequence."""
        self.inherited = 0
        """How many of the evictions that the store counts happened before the sequence took over
        its text or its store.
        """
        self.given_up = 0
        """How many entries were evicted because the sequence's share shrank for others."""

    @property
    def evicted(self) -> int:
        """Return how many entries were evicted from the sequence, without those in `inherited`."""
        return self.store.evicted - self.inherited

    def mend(self) -> None:
        """Record that the text and the store of the sequence agree again, after a load or
        a copy.
        """
        self.broken = self.half_read = False

    def note_evictions(self) -> None:
        """Record in the text where it ended at the last eviction."""
        self.text.note_evictions(self.store.evicted)

    def is_idle(self, now: float) -> bool:
        """Tell whether the sequence can be swapped out without delaying a thread; `now`: seconds of
        time.monotonic().
        """
        return self.live and (self.rests or now - self.last_step > IDLE_SECONDS)

    @property
    def pooled(self) -> Pooled:
        """Return the store by its interface for pools; only for stores that can share a pool."""
        return cast(Pooled, self.store.pooled)

    @property
    def measured_curve(self) -> LossCurve | None:
        """Return how much the text would lose with fewer pages; None if that was not measured."""
        return None if self.store.sharing is None else self.store.sharing.loss_curve()


class Shares(ABC):
    """Share the budget of a pool among its live sequences.

    The default methods leave every store the part that it has from the start.
    """

    keeps_places: bool = False
    """True if a sequence is live from the start and never gives up its place."""

    @abstractmethod
    def are_possible(self, slots: Sequence[SequenceSlot], budget: Budget | None = None) -> bool:
        """Tell whether a budget gives each of these sequences room for its protected entries.

        `budget` None: the current budget. Raises BudgetError for a budget that no store can use.
        """

    def learn(self, slots: Sequence[SequenceSlot]) -> bool:  # noqa: ARG002
        """Measure what sequences would lose with a smaller share; returns whether that has
        changed.
        """
        return False

    def give(self, slots: Sequence[SequenceSlot], least_change: float = 0.0) -> None:  # noqa: B027
        """Set the share of every sequence; sequences whose shares shrink evict first.

        `least_change`: do nothing if every share would change by less than this fraction of itself.
        """

    def note_growth(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> None:  # noqa: B027
        """Prepare for the expected growth of a sequence's text."""

    def hold_all_whole(self, slots: Sequence[SequenceSlot]) -> bool:  # noqa: ARG002
        """Tell whether no sequence would keep more of its text if another one were swapped out.

        By default, the share of a sequence does not depend on others.
        """
        return True

    @abstractmethod
    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> bool:
        """Tell whether note_growth() would let a sequence keep its whole text."""

    @abstractmethod
    def resize(self, budget: Budget, slots: Sequence[SequenceSlot]) -> None:
        """Share another budget; raises BudgetError if that is impossible."""


def shares_of(context: StoreContext, config: ResolvedConfig) -> Shares:
    """Return the object that shares a budget among the stores of a context."""
    if context.pages is not None:
        return PageShares(context.pages, config, context.layers)
    if context.places is not None:
        return EqualPlaces(context.places, config, context.layers)
    return WholeBudget()


class WholeBudget(Shares):
    """Give the whole budget to the only sequence of a pool of one.

    Its store owns the pages, and can be of any kind.
    """

    keeps_places = True

    def are_possible(
        self,
        slots: Sequence[SequenceSlot],  # noqa: ARG002
        budget: Budget | None = None,  # noqa: ARG002
    ) -> bool:
        """Return True, because the store itself checks its budget."""
        return True

    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> bool:  # noqa: ARG002
        """Return False, because the store itself knows what it holds whole."""
        return False

    def resize(self, budget: Budget, slots: Sequence[SequenceSlot]) -> None:
        """Set the budget of the store."""
        for slot in slots:
            slot.store.resize(budget)


class EqualPlaces(Shares):
    """Give every sequence an equal part of the budget, however many of them are live.

    The rows of device stores are allocated for that: those of all places when the first store takes
    a place, and freed when the last one leaves. For a larger budget, they are allocated anew.
    """

    def __init__(
        self, places: Places, config: ResolvedConfig, layers: Sequence[_core.LayerShape]
    ) -> None:
        """Check that an equal part of the budget holds the protected entries; raises BudgetError.

        `places`: what changes the budget of all stores; `layers`: the model's attention layers.
        """
        self._places = places
        self._config = config
        self._layers = layers
        self._budget = config.options.budget
        config.equal_share(self._budget, layers)
        self._n_places = config.options.n_sequences or 1

    def are_possible(
        self,
        slots: Sequence[SequenceSlot],
        budget: Budget | None = None,  # noqa: ARG002
    ) -> bool:
        """Tell whether there is a place for each sequence; resize() checks the `budget`."""
        return len(slots) <= self._n_places

    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> bool:  # noqa: ARG002
        """Tell whether an equal part holds the whole expected text."""
        return max(slot.expected, slot.position) <= slot.store.reach().whole

    def resize(self, budget: Budget, slots: Sequence[SequenceSlot]) -> None:
        """Give all sequences, also those that are swapped out, an equal part of another budget."""
        self._config.equal_share(budget, self._layers)
        held = [slot.pooled.n_entries for slot in slots]
        self._places.resize(budget)
        self._budget = budget
        for slot, n_held in zip(slots, held, strict=True):
            slot.given_up += n_held - slot.pooled.n_entries


class PageShares(Shares):
    """Divide the pages of a pool by what its sequences need; see policy/division.py."""

    def __init__(
        self, core: _core.SequencePool, config: ResolvedConfig, layers: Sequence[_core.LayerShape]
    ) -> None:
        """Share the pages of `core`; `layers`: the model's attention layers."""
        self._core = core
        self._config = config
        self._layers = layers
        self._all = config.headwise_plan(Budget("fraction", 1.0), layers)
        self._pages = config.pool_pages(config.options.budget, layers)
        core.set_pages(self._pages)
        self._pages_of: dict[int, int] = {}
        self._floors: dict[int, int] = {}
        """By the pages of a share, how many pages its protected entries take."""

    def are_possible(self, slots: Sequence[SequenceSlot], budget: Budget | None = None) -> bool:
        """Tell whether every equal part would hold the protected entries."""
        pages = self._pages if budget is None else self._config.pool_pages(budget, self._layers)
        try:
            for part in set(parts_by_weight(pages, [slot.weight for slot in slots])):
                self._plan(part)
        except BudgetError:
            return False
        return True

    def learn(self, slots: Sequence[SequenceSlot]) -> bool:
        """Measure what sequences would lose with fewer pages; returns whether that has changed."""
        news = False
        for slot in slots:
            curve = slot.measured_curve
            news = news or curve is not slot.loss_curve
            slot.loss_curve = curve
        return news

    def give(self, slots: Sequence[SequenceSlot], least_change: float = 0.0) -> None:
        """Set the share of every sequence: see Shares."""
        if not slots:
            return
        shares = self._divide(slots)
        former = [slot.pooled.share_pages for slot in slots]
        changes = [new - old for new, old in zip(shares, former, strict=True)]
        pairs = zip(changes, former, strict=True)
        if all(abs(change) < least_change * old for change, old in pairs):
            return
        for i in sorted(range(len(slots)), key=lambda i: changes[i]):
            slot = slots[i]
            whole = self._whole_length(slot, shares[i])
            slot.shared_for = whole or self._length(slot)
            held = slot.pooled.n_entries
            slot.pooled.take_share(shares[i], whole)
            slot.given_up += held - slot.pooled.n_entries

    def note_growth(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> None:
        """Share again if a text becomes longer than the shares have planned for."""
        if slot.expected > slot.shared_for:
            self.give(slots)

    def resize(self, budget: Budget, slots: Sequence[SequenceSlot]) -> None:
        """Share the pages of another budget; raises BudgetError, and keeps the pages, if they are
        too few.
        """
        pages = self._config.pool_pages(budget, self._layers)
        if not self.are_possible(slots, budget):
            self.give(slots)
            raise BudgetError(
                f"a KV budget of {budget} does not hold {len(slots)} conversations; close "
                "some, or give a larger one"
            )
        former, self._pages = self._pages, pages
        if pages >= former:
            self._core.set_pages(pages)
        self.give(slots)
        self._core.set_pages(pages)

    def hold_all_whole(self, slots: Sequence[SequenceSlot]) -> bool:
        """Tell whether the pages hold the whole expected texts of all sequences."""
        return sum(self._pages_for(self._length(slot)) for slot in slots) <= self._pages

    def hold_whole(self, slot: SequenceSlot, slots: Sequence[SequenceSlot]) -> bool:
        """Tell whether give() would let a sequence keep its whole text."""
        shares = self._divide(slots)
        i = slots.index(slot)
        return self._whole_length(slot, shares[i]) is not None

    def _whole_length(self, slot: SequenceSlot, share: int) -> int | None:
        """Return the longest text that a share of `share` pages keeps whole; None if that is
        shorter than the expected text of the sequence.
        """
        whole = WholeTexts(share, self._config.n_ctx, self._pages_for)
        return whole.length_for(max(slot.expected, slot.position, 1), self._length(slot))

    def _divide(self, slots: Sequence[SequenceSlot]) -> list[int]:
        parts = parts_by_weight(self._pages, [slot.weight for slot in slots])
        claims = [self._claim(slot, part) for slot, part in zip(slots, parts, strict=True)]
        return divide(self._pages, claims)

    def _length(self, slot: SequenceSlot) -> int:
        """Return the expected length of a text in tokens."""
        n_tokens = max(slot.expected, slot.position, 1)
        return min(-(-n_tokens // GROWTH_STEP) * GROWTH_STEP, self._config.n_ctx)

    def _claim(self, slot: SequenceSlot, part: int) -> Claim:
        curve = slot.measured_curve
        floor = part if curve is None else self._floor(part)
        return Claim(self._pages_for(self._length(slot)), floor, slot.weight, curve)

    def _pages_for(self, n_tokens: int) -> int:
        if n_tokens not in self._pages_of:
            self._pages_of[n_tokens] = self._all.pages_of(n_tokens)
        return self._pages_of[n_tokens]

    def _floor(self, part: int) -> int:
        """Return how many pages the protected entries of a share of `part` pages take."""
        if part not in self._floors:
            if len(self._floors) >= MOST_FLOORS:
                self._floors.clear()
            plan = self._plan(part)
            self._floors[part] = plan.pages_of(plan.floor_entries)
        return self._floors[part]

    def _plan(self, pages: int) -> HeadwisePlan:
        budget = Budget("bytes", max(1, pages * self._all.page_bytes))
        return self._config.headwise_plan(budget, self._layers)


_Kept = TypeVar("_Kept")


@dataclass(frozen=True)
class PoolStatus:
    """Hold the status of one session in its pool."""

    state: Literal["active", "idle", "swapped_out", "waiting"]
    """`active`: it reads or writes; `idle`: it may be swapped out for another session;
    `swapped_out`: it has no share; `waiting`: it waits for room in the pool.
    """
    idle_seconds: float
    """Seconds since the session's last tokens were read."""
    given_up: int
    """How many entries were evicted because the session's share shrank for other sessions."""
    is_swapped_out: bool = False
    """True if the session has no share; it may still wait for one."""
    swapped_entries: int = 0
    """How many entries of all KV heads the session gets back with its next token; 0 unless it is
    swapped out.
    """
    pages_bytes: int = 0
    """The bytes of the pool's pages that the session still holds while it is swapped out, including
    pages that it shares.
    """
    swapped_bytes: int = 0
    """The bytes that the session takes outside the pool while it is swapped out."""


class SharedPool:
    """Hold the budget of a model runner, and the sequences that are live or swapped out.

    Without a Pool, a session is the only sequence, which is live from the start and keeps its
    place.
    """

    def __init__(
        self,
        context: StoreContext,
        config: ResolvedConfig,
        kept_texts: KeptTexts,
        slots: list[SequenceSlot],
        is_waiting: Callable[[SequenceSlot], bool],
    ) -> None:
        """Share the pages or places of a context by the config's budget. If the context has
        neither, a single store has the whole budget.

        `slots`: all sequences, a list that changes; `kept_texts`: keeps the texts of those that are
        swapped out; `is_waiting`: tells whether tokens of a sequence wait to be read.
        """
        self.core = context.pool
        """The figures in bytes of what the sequences share; None for a session without a Pool."""
        self.kept_texts = kept_texts
        kept_texts.can_be_cut = not context.recurrent
        self._config = config
        self._slots = slots
        self._is_waiting = is_waiting
        self._n_sequences = config.options.n_sequences or 1
        self._free_places = list(range(self._n_sequences))
        self.evicted_by_gone = 0
        """How many entries were evicted from sequences that no longer exist."""
        self.n_let_go = 0
        """How many idle sessions were closed to make room."""
        self._shares: Shares = shares_of(context, config)
        if context.pages is not None:
            context.pages.on_full(self._free_pages)

    @property
    def is_private(self) -> bool:
        """Tell whether the pool belongs to a single session, whose place no other can take."""
        return self._shares.keeps_places

    @property
    def live(self) -> list[SequenceSlot]:
        """Return the sequences that have a share or a place in the pool."""
        return [slot for slot in self._slots if slot.live]

    def forget(self, slot: SequenceSlot) -> None:
        """Drop what a sequence has read, and free its place if others can take it."""
        if slot.swapped is not None:
            self.kept_texts.drop(slot.swapped)
            slot.swapped = None
        slot.expected = slot.shared_for = 0
        if self._shares.keeps_places:
            slot.store.truncate(0)
        elif slot.live:
            self._vacate(slot)
            self.share()

    def let_go(self, *, even_live: bool = True) -> bool:
        """Close the least recently used of the sessions that their users can do without: see
        IdleSession. Returns False if there is none.

        Without `even_live`, only sessions that are swapped out are considered, so that no share
        changes.
        """
        index = self.kept_texts.index
        for idle in index.of(IdleSession):
            if (even_live or not idle.session.cache.is_live) and index.remove(idle):
                idle.session.let_go()
                self.n_let_go += 1
                return True
        return False

    def _with_room(self, keep: Callable[[], _Kept]) -> _Kept:
        """Call `keep`, which needs room outside the pool, and close idle sessions until there is
        enough. Raises PoolError if no idle session is left, or if even an empty pool has no room
        for the text.
        """
        while True:
            try:
                return keep()
            except PoolError as error:  # noqa: PERF203  (each attempt may fail)
                if isinstance(error, TextTooLargeError) or not self.let_go():
                    raise

    def _free_pages(self) -> bool:
        """Free pages of the pool for a store; returns False if there are none to free. Raises
        PoolError if there is no room elsewhere for the text of a session.

        It may be called within a step, in which shares must not change.
        """
        try:
            return self.kept_texts.make_room()
        except PoolError:
            if not self.let_go(even_live=False):
                raise
            return True

    def _vacate(self, slot: SequenceSlot) -> None:
        """Free the pages of a sequence and llama.cpp's number for it; the caller has kept the
        content if it is still needed.
        """
        slot.pooled.set_aside()
        self._free_places.append(slot.store.sequence)
        slot.live = False

    def swap_out(self, slot: SequenceSlot) -> None:
        """Swap a sequence out, and free its pages for others. If there is no room for what is
        swapped out, sessions that were put aside are closed, maybe that of this sequence.

        Raises PoolError if there is still no room, and for a session without a pool.
        """
        self._check_shared("be swapped out")
        self._with_room(lambda: self._swap_out(slot))

    def _swap_out(self, slot: SequenceSlot) -> None:
        if not slot.live:
            return
        swapped = self._keep(slot, KeptText(slot.text))
        self._vacate(slot)
        slot.pooled.rollback.begin_from(swapped.tier.state.whole_from)
        slot.swapped = swapped

    def _keep(self, slot: SequenceSlot, kept: KeptText) -> KeptText:
        """Keep the content of a sequence as `kept`: by sharing its pages, or as a copy where a
        store cannot share them. Raises PoolError if there is no room for it.
        """
        texts, store = self.kept_texts, slot.pooled
        if slot.swapped is not None:
            return texts.copy(slot.swapped, kept)
        pages = store.checkpoint()
        if pages is None:
            return texts.put(kept, slot.position, slot.store.shift, slot.store.state())
        return texts.keep(kept, InPool.of(slot.position, pages, store.state_of))

    def _check_shared(self, what: str) -> None:
        if self._shares.keeps_places:
            raise PoolError(
                f"a session without a pool shares with no other, and cannot {what}; create it "
                "with a Pool"
            )

    def admit(self, slot: SequenceSlot) -> bool:
        """Make a sequence live; returns False if there is no room as long as another one reads.
        Raises PoolError if there can be no room.
        """
        # Everything below gets the same time, because a sequence may become idle meanwhile.
        now = time.monotonic()
        try:
            self.make_live(slot, now)
        except PoolError:
            if any(not each.is_idle(now) for each in self.live if each is not slot):
                return False
            raise
        return True

    def make_live(self, slot: SequenceSlot, now: float) -> None:
        """Give a sequence a share: first swap out sequences that are idle now, if not all texts
        have room, then shrink the shares of all. Raises PoolError if that does not make room.
        """
        full = self._swap_out_idle(slot, now)
        while not self._free_places or not self._shares.are_possible([*self.live, slot]):
            if full is None or not self.let_go():
                self.share()
                raise full or PoolError(
                    f"the pool holds {len(self.live)} conversations, and no more; wait for the end "
                    "of one, or give it more bytes (kv_budget) and sequences (n_sequences)"
                )
            full = self._swap_out_idle(slot, now)
        # The least number is taken, because sequences with neighbouring places can attend together
        # on a device.
        number = min(self._free_places)
        slot.pooled.take_place(number)
        self._free_places.remove(number)
        slot.live = True
        slot.last_step = now
        try:
            self.share()
            if slot.swapped is not None:
                self._resume(slot, slot.swapped)
        except BaseException:
            self._vacate(slot)
            self.share()
            raise

    def _swap_out_idle(self, slot: SequenceSlot, now: float) -> PoolError | None:
        """Swap out other sequences that are idle until there is a place for this one and room for
        the whole texts of all that are live. So no idle sequence loses entries to one that reads.
        Returns the error that ended this early, or None.
        """
        for each in self._idle(now):
            has_place = slot.live or bool(self._free_places)
            if has_place and self._shares.hold_all_whole(list({slot, *self.live})):
                break
            if each is not slot and not self._is_waiting(each):
                try:
                    self._swap_out(each)
                except PoolError as error:
                    return error
        return None

    def _idle(self, now: float) -> list[SequenceSlot]:
        """Return the live sequences that may be swapped out, the least recently used first."""
        return sorted(
            (slot for slot in self.live if slot.is_idle(now)), key=lambda slot: slot.last_step
        )

    def _resume(self, slot: SequenceSlot, swapped: KeptText) -> None:
        store, tier = slot.pooled, swapped.tier
        with self.kept_texts.staying(swapped):
            done = isinstance(tier, InPool) and store.go_on_from(tier.pages, ends=True)
        if not done:  # The text is outside the pool, or too few pages are free to shrink it.
            slot.store.load_state(self.kept_texts.leave_pool(swapped).saved())
        if swapped.awaits_prediction and slot.store.learning is not None:
            slot.store.learning.predict_held(swapped.position, slot.store.shift)
        slot.given_up += swapped.n_entries - store.n_entries
        self.kept_texts.drop(swapped)
        slot.swapped = None

    def fork(self, slot: SequenceSlot) -> KeptText:
        """Keep the content of a sequence for another one, in pages of both. Raises PoolError if
        there is no room for it, and for a session without a pool.
        """
        self._check_shared("be forked")
        return self._with_room(lambda: self._keep(slot, KeptText(slot.text.copy())))

    def give(self, slot: SequenceSlot, kept: KeptText) -> None:
        """Replace the content of a sequence by a text that was kept for it.

        The sequence is swapped out until it reads.
        """
        self.forget(slot)
        self.evicted_by_gone += slot.evicted
        store = slot.pooled
        slot.swapped, slot.text, slot.position = kept, kept.text, kept.position
        state = kept.tier.state
        store.rollback.begin_from(state.whole_from)
        store.set_evicted(state.evicted)
        slot.inherited = slot.text.evicted_before = state.evicted
        slot.mend()

    def keep_checkpoint(self, slot: SequenceSlot, tenant: Hashable) -> None:
        """Keep a checkpoint of the current content of a sequence: as shared pages, if the content
        is in the pool and nothing is frozen, or as a copy on a device, where pages cannot be
        shared.

        Does nothing otherwise, or if there is no room for the checkpoint.
        """
        swapped = slot.swapped
        is_there = slot.live if swapped is None else isinstance(swapped.tier, InPool)
        shares = is_there and self._config.freezing is None
        if shares or slot.pooled.copies_checkpoints:
            kept = KeptText(slot.text.to_come_back_to(), is_checkpoint=True, tenant=tenant)
            with suppress(PoolError):
                self._keep(slot, kept)

    def status_of(self, slot: SequenceSlot) -> PoolStatus:
        """Return the status of a sequence in the pool."""
        now, is_waiting = time.monotonic(), self._is_waiting(slot)
        idle_seconds, swapped = now - slot.last_step, slot.swapped
        if swapped is not None:
            return PoolStatus(
                "waiting" if is_waiting else "swapped_out",
                idle_seconds,
                slot.given_up,
                is_swapped_out=True,
                swapped_entries=swapped.n_entries,
                pages_bytes=swapped.n_pages * slot.pooled.page_bytes,
                swapped_bytes=swapped.n_bytes,
            )
        is_idle = slot.is_idle(now) and not is_waiting
        return PoolStatus("idle" if is_idle else "active", idle_seconds, slot.given_up)

    def share(self) -> None:
        """Set the share of every live sequence; sequences whose shares shrink evict first."""
        self._shares.give(self.live)

    def note_growth(self, slot: SequenceSlot) -> None:
        """Prepare for the expected growth of a live sequence's text, which may evict entries; idle
        sequences are swapped out before they lose any.
        """
        self._make_way(slot)
        if slot.store.sharing is not None:
            slot.store.sharing.expect(min(slot.expected, self.next_checkpoint(slot.position)))
        self._shares.note_growth(slot, self.live)

    def next_checkpoint(self, position: int) -> int:
        """Return the next position, behind this one, at which a checkpoint may be kept within a
        prompt; n_ctx if no checkpoints are kept.

        Budgets foresee no text beyond it, because the content of a checkpoint must not depend on
        text that follows.
        """
        if self.kept_texts.checkpoint_limit == 0:
            return self._config.n_ctx
        return (position // INTERVAL + 1) * INTERVAL

    def foresee(self, slot: SequenceSlot) -> None:
        """Enlarge the share of a live sequence for its expected text if the new share holds the
        whole text, once idle sequences have made room for it.

        If it does not, the share stays for now, so that echoes score the entries before any of them
        are evicted.
        """
        self._make_way(slot)
        if self._shares.hold_whole(slot, self.live):
            self._shares.note_growth(slot, self.live)

    def _make_way(self, slot: SequenceSlot) -> None:
        """Swap out idle sequences if a live one becomes longer than the shares have planned for, as
        far as there is room to swap them to.
        """
        if slot.expected > slot.shared_for and not self._shares.hold_all_whole(self.live):
            self._swap_out_idle(slot, time.monotonic())

    def note_losses(self, slots: Sequence[SequenceSlot]) -> None:
        """Share again if prompts, read in the last step, have shown what their sequences lose with
        fewer pages.
        """
        if self._shares.learn(slots):
            self._shares.give(self.live, LEAST_CHANGE)

    def resize(self, budget: Budget) -> None:
        """Change the pool's bytes, after swapping out idle sequences if necessary: larger shares
        take effect at once, smaller ones evict. Raises BudgetError for a budget that is too small.
        """
        now = time.monotonic()
        for slot in self._idle(now):
            if not self._shares.are_possible(self.live, budget):
                self.swap_out(slot)
        self._shares.resize(budget, self.live)
