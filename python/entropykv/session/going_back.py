"""Go back to where a session can return, and say what is read again from there: RollbackMixin."""

from __future__ import annotations

from collections.abc import Sequence

from entropykv.errors import ContextError
from entropykv.session.checkpoints import INTERVAL
from entropykv.session.session_cache import SessionCache
from entropykv.session.stats import SessionCounts


class RollbackMixin(SessionCache):
    """Be a session that can forget the end of its text, or all of it."""

    _writes = False
    """True where the latest tokens were written one by one, and are not a prompt."""

    @property
    def reusable_from(self) -> int:
        """Return where the text ended when an entry was last evicted; 0 if none ever was.

        Truncating to it or beyond leaves the entries that were there when the session stood there.
        After truncate() to an earlier one, more than n_ctx: entries before it are missing that a
        session that never read on would have, until reset().
        """
        self._sequence.note_evictions(self.evicted)
        return self._sequence.reusable_from

    def can_return_to(self, position: int) -> bool:
        """Tell whether truncate(position) leaves the entries of a session that never read on.

        Always so for 0. Where it is False, the tokens must be read again. With freezing, which of
        them are frozen may be others.
        """
        if position == 0:
            return True
        if self._broken or not self.reusable_from <= position <= self._sequence.position:
            return False
        return position == self._sequence.position or self._store.can_return_to(position)

    @property
    def is_whole(self) -> bool:
        """Tell whether no decode has failed half-way since the last reset()."""
        return not self._broken

    def repeatable_from(self, position: int, end: int) -> int:
        """Return where to truncate to, so that the text after it is read as it would be from 0.

        The result is at most `position`, where the text departs from what was read; `end` is how
        long it may get. It is 0 where something may be evicted before `end`: what is kept then
        depends on all queries that were ever asked.
        """
        if min(end, self.n_ctx) > self.sure_entries:
            return 0
        return self.cut_before(position)

    def cut_before(self, position: int) -> int:
        """Return the last place up to `position` where a reading of the text was cut.

        It is 0 where the session cannot return there: see can_return_to().
        """
        begin = self._sequence.parts.begin_before(position)
        return begin if self.can_return_to(begin) else 0

    @property
    def end_of_prompt(self) -> int:
        """Return where the last prompt ended: what follows was written token by token."""
        return self._sequence.parts.end_of_prompt

    def return_to_prompt(self, position: int, end: int) -> bool:
        """Go back to the end of the last prompt, whose logits are those of the session again.

        Returns False, and nothing changes, where the last prompt did not end at `position`, or
        something may be evicted before `end`: see repeatable_from().
        """
        logits = self._sequence.parts.logits_at(position)
        sure = min(end, self.n_ctx) <= self.sure_entries
        if logits is None or not sure or not self.can_return_to(position):
            return False
        self.truncate(position)
        self._sequence.logits = logits
        return True

    def truncate(self, position: int) -> None:
        """Go back to `position` tokens; 0 is possible after a decode that failed, too.

        What was evicted before `position` does not come back: see can_return_to(). ContextError
        where a model's recurrent layers or sliding windows cannot go back that far.
        """
        if position == 0:
            self._broken = False
        self._check_usable()
        if not 0 <= position <= self._sequence.position:
            raise ContextError(
                f"cannot truncate to position {position}; give 0 to {self._sequence.position}"
            )
        self._sequence.note_evictions(self.evicted)
        if position == 0 or position < self._sequence.position:
            self._truncate_store(position)
            self._sequence.truncate(position, self.n_ctx)
            if self.trajectory:
                self.trajectory.truncate(position)

    def _truncate_store(self, position: int) -> None:
        shared = self._runner.shared
        if position == 0 and shared is not None:
            with self._runner.exclusively(self._slot):
                shared.forget(self._slot)
        else:
            with self._runner.live_store(self._slot) as store:
                store.truncate(position)
        self._slot.position = self._slot.expected = self._slot.shared_for = position

    def note_turn(self, *, writes: bool) -> None:
        """Keep a checkpoint where the text turns from what is read to what is written, or back."""
        if self.position and writes != self._writes:
            self.keep_checkpoint()
        self._writes = writes

    def _note_interval(self, n_tokens: int) -> None:
        """Keep a checkpoint within a prompt, where no later one could be cut there."""
        crossed = self.position // INTERVAL > (self.position - n_tokens) // INTERVAL
        if crossed and (self.evicted > 0 or self._runner.recurrent):
            self.keep_checkpoint()

    def keep_checkpoint(self) -> None:
        """Keep where the text stands, to come back to: the sessions of a pool do."""

    def return_to_checkpoint(
        self,
        tokens: Sequence[int],  # noqa: ARG002
        beyond: int = 0,  # noqa: ARG002
        *,
        repeatable: bool = False,  # noqa: ARG002
    ) -> bool:
        """Go back to where most of a text was read, if that is more than `beyond` tokens of it.

        Sessions of a pool can, whatever was evicted since; False, and nothing changes, otherwise.
        `repeatable`: only to where a text that is read from 0 is cut, too, or to a checkpoint
        itself, so that asking again gives the same numbers.
        """
        return False

    def reset(self) -> None:
        """Forget every token; counters start again."""
        self.truncate(0)
        self._clear_counts()

    def _clear_counts(self) -> None:
        self._counts = SessionCounts()
        if self.trajectory:
            self.trajectory.clear()
