"""Keep the texts of a pool that no session reads now, with everything that is needed to continue
them.

A text is kept for its session, which is idle, or as a checkpoint, from which every session of its
tenant may continue. An idle session that its user can do without is an IdleSession: see
SharedPool.let_go(). A session keeps a checkpoint whenever it changes between reading and writing:
at the end of every prompt and of every answer. So a turn that is edited or asked again continues
from there, whatever was evicted since, and a text with the same beginning need not be read again.

Each text lies in a tier: in pages of the pool until these are needed, then in memory or in a file.
The order of last use says which text leaves the pool first, or is dropped: checkpoints before texts
of idle sessions, because the text of a checkpoint can be read again.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from entropykv.errors import PoolError, SessionFileError, SettingsError
from entropykv.session.reuse import Demand, HeldText, PrefixIndex, reuse_of
from entropykv.session.sequence import TokenSequence
from entropykv.settings.freezing import DISK, RAM
from entropykv.settings.options import parse_bytes
from entropykv.store.protocol import LOST, SavedState, StoreCheckpoint, StoreState


class TextTooLargeError(PoolError):
    """Raised if there is no room for a text, even if no other one were kept."""


@dataclass(frozen=True)
class InPool:
    """Hold what a store has kept of a text, in pages of the pool."""

    position: int
    pages: StoreCheckpoint
    to_state: Callable[[StoreCheckpoint], StoreState]
    """A function that converts the pages to a state outside the pool."""
    state: StoreState
    """What `to_state` returns for the pages, but without sections, which are made only when the
    text leaves the pool.
    """

    @classmethod
    def of(
        cls,
        position: int,
        pages: StoreCheckpoint,
        to_state: Callable[[StoreCheckpoint], StoreState],
    ) -> InPool:
        """Hold the pages of a text that had been read up to a position."""
        return cls(position, pages, to_state, replace(to_state(pages), sections=iter(())))

    @property
    def n_bytes(self) -> int:
        """Return the bytes that the checkpoint holds outside the pool."""
        return self.pages.n_bytes

    @property
    def is_lost(self) -> bool:
        """Tell whether entries are lost, because someone has changed the file that their pages are
        mapped from.
        """
        return self.pages.is_lost

    def copy(self) -> InPool:
        """Return another owner of the same pages."""
        return replace(self, pages=self.pages.copy())

    def drop(self) -> None:
        """Give the pages back to the pool; nothing can be read from them afterwards."""
        self.pages.drop()


@dataclass(frozen=True)
class Outside:
    """Hold what a store has kept of a text, in memory or in a file."""

    position: int
    shift: int
    state: StoreState
    """The state; its sections were read already and are in `sections`."""
    sections: Sequence[bytes] | BinaryIO
    """The bytes of the sections, or a file that has them. The file has no name, so that it
    disappears with the process in any case.
    """
    is_lost: bool = False
    """True if entries were lost before the text left the pool."""

    @property
    def n_bytes(self) -> int:
        """Return how many bytes the sections of the saved state take together."""
        return sum(self.state.section_bytes)

    def saved(self) -> SavedState:
        """Return the state with sections that may be changed.

        Raises PoolError if its file cannot be read, and SessionFileError for lost entries.
        """
        if self.is_lost:
            raise SessionFileError(LOST)
        state, held = self.state, self.sections
        if isinstance(held, Sequence):
            sections = [bytearray(section) for section in held]
        else:
            held.seek(0)
            sections = [bytearray(held.read(n)) for n in state.section_bytes]
        if [len(section) for section in sections] != state.section_bytes:
            raise PoolError(
                "a swapped out conversation cannot be read any more; read its text again"
            )
        return SavedState(
            self.position,
            state.entries,
            state.evicted,
            self.shift,
            sections,
            state.recalls_now,
            state.whole_from,
        )

    def copy(self) -> Outside:
        """Return another owner of the same sections; raises PoolError if the file cannot be opened
        again.
        """
        if isinstance(self.sections, Sequence):
            return self
        try:
            return replace(self, sections=os.fdopen(os.dup(self.sections.fileno()), "rb"))
        except OSError as error:
            raise PoolError(
                f"a swapped out conversation cannot be opened once more ({error.strerror})"
            ) from error

    def drop(self) -> None:
        """Close the file, if the sections are in one."""
        if not isinstance(self.sections, Sequence):
            self.sections.close()


@dataclass(eq=False)
class KeptText:
    """Hold a text, and what its store had kept of it when it was last read."""

    text: TokenSequence
    is_checkpoint: bool = False
    """True if the text is a checkpoint, which may be dropped; False if its session continues from
    it.
    """
    tenant: Hashable = None
    """The tenant, whose sessions may continue from the text if it is a checkpoint."""
    tier: InPool | Outside = field(init=False)
    """What a store had kept of the text, and where that is now."""
    awaits_prediction: bool = field(default=False, init=False)
    """True if the text was kept before the predictor of the model was known; then the scores of its
    entries are predicted when the text is swapped in.
    """

    @property
    def position(self) -> int:
        """Return how many tokens had been read."""
        return self.tier.position

    @property
    def n_entries(self) -> int:
        """Return how many entries all KV heads hold."""
        return sum(map(sum, self.tier.state.entries))

    @property
    def n_bytes(self) -> int:
        """Return the bytes that the text takes outside the pool; for a checkpoint, also those of
        its tokens and logits.
        """
        return self.tier.n_bytes + (self.text.n_bytes if self.is_checkpoint else 0)

    @property
    def n_pages(self) -> int:
        """Return how many pages of the pool the text holds, including pages that it shares."""
        tier = self.tier  # Read it once, because another thread may change it.
        return tier.pages.n_pages if isinstance(tier, InPool) else 0


@dataclass(eq=False)
class IdleSession:
    """Hold a session that its user has put aside, in the index of its pool.

    The pool may close it to make room. Before anyone uses the session, it must be removed from the
    index.
    """

    session: Any
    """The Session. Its module is above this one and cannot be imported here, so that the type is
    Any.
    """
    tokens: array[int] = field(init=False)
    """The tokens of the session, which do not change while it is in the index."""

    def __post_init__(self) -> None:
        """Take the text of the session."""
        self.tokens = self.session.text.held().text.tokens


class KeptTexts:
    """Keep the texts of one pool; texts that leave its pages go to `ram` or `disk:DIR`.

    The texts of idle sessions would take at most `swap_limit` bytes there, so that each can leave
    the pool at any time. Checkpoints take at most `checkpoint_limit` bytes outside the pool, with
    their tokens and logits; with 0, none is kept. Raises SettingsError for any other place, a
    directory that cannot be used, and impossible limits. Methods other than make_room() must be
    called between two steps.
    """

    can_be_cut = True
    """False if layers are recurrent: then nothing goes on from a part of a checkpoint."""

    def __init__(
        self,
        where: str = RAM,
        swap_limit: str | int | None = None,
        checkpoint_limit: str | int = 0,
    ) -> None:
        """Check the place and the limits: bytes, or text such as `1GiB`; swap_limit None: none."""
        n_bytes = parse_bytes(swap_limit) if isinstance(swap_limit, str) else swap_limit
        if swap_limit is not None and (isinstance(n_bytes, bool) or not n_bytes or n_bytes < 1):
            raise SettingsError(f"swap_limit cannot be {swap_limit!r}; give bytes such as 1GiB")
        self._swap_limit = n_bytes
        limit = 0 if checkpoint_limit == "0" else checkpoint_limit  # The command line passes text.
        most = parse_bytes(limit) if isinstance(limit, str) else limit
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise SettingsError(
                f"the limit of checkpoints cannot be {limit!r}; give bytes such as 64MiB, or 0"
            )
        self.checkpoint_limit = most
        self.index = PrefixIndex()
        """The index of everything that a prompt may continue from. A server adds texts of its own;
        of the kept texts, only checkpoints are found by their tokens.
        """
        self._staying: KeptText | None = None
        self._directory: Path | None = None
        if where.startswith(DISK) and where != DISK:
            self._directory = Path(where[len(DISK) :])
            if not self._directory.is_dir():
                raise SettingsError(f"{self._directory}: is not a directory; give an existing one")
        elif where != RAM:
            raise SettingsError(f"swap cannot be {where!r}; use ram or disk:DIRECTORY")

    @property
    def checkpoints(self) -> list[KeptText]:
        """Return the checkpoints, the least recently used first."""
        return [each for each in self.index.of(KeptText) if each.is_checkpoint]

    @property
    def checkpoint_bytes(self) -> int:
        """Return the bytes that checkpoints take outside the pool."""
        return sum(each.n_bytes for each in self.checkpoints)

    @property
    def swapped_out(self) -> list[KeptText]:
        """Return the texts of idle sessions, in the order in which they were swapped out."""
        return [each for each in self.index.of(KeptText) if not each.is_checkpoint]

    @property
    def swapped_bytes(self) -> int:
        """Return the bytes that texts of idle sessions take outside the pool."""
        return sum(each.n_bytes for each in self.swapped_out)

    def keep(self, kept: KeptText, tier: InPool | Outside) -> KeptText:
        """Keep a text, of which `tier` holds what its store had kept. If there is no room for the
        text outside the pool, drops it and raises PoolError.

        A checkpoint replaces the tenant's earlier one of the same text, and the least recently used
        ones are dropped if all together exceed the limit.
        """
        kept.tier = tier
        try:
            self._check_room(kept, tier.state, kept.n_bytes)
        except PoolError:
            tier.drop()
            raise
        if not kept.is_checkpoint:
            self.index.add(kept, array("i"))
            return kept
        tokens, tenant = kept.text.tokens, kept.tenant
        for each in self.index.same(KeptText, tokens, tenant):
            self.drop(each)
        self.index.add(kept, tokens, tenant)
        excess = self.checkpoint_bytes - self.checkpoint_limit
        for each in self.checkpoints:
            if excess <= 0:
                break
            excess -= each.n_bytes
            self.drop(each)
        return kept

    def put(self, kept: KeptText, position: int, shift: int, state: StoreState) -> KeptText:
        """Keep a text whose state is already outside the pool; raises PoolError as keep() does."""
        self._check_room(kept, state, sum(state.section_bytes))
        return self.keep(kept, self._outside(position, shift, state))

    def copy(self, source: KeptText, kept: KeptText) -> KeptText:
        """Keep for the text `kept` what is kept of `source`; raises PoolError as keep() does."""
        kept.awaits_prediction = source.awaits_prediction
        return self.keep(kept, source.tier.copy())

    def drop(self, kept: KeptText) -> None:
        """Remove a text, and everything that was kept of it."""
        self.index.remove(kept)
        kept.tier.drop()

    def drop_checkpoints(self) -> None:
        """Drop all checkpoints."""
        for each in self.checkpoints:
            self.drop(each)

    def await_prediction(self) -> None:
        """Mark all kept texts as older than the predictor of the model: see
        KeptText.awaits_prediction.
        """
        for each in self.index.of(KeptText):
            each.awaits_prediction = True

    def _check_room(self, kept: KeptText, state: StoreState, n_bytes: int) -> None:
        """Raise PoolError for a checkpoint that takes too many bytes alone, and for a text of a
        session that could not leave the pool.
        """
        limit: int | None = self.checkpoint_limit
        others = 0
        if not kept.is_checkpoint:
            limit, n_bytes = self._swap_limit, sum(state.section_bytes)
            others = sum(sum(each.tier.state.section_bytes) for each in self.swapped_out)
        if limit is not None and n_bytes + others > limit:
            error = TextTooLargeError if n_bytes > limit else PoolError
            raise error(
                f"{n_bytes + others} bytes of swapped out conversations are more than the limit of "
                f"{limit}; close some, or give a larger limit (swap_limit)"
            )

    def nearest(
        self, tokens: Sequence[int], tenant: Hashable, demand: Demand
    ) -> tuple[KeptText | None, int]:
        """Return the checkpoint of the tenant that saves most reading, and how many tokens it
        saves; (None, 0) if there is none.

        Checkpoints of other tenants are not examined, so that response times do not reveal whether
        they exist. Checkpoints whose entries are lost are dropped.
        """
        prompt, lost = array("i", tokens), []

        def saved(kept: KeptText, shared: int) -> int:
            if kept.tier.is_lost:
                lost.append(kept)
                return 0
            held = HeldText(
                kept.text, lambda place: self.can_be_cut and kept.tier.state.whole_from <= place
            )
            return reuse_of(held, prompt, demand, shared).position

        best, most = self.index.nearest(KeptText, prompt, tenant, saved)
        for each in lost:
            self.drop(each)
        if best is not None:
            self.index.touch(best)
        return best, most

    def make_room(self) -> bool:
        """Let one text leave the pages of the pool: the least recently used checkpoint or, without
        any, the text of the idle session that was swapped out first. Returns False if no text is in
        the pool.

        A checkpoint for which there is no room elsewhere is dropped. Raises PoolError if there is
        no room for the text of a session; then nothing has changed.
        """
        for kept in (*self.checkpoints, *self.swapped_out):
            if isinstance(kept.tier, Outside) or kept is self._staying:
                continue
            if not kept.is_checkpoint:
                self.leave_pool(kept)
                return True
            more = sum(kept.tier.state.section_bytes) - kept.tier.n_bytes
            fits = self.checkpoint_bytes + more <= self.checkpoint_limit
            if fits:
                try:
                    self.leave_pool(kept)
                except PoolError:
                    fits = False
            if not fits:  # The text of a checkpoint can be read again.
                self.drop(kept)
            return True
        return False

    def leave_pool(self, kept: KeptText) -> Outside:
        """Return what is kept of a text, after moving it from the pool to memory or disk if it is
        in the pool; raises PoolError without room.
        """
        tier = kept.tier
        if isinstance(tier, InPool):
            state = tier.to_state(tier.pages)
            left = self._outside(tier.position, tier.pages.shift, state)
            left = replace(left, is_lost=tier.is_lost)
            kept.tier = left
            tier.drop()
            return left
        return tier

    @contextmanager
    def staying(self, kept: KeptText) -> Iterator[None]:
        """Keep a text from leaving the pool during the `with` block, in which it is swapped in."""
        self._staying = kept
        try:
            yield
        finally:
            self._staying = None

    def _outside(self, position: int, shift: int, state: StoreState) -> Outside:
        if self._directory is None:
            return Outside(position, shift, state, [bytes(each) for each in state.sections])
        try:
            file: BinaryIO = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115  (it stays open)
            file.writelines(state.sections)
            file.flush()
        except OSError as error:
            raise PoolError(
                f"{self._directory}: a conversation cannot be swapped out there "
                f"({error.strerror}); free some, or give another directory (swap)"
            ) from error
        return Outside(position, shift, state, file)
