"""Keep checkpoints of a pool's sessions, to roll back to and for other sessions to continue from.

A session keeps a checkpoint whenever it changes between reading and writing: at the end of every
prompt and of every answer. A turn that is edited or asked again continues from there, whatever was
evicted since; and another session that begins with the same text need not read it.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from entropykv.errors import PoolError, SettingsError
from entropykv.session.prefix_index import PrefixIndex
from entropykv.session.reuse import Demand, HeldText, reuse_of
from entropykv.session.sequence import TokenSequence
from entropykv.session.swap_space import SwappedSequence, SwapSpace
from entropykv.settings.options import parse_bytes

INTERVAL = 1024
"""After so many tokens of a prompt, a checkpoint is kept within it if later ones could not be cut:
something was evicted, or layers are recurrent.
"""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Hold the state of a session at a position."""

    sequence: TokenSequence
    swapped: SwappedSequence
    goes_back: bool
    """True if it can be cut to an earlier position, as long as nothing was evicted."""
    tenant: Hashable = None
    """The tenant of its text: sessions of other tenants never continue from it."""

    @property
    def position(self) -> int:
        """Return how many tokens had been read."""
        return self.sequence.position

    @property
    def n_bytes(self) -> int:
        """Return the bytes outside the pool: of entries, text and logits."""
        return self.swapped.n_bytes + self.sequence.n_bytes

    def saves(self, tokens: array[int], shared: int, demand: Demand) -> int:
        """Return how many tokens of a text need not be read; `shared`: how many both have in
        common.
        """
        held = HeldText.of(self.sequence, self._can_return_to)
        return reuse_of(held, tokens, demand, shared).position

    def _can_return_to(self, position: int) -> bool:
        return self.goes_back and self.swapped.whole_from <= position


class Checkpoints:
    """Keep the checkpoints of one pool: in free pages while there are some, then in `limit` bytes
    outside.

    The limit counts everything outside the pool. The least recently used checkpoint is dropped
    first. Raises SettingsError for an impossible limit. It must be used between two steps.
    """

    def __init__(self, swap_space: SwapSpace, limit: str | int) -> None:
        """Use the pool's swap space; `limit` is in bytes or text such as `64MiB`; 0 keeps none."""
        limit = 0 if limit == "0" else limit  # The command line passes text.
        n_bytes = parse_bytes(limit) if isinstance(limit, str) else limit
        if isinstance(n_bytes, bool) or not isinstance(n_bytes, int) or n_bytes < 0:
            raise SettingsError(
                f"the limit of checkpoints cannot be {limit!r}; give bytes such as 64MiB, or 0"
            )
        self.limit_bytes = n_bytes
        self._swap_space = swap_space
        self._kept: PrefixIndex[Checkpoint] = PrefixIndex()
        swap_space.give_first = self.make_room

    def __len__(self) -> int:
        """Return how many checkpoints are kept."""
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Return the bytes that they take outside the pool."""
        return sum(each.n_bytes for each in self._kept)

    def keep(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint instead of the tenant's earlier one of the same text; drops those
        beyond the limit.
        """
        tokens = checkpoint.sequence.tokens
        for each in self._kept.same(tokens, checkpoint.tenant):
            self._drop(each)
        self._kept.add(checkpoint, tokens, checkpoint.tenant)
        excess = self.bytes - self.limit_bytes
        for each in self._kept:
            if excess <= 0:
                break
            excess -= each.n_bytes
            self._drop(each)

    def nearest(
        self, tokens: Sequence[int], tenant: Hashable, demand: Demand
    ) -> tuple[Checkpoint | None, int]:
        """Return the tenant's checkpoint that saves most reading, and how many tokens; (None, 0) if
        none.

        Checkpoints of others are not examined, so that the time does not reveal whether they exist.
        """
        text, lost = array("i", tokens), []

        def saves(checkpoint: Checkpoint, shared: int) -> int:
            if checkpoint.swapped.is_lost:
                lost.append(checkpoint)
                return 0
            return checkpoint.saves(text, shared, demand)

        best, most = self._kept.nearest(text, tenant, saves)
        for each in lost:
            self._drop(each)
        if best is not None:
            self._kept.touch(best)
        return best, most

    def make_room(self) -> bool:
        """Move a checkpoint out of the pool, or drop it; returns False if none is in the pool."""
        for each in self._kept:
            if each.swapped.pages is None or self._swap_space.stays(each.swapped):
                continue
            more = sum(each.swapped.section_bytes) - each.swapped.n_bytes
            if self.bytes + more > self.limit_bytes:
                self._drop(each)
                return True
            try:
                self._swap_space.leave_pool(each.swapped)
            except PoolError:  # Without room outside the pool, drop it; the text can be read again.
                self._drop(each)
            return True
        return False

    def clear(self) -> None:
        """Drop all checkpoints."""
        for each in self._kept:
            self._drop(each)

    def _drop(self, checkpoint: Checkpoint) -> None:
        self._kept.remove(checkpoint)
        self._swap_space.drop(checkpoint.swapped)
