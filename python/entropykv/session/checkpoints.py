"""Keep where the texts of a pool's sessions stood, to come back to and for others to go on from.

A session keeps a checkpoint where its text turns from what is read to what is written, and back: at
the end of every prompt, and of every answer. A turn that is edited or asked for again goes on from
there, whatever was evicted since; and whoever begins with the same text need not read it.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from entropykv.errors import PoolError, SettingsError
from entropykv.session.reuse import Demand, HeldText, Reuse, reuse_of
from entropykv.session.sequence import TokenSequence
from entropykv.session.swap_space import SwappedSequence, SwapSpace
from entropykv.settings.options import parse_bytes

INTERVAL = 1024
"""Tokens of a prompt after which a checkpoint is kept within it, where no later one could be cut
there: something was evicted, or layers are recurrent.
"""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Hold what a session was at a position."""

    sequence: TokenSequence
    swapped: SwappedSequence
    goes_back: bool
    """True where layers can go back to an earlier position, if nothing was evicted since."""
    tenant: Hashable = None
    """Whose text it is: sessions of another tenant never go on from it."""

    @property
    def position(self) -> int:
        """Return how many tokens were read."""
        return self.sequence.position

    @property
    def n_bytes(self) -> int:
        """Return the bytes that it takes besides the pool: of entries, and of text and logits."""
        return self.swapped.n_bytes + self.sequence.n_bytes

    def reuse(self, tokens: array[int], *, repeatable: bool) -> Reuse:
        """Decide how many tokens of a text it can spare reading; all of them only with logits.

        With `repeatable`, where the texts part before it, only what a reading from 0 would cut
        there.
        """
        held = HeldText.of(self.sequence, self._can_return_to)
        return reuse_of(held, tokens, Demand(is_cut=repeatable))

    def _can_return_to(self, position: int) -> bool:
        pages = self.swapped.pages
        return self.goes_back and pages is not None and pages.whole_from <= position


class Checkpoints:
    """Keep those of one pool: in its pages while there is room, then in `limit` bytes besides.

    The limit counts all that they take besides the pool. The one that was not used for longest goes
    first. Raises SettingsError for an impossible limit. To be used between two steps.
    """

    def __init__(self, swap_space: SwapSpace, limit: str | int) -> None:
        """Take the pool's swap_space; `limit` is bytes, such as `64MiB`, and 0 keeps none."""
        limit = 0 if limit == "0" else limit  # as the command line gives it
        n_bytes = parse_bytes(limit) if isinstance(limit, str) else limit
        if isinstance(n_bytes, bool) or not isinstance(n_bytes, int) or n_bytes < 0:
            raise SettingsError(
                f"the limit of checkpoints cannot be {limit!r}; give bytes such as 64MiB, or 0"
            )
        self.limit_bytes = n_bytes
        self._swap_space = swap_space
        self._kept: list[Checkpoint] = []
        swap_space.give_first = self.make_room

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Return the bytes that they take besides the pool."""
        return sum(each.n_bytes for each in self._kept)

    def keep(self, checkpoint: Checkpoint) -> None:
        """Keep one, in the place of its tenant's of the same text; drop those beyond the limit."""
        for each in self._kept:
            if (
                each.tenant == checkpoint.tenant
                and each.sequence.tokens == checkpoint.sequence.tokens
            ):
                self._drop(each)
                break
        self._kept.append(checkpoint)
        while self._kept and self.bytes > self.limit_bytes:
            self._drop(self._kept[0])

    def nearest(
        self, tokens: Sequence[int], tenant: Hashable = None, *, repeatable: bool = False
    ) -> tuple[Checkpoint | None, int]:
        """Return the tenant's one that spares most of a text, and how many tokens; None, 0: none.

        Those of others are not looked at, so that no time tells whether they have read the text.
        """
        text = array("i", tokens)
        best, most = None, 0
        for each in self._kept:
            if each.tenant != tenant:
                continue
            n = each.reuse(text, repeatable=repeatable).position
            # No token of this one is beyond the text, so that nothing is cut off.
            if n > most or (n == most > 0 and each.position == n):
                best, most = each, n
        if best is not None:
            self._kept.remove(best)
            self._kept.append(best)
        return best, most

    def make_room(self) -> bool:
        """Move one out of the pool, to the bytes besides it or for good; False: none is in it."""
        for each in self._kept:
            if each.swapped.pages is None or self._swap_space.stays(each.swapped):
                continue
            more = sum(each.swapped.section_bytes) - each.swapped.n_bytes
            if self.bytes + more > self.limit_bytes:
                self._drop(each)
                return True
            try:
                self._swap_space.leave_pool(each.swapped)
            except PoolError:  # without a place for it, it is dropped: it can be read again
                self._drop(each)
            return True
        return False

    def clear(self) -> None:
        """Drop all checkpoints."""
        while self._kept:
            self._drop(self._kept[0])

    def _drop(self, checkpoint: Checkpoint) -> None:
        self._kept.remove(checkpoint)
        self._swap_space.drop(checkpoint.swapped)
