"""Go back in what a sequence has read, or to a checkpoint of its pool: `session.text`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from entropykv.errors import ContextError, PoolError
from entropykv.session.kept_texts import KeptText
from entropykv.session.model_runner import ModelRunner
from entropykv.session.reuse import Demand, HeldText
from entropykv.session.shared_pool import SequenceSlot


class SessionText:
    """Truncate the text of a sequence, keep checkpoints of it, and return to them.

    reuse.py decides from where reading can continue.
    """

    def __init__(self, runner: ModelRunner, slot: SequenceSlot, tenant: Hashable = None) -> None:
        """Serve one slot of a model runner; `tenant`: whose checkpoints it may return to."""
        self._runner = runner
        self._slot = slot
        self._tenant = tenant

    def held(self) -> HeldText:
        """Describe the text that was read, for reuse_of(): see HeldText."""
        slot = self._slot
        slot.note_evictions()
        return HeldText(
            slot.text,
            slot.store.can_return_to,
            is_whole=not slot.broken,
            n_sure=slot.store.reach().sure,
            n_ctx=self._runner.config.n_ctx,
        )

    def truncate(self, position: int) -> None:
        """Roll back to `position` tokens; 0 is possible even after a failed decode.

        Entries before `position` that were evicted do not return: see HeldText.can_return_to().
        Raises ContextError for a position beyond the text, or if recurrent layers, sliding windows
        or the flat store cannot roll back that far; PoolError if the pool has no room for the
        session; EntropyKVError for a session that is closed.
        """
        slot, text = self._slot, self._slot.text
        if position == 0:
            slot.broken = False
        self._runner.check_usable(slot)
        if not 0 <= position <= text.position:
            raise ContextError(f"cannot truncate to position {position}; give 0 to {text.position}")
        slot.note_evictions()
        if position == 0 or position < text.position:
            self._truncate_store(position)
            slot.half_read = False
            text.truncate(position, self._runner.config.n_ctx)
            if slot.trajectory:
                slot.trajectory.truncate(position)

    def truncate_or_clear(self, position: int) -> bool:
        """Roll back to a position and return True; if truncate() raises ContextError or PoolError,
        drop the whole text and return False.
        """
        try:
            self.truncate(position)
        except (PoolError, ContextError):
            self.truncate(0)
            return False
        return True

    def _truncate_store(self, position: int) -> None:
        slot = self._slot
        if position == 0:
            with self._runner.exclusively(slot):
                self._runner.shared.forget(slot)
        else:
            with self._runner.live_store(slot) as store:
                store.truncate(position)
        slot.position = slot.expected = slot.shared_for = position

    def return_to_prompt(self, position: int, end: int) -> bool:
        """Roll back to `position`, the end of the last prompt, and restore the logits there.

        Returns False, and changes nothing, if the last prompt did not end at `position`, if
        something may be evicted before the text has `end` tokens (see HeldText.keeps_all_until()),
        or if truncate() raises ContextError. Raises the other errors of truncate().
        """
        logits = self._slot.text.parts.logits_at(position)
        if logits is None or not self.held().leads_back_to_prompt(position, end):
            return False
        try:
            self.truncate(position)
        except ContextError:  # A smaller share has dropped what was outside of the windows.
            return False
        self._slot.text.logits = logits
        return True

    def checkpoint_at_turn(self, *, writes: bool) -> None:
        """Keep a checkpoint if reading a prompt follows writing, or the reverse; `writes`: the next
        tokens are written.
        """
        slot = self._slot
        if slot.text.position and writes != slot.writes:
            self.keep_checkpoint()
        slot.writes = writes

    def checkpoint_at_interval(self, n_tokens: int) -> None:
        """Keep a checkpoint within a prompt if its last `n_tokens` have reached a place for one,
        and later checkpoints could not be cut to less text: because something was evicted, or
        because layers are recurrent.
        """
        position = self._slot.text.position
        crossed = self._runner.shared.next_checkpoint(position - n_tokens) <= position
        if crossed and (self._slot.store.evicted > 0 or self._slot.store.context.recurrent):
            self.keep_checkpoint()

    def keep_checkpoint(self) -> None:
        """Keep a checkpoint of the current state, for this sequence and for others with the same
        beginning; do nothing if nothing was read, if a decode failed, or if the pool keeps none.
        """
        slot, runner = self._slot, self._runner
        if runner.kept_texts.checkpoint_limit == 0 or slot.text.position == 0 or slot.broken:
            return
        with runner.exclusively(slot):
            slot.note_evictions()
            runner.shared.keep_checkpoint(slot, self._tenant)

    def fork(self) -> KeptText | None:
        """Keep the text for another sequence, which continues from it; None if nothing was read.

        Raises PoolError if nothing more can be swapped out, and for a session without a pool.
        """
        slot = self._slot
        if not slot.text.position:
            return None
        with self._runner.exclusively(slot):
            slot.note_evictions()
            return self._runner.shared.fork(slot)

    def go_on_from(self, kept: KeptText) -> None:
        """Replace the sequence's text by one that was kept for it, and continue from there."""
        with self._runner.exclusively(self._slot):
            self._runner.shared.give(self._slot, kept)

    def return_to_checkpoint(
        self,
        tokens: Sequence[int],
        beyond: int = 0,
        *,
        repeatable: bool = False,
        reads_question: bool = False,
    ) -> bool:
        """Roll back to the checkpoint with the longest common beginning, if it exceeds `beyond`
        tokens.

        It may be a checkpoint of any session of its tenant in the pool, whatever was evicted since.
        If `tokens` begin with the whole text of the checkpoint, the logits at its end are restored,
        too. Returns False, and changes nothing, if there is none (a session without a pool keeps
        none) or no room to swap out the current text. Returns False, and leaves the session empty,
        if the checkpoint cannot be cut. `repeatable`: only roll back to a position where a reading
        from 0 also starts a micro-batch, or to a checkpoint itself, so that asking again gives the
        same numbers. `reads_question`: not to a place within or behind a prompt that is asked
        again, which is then read again.
        """
        demand = Demand(is_cut=repeatable, reads_question=reads_question)
        runner, slot = self._runner, self._slot
        kept_texts = runner.kept_texts
        if kept_texts.checkpoint_limit == 0:
            return False
        with runner.exclusively(slot):
            found, position = kept_texts.nearest(tokens, self._tenant, demand)
            if found is None or position <= beyond:
                return False
            try:
                kept = kept_texts.copy(found, KeptText(found.text.copy()))
            except PoolError:  # There is no room to swap out the current state.
                return False
            self.go_on_from(kept)
        return self.truncate_or_clear(position)
