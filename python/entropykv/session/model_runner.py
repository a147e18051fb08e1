"""Hold a loaded model, and the budget that one or several sessions share."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from entropykv.errors import EntropyKVError, PoolError, SettingsError
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.projector import Projector
from entropykv.llamacpp.threads import Threads
from entropykv.model.geometry import read_loadable
from entropykv.policy.resolved_config import config_for
from entropykv.session.drafter import Drafter, DraftModels, FunctionDrafter, NgramDrafter
from entropykv.session.drafting import StepCosts
from entropykv.session.images import ImageLimits, Images
from entropykv.session.kept_texts import KeptTexts
from entropykv.session.scheduler import Scheduler, Work
from entropykv.session.second_readings import SecondReadings, longest_part
from entropykv.session.sequence import TokenSequence
from entropykv.session.shared_pool import SequenceSlot, SharedPool
from entropykv.session.stats import Trajectory
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.cores import OtherWork
from entropykv.settings.options import Budget, is_number
from entropykv.store.device import DeviceContext
from entropykv.store.factory import StoreFactory
from entropykv.store.protocol import Store
from entropykv.store.step import MicroBatch, decode_parts

_CHECK_INTERVAL = 0.02
"""The seconds after which a thread that waits for room checks again whether another session is
idle.
"""

_CLOSED = "the session is closed; make a new one"
_HELD = ("frozen_entries", "frozen_bytes", "frozen_sketch_bytes", "frozen_overhead_bytes")
_COUNTED = (
    *("eviction_seconds", "rebases", "cold_seconds"),
    *("entries_frozen", "entries_restored", "entries_recalled"),
)
"""The names of Store.counters() in which _HELD is what a store holds now, and _COUNTED what it has
counted since it was made.
"""


class ModelRunner:
    """Hold the model, its context, and everything that its sequences share."""

    images: Images | None = None
    """The object that reads prompts with images; None if no projector is open."""
    draft_model: DraftModels | None = None
    """The small model that guesses tokens for the sequences; None if none is open."""

    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        options: CacheOptions,
        *,
        verbose: bool = False,
        ends_with_session: bool = False,
    ) -> None:
        """Take the model. One that is given by its path is loaded after everything is checked.

        `ends_with_session`: the runner belongs to its only session, and closes when the session
        closes. Raises the errors of Session.
        """
        others = OtherWork()
        self._ends_with_session = ends_with_session
        self.n_sequences = options.n_sequences or 1
        self.kept_texts = KeptTexts(options.swap, options.swap_limit, options.checkpoint_limit)
        """The checkpoints, and the texts of sequences that are swapped out."""
        geometry = model.geometry if isinstance(model, Model) else read_loadable(model)
        config = config_for(options, geometry)
        self.budget = options.budget
        self.model = (
            model
            if isinstance(model, Model)
            else Model(model, n_gpu_layers=options.n_gpu_layers, verbose=verbose, geometry=geometry)
        )
        self.closed = False
        self.slots: list[SequenceSlot] = []
        self.sessions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Sessions of a pool by their numbers; the references are weak."""
        self._slots_made = 0
        self._evicted_by_gone = 0
        self._counted_by_gone: Counter[str] = Counter()
        self._leaving: deque[SequenceSlot] = deque()
        """The slots that will be removed after the running step: see remove_slot_later()."""
        self._ends = False
        """True if the runner closes after the running step."""
        self._in_step = False
        try:
            self.factory = StoreFactory(self.model, config, partial(longest_part, self.model))
            """The object that makes stores; it has their context, and the facts that
            never change.
            """
        except BaseException:
            self.model.close()
            raise
        context = self.factory.context
        self.config = self.factory.config
        """The resolved options, with the store that serves the model."""
        self.second_readings = SecondReadings(
            self.model, self.config, self.slots, self.kept_texts.await_prediction
        )
        """The object that decides what is read twice, and what is learnt from it."""
        # A step reads a piece of one prompt, and a single token and drafts of each other sequence.
        n_tokens = longest_part(self.model, self.config) + self.n_sequences - 1
        n_tokens += self.n_sequences * self.config.n_drafts
        self._batch = MicroBatch(n_tokens, self.model.n_vocab)
        self.step_costs = StepCosts()
        self._threads = Threads(
            self.config.options,
            let_help=context.let_help,
            only_embeds=context.only_embeds,
            others=others,
        )
        self.scheduler = Scheduler(
            self._admit,
            self._step,
            together=context.reads_together,
            least_patience=context.least_patience,
            tidy=self._tidy,
        )
        self.shared = SharedPool(
            context,
            self.config,
            self.kept_texts,
            self.slots,
            self.scheduler.is_waiting,
        )
        """The budget, and the sequences that share it; without a Pool, there is only one."""

    @property
    def untaught(self) -> str | None:
        """Return a sentence for the user if policy `auto` ranks entries by the last queries alone,
        because the device store has no predictor and learns none. None if there is a predictor, for
        other stores and policies, with freezing, and for a model whose RoPE allows no predictor on
        a device.
        """
        context = self.factory.context
        if isinstance(context, DeviceContext) and context.hook.rope_obstacle:
            return None
        return self.config.untaught

    def add_slot(self, weight: float = 1.0) -> SequenceSlot:
        """Return a slot with a store for another sequence, which gets a share of the pool when it
        reads. If there is a single place, a session that was put aside is closed for it.

        Raises SettingsError for a weight outside of 0.001 to 1000, PoolError if another sequence
        keeps the only place, BudgetError without memory.
        """
        if not is_number(weight) or not 0.001 <= weight <= 1000.0:
            raise SettingsError(f"a weight cannot be {weight!r}; use a number from 0.001 to 1000")
        with self.scheduler.between_steps():
            if self.shared.is_private and self.slots:
                if not self.let_go():
                    raise PoolError(
                        "the pool holds one conversation, and no other; close its session"
                    )
                self._tidy()
            store = self.factory.make(self.budget)
            self.second_readings.watch(store)
            slot = SequenceSlot(
                store,
                weight,
                self._slots_made,
                TokenSequence(self.config.n_ubatch),
                live=self.shared.is_private,
            )
            # The store may be that of an earlier session, which has left its place.
            slot.inherited = slot.text.evicted_before = store.evicted
            if self.config.freezing is not None:
                slot.trajectory = Trajectory(store.facts.n_kv_heads)
            self._slots_made += 1
            self.slots.append(slot)
            return slot

    def let_go(self) -> bool:
        """Close a session that was put aside; returns False without one: SharedPool.let_go()."""
        with self.scheduler.between_steps():
            return self.shared.let_go()

    @property
    def stores(self) -> list[Store]:
        """Return the stores of all sequences, and the spare one that waits for the next sequence,
        if any.
        """
        spare = [] if self.factory.spare is None else [self.factory.spare]
        return [*(slot.store for slot in self.slots), *spare]

    def drafter(self) -> Drafter | None:
        """Make an object that guesses the tokens of a sequence; None if no tokens are guessed."""
        config = self.config
        if config.spec_type == "none":
            return None
        if self.draft_model is not None:
            return self.draft_model.drafter()
        given = config.options.spec_draft_model
        return FunctionDrafter(given) if callable(given) else NgramDrafter()

    def remove_slot(self, slot: SequenceSlot) -> None:
        """Free a sequence after the running step; the others get its share.

        If the sequence belongs to a session without a pool, the model is freed, too. Another thread
        that reads the sequence gets an EntropyKVError, at the latest with its next micro-batch.
        """
        if self.scheduler.is_forked:
            return  # The system frees the fork's memory; everything else belongs to its parent.
        self.refuse(slot)
        self.remove_slot_later(slot)
        with self.scheduler.between_steps(even_closed=True):
            pass  # Entering and leaving the block removes the slot.

    def remove_slot_later(self, slot: SequenceSlot) -> None:
        """Free a sequence before the next step, without waiting.

        The garbage collector may call this in any thread, and within a step. A session without a
        Pool has no next step, so everything is freed at once.
        """
        slot.gone = True
        if self.scheduler.is_forked:
            return
        self._leaving.append(slot)
        if self._ends_with_session:
            self.close()

    def check_usable(self, slot: SequenceSlot) -> None:
        """Raise EntropyKVError for a sequence that is closed, or whose last decode failed."""
        self.check_open(slot)
        if slot.broken:
            raise EntropyKVError("the last decode failed half-way; call reset() first")

    def check_open(self, slot: SequenceSlot) -> None:
        """Raise EntropyKVError for a sequence that is closed, or whose pool is closed."""
        if self.closed or slot.gone:
            raise EntropyKVError(_CLOSED)

    def refuse(self, slot: SequenceSlot) -> None:
        """Refuse further tokens of a sequence; a thread that waits for tokens of the sequence to be
        read gets a PoolError.
        """
        slot.gone = True
        self.scheduler.cancel(slot, _CLOSED)

    def _tidy(self) -> None:
        """Remove the slots, or close the runner, as was asked for during a step or during an action
        between two steps.
        """
        if self._in_step:
            return
        while self._leaving:
            self._leave(self._leaving.popleft())
        if self._ends:
            self._free()

    def _leave(self, slot: SequenceSlot) -> None:
        if slot not in self.slots:
            return
        self.slots.remove(slot)
        keeps_place = self.shared.is_private and not self.closed
        if not keeps_place:
            counters = slot.store.counters()
            self._counted_by_gone.update({name: counters.get(name, 0) for name in _COUNTED})
        if keeps_place or not self.shared.is_private:
            self.shared.forget(slot)
        self._evicted_by_gone += slot.evicted
        if keeps_place:  # The next session uses this store.
            self.factory.spare = slot.store
        else:
            slot.store.close()

    @contextlib.contextmanager
    def exclusively(self, slot: SequenceSlot) -> Iterator[None]:
        """Let the `with` block change a sequence between two steps.

        Raises EntropyKVError if the session of the sequence or the pool is closed. Also raises it
        within a step, where the garbage collector may close a generator.
        """
        with self.scheduler.between_steps():
            if self._in_step:
                raise EntropyKVError("a step is being made; change the session after it")
            self.check_open(slot)
            yield

    @property
    def evictions(self) -> int:
        """Return how many entries were evicted so far, including sequences that no longer exist."""
        gone = self._evicted_by_gone + self.shared.evicted_by_gone
        return gone + sum(slot.evicted for slot in self.slots)

    def counters(self) -> dict[str, Any]:
        """Return sums over all stores, by name: of frozen entries now, and of figures that stores
        have counted, including those of sequences that no longer exist.
        """
        sums = Counter(self._counted_by_gone)
        for store in self.stores:
            counters = store.counters()
            sums.update({name: counters.get(name, 0) for name in (*_HELD, *_COUNTED)})
        return dict(sums)

    @contextlib.contextmanager
    def live_store(self, slot: SequenceSlot) -> Iterator[Store]:
        """Give the `with` block the store of a sequence between two steps, after making the
        sequence live. Waits until other sequences leave room for it; raises PoolError if there can
        be none, and EntropyKVError as exclusively() does.
        """
        while True:
            with self.exclusively(slot):
                if slot.live or self.shared.admit(slot):
                    yield slot.store
                    return
            time.sleep(_CHECK_INTERVAL)

    def _admit(self, work: Work) -> bool:
        """Make a waiting sequence live; returns False if others must be read first. An error is
        kept in the part of the work.
        """
        slot = cast(SequenceSlot, work.owner)
        try:
            self.check_open(slot)
            if not (slot.live or self.shared.admit(slot)):
                return False
            # A part that is only an echo has no tokens: budgets must not change before the echo has
            # scored the entries.
            if work.part.tokens:
                if not self.shared.is_private:
                    self.shared.note_growth(slot)
                elif slot.store.sharing is not None:
                    slot.store.sharing.expect(slot.expected)
        except Exception as error:
            work.part.error = error
        return True

    def resize(self, budget: Budget) -> None:
        """Change the budget of the runner: a larger one takes effect at once, a smaller one evicts.
        Raises BudgetError for one that is too small.
        """
        with self.scheduler.between_steps():
            self.shared.resize(budget)
            self.budget = budget

    def _step(self, works: list[Work]) -> None:
        self._in_step = True
        parts = [work.part for work in works]
        n_tokens = sum(len(part.tokens) + len(part.echo) for part in parts)
        reads_twice = self.config.reads_twice
        teaches = reads_twice and self.second_readings.prepare(parts)
        start = time.monotonic()
        try:
            with self._threads.set_for_step(parts[0].store.context.handle, n_tokens):
                decode_parts(parts, self._batch, self.model.name)
        finally:
            self._in_step = False
        now = time.monotonic()
        as_usual = not self._threads.tried and all(p.error is None for p in parts)
        if self.config.n_drafts and as_usual and all(p.is_single for p in parts):
            self.step_costs.note(sum(len(part.tokens) for part in parts), now - start)
        n_writing = sum(part.is_single for part in parts)
        for work in works:
            slot = cast(SequenceSlot, work.owner)
            slot.last_step = now
            slot.n_others = n_writing - int(work.is_single)
            slot.half_read = work.part.error is not None and not work.part.untouched
            if work.part.error is None:
                slot.position = work.part.position + work.part.n_read
                if work.part.echo:
                    self.second_readings.note(
                        slot, work.part.position, work.part.tokens, teaches=teaches
                    )
        if reads_twice:
            self.second_readings.learn()
        if not self.shared.is_private:
            prompts = [work for work in works if not work.is_single and work.part.error is None]
            self.shared.note_losses([cast(SequenceSlot, work.owner) for work in prompts])

    def open_projector(
        self,
        path: str | os.PathLike[str],
        limits: ImageLimits | None = None,
        *,
        use_gpu: bool = False,
    ) -> Images:
        """Open a projector for the model, and close the former: see Session.open_projector()."""
        threads = self.config.options.threads_batch
        images = Images(Projector(path, self.model, n_threads=threads, use_gpu=use_gpu), limits)
        former, self.images = self.images, images
        if former is not None:
            former.close()
        return images

    def close(self) -> None:
        """Free everything after the running step.

        Other threads that read or wait get an EntropyKVError. If the garbage collector calls this
        within a step, everything is freed at its end.
        """
        if self.scheduler.is_forked:
            return
        self._ends = True
        with self.scheduler.between_steps(even_closed=True):
            pass  # Entering and leaving the block closes the runner.

    def _free(self) -> None:
        if self.closed:
            return
        self.closed = True
        is_private = self.shared.is_private
        self.scheduler.close(_CLOSED if is_private else "the pool is closed; make a new one")
        self.kept_texts.drop_checkpoints()
        for slot in list(self.slots):
            slot.gone = True
            self._leave(slot)
        self._batch.close()
        self.factory.close()
        if self.images is not None:
            self.images.close()
        if self.draft_model is not None:
            self.draft_model.close()
        self.model.close()
