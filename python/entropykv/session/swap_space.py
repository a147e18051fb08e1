"""Keep idle sequences of a pool, with everything that decoding them depends on.

They stay in the pool as long as nobody needs their pages; then they are moved to memory or files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from entropykv.errors import PoolError, SessionFileError, SettingsError
from entropykv.settings.freezing import DISK, RAM
from entropykv.settings.options import parse_bytes
from entropykv.store.headwise_state import LOST
from entropykv.store.states import SavedState, StoreCheckpoint, StoreState


@dataclass(eq=False)
class SwappedSequence:
    """Hold the state of a store whose sequence was swapped out."""

    position: int
    section_bytes: list[int]
    """The bytes of each section of its state, once it has left the pool."""
    n_entries: int
    """How many entries all its KV heads hold."""
    evicted: int
    """How many entries the sequence had evicted before it was swapped out."""
    pages: StoreCheckpoint | None = None
    """The sequence's pages while it is in the pool; None once it has left."""
    leave: Callable[[StoreCheckpoint], StoreState] | None = None
    """Converts `pages` to a state outside the pool."""
    state: SavedState | None = None
    """The sequence's state once it has left the pool; without the sections if they are in a file.
    """
    file: BinaryIO | None = None
    """The file of the sections. It has no name, so that it disappears with the process in
    any case.
    """
    awaits_prediction: bool = False
    """True if it is older than the predictor of its model; then its scores are predicted at swap
    in.
    """
    spare: bool = False
    """True if it may be dropped, as checkpoints may; its owner applies a limit of its own."""
    whole_from: int = 0
    """The position from which on layers with a window hold everything that they see."""
    left_lost: bool = False
    """True if pages were lost before it left the pool, so that `state` is of no use."""

    @property
    def n_bytes(self) -> int:
        """Return the bytes outside the pool: of some parts while it is in the pool, or of
        everything.
        """
        pages = self.pages
        return sum(self.section_bytes) if pages is None else pages.n_bytes

    @property
    def is_lost(self) -> bool:
        """Tell whether its entries are lost, because someone has changed the file that had them."""
        pages = self.pages
        return self.left_lost if pages is None else pages.is_lost

    @property
    def n_pages(self) -> int:
        """Return how many pages of the pool it holds, including pages that it shares."""
        pages = self.pages  # Read it once, because another thread may set it to None.
        return 0 if pages is None else pages.n_pages


class SwapSpace:
    """Keep swapped out sequences; those that leave the pool go to `ram` or `disk:DIR`.

    The space that all of them would take there is at most `limit` bytes, so that each can leave the
    pool at any time. Raises SettingsError for any other place, and for a directory that cannot be
    used.
    """

    def __init__(self, where: str = RAM, limit: str | int | None = None) -> None:
        """Check the place; `limit` is in bytes or text such as `1GiB`; None means no limit."""
        n_bytes = parse_bytes(limit) if isinstance(limit, str) else limit
        if limit is not None and (isinstance(n_bytes, bool) or not n_bytes or n_bytes < 1):
            raise SettingsError(f"swap_limit cannot be {limit!r}; give bytes such as 1GiB")
        self.limit_bytes = n_bytes
        self._swapped: list[SwappedSequence] = []
        """The swapped out sequences; the one that was swapped out first is the first."""
        self._staying: SwappedSequence | None = None
        self.give_first: Callable[[], bool] = lambda: False
        """Called to move droppable sequences out of the pool before any other."""
        self._directory: Path | None = None
        if where.startswith(DISK) and where != DISK:
            self._directory = Path(where[len(DISK) :])
            if not self._directory.is_dir():
                raise SettingsError(f"{self._directory}: is not a directory; give an existing one")
        elif where != RAM:
            raise SettingsError(f"swap cannot be {where!r}; use ram or disk:DIRECTORY")

    @property
    def bytes(self) -> int:
        """Return the bytes of all swapped out sequences outside the pool."""
        return sum(each.n_bytes for each in self._swapped if not each.spare)

    @property
    def count(self) -> int:
        """Return how many sequences are swapped out."""
        return sum(not each.spare for each in self._swapped)

    def hold(
        self,
        position: int,
        pages: StoreCheckpoint,
        leave: Callable[[StoreCheckpoint], StoreState],
        *,
        spare: bool = False,
    ) -> SwappedSequence:
        """Keep a checkpoint in the pool until its pages are needed; raises PoolError as
        put() does.
        """
        swapped = _swapped(position, leave(pages))
        swapped.pages, swapped.leave, swapped.spare = pages, leave, spare
        try:
            self._check_limit(swapped)
        except PoolError:
            pages.drop()
            raise
        self._swapped.append(swapped)
        return swapped

    def put(
        self,
        position: int,
        shift: int,
        state: StoreState,
        *,
        spare: bool = False,
    ) -> SwappedSequence:
        """Keep the state of a store; without room for it, raises PoolError and changes nothing.

        `spare` is that of the SwappedSequence.
        """
        swapped = _swapped(position, state)
        swapped.spare = spare
        self._check_limit(swapped)
        self._write(swapped, shift, state)
        self._swapped.append(swapped)
        return swapped

    def copy(self, swapped: SwappedSequence, *, spare: bool = False) -> SwappedSequence:
        """Keep a copy for another sequence, or one that may be dropped if it is `spare`; raises
        PoolError as put() does.
        """
        copied = self._copy(swapped, spare=spare)
        copied.awaits_prediction = swapped.awaits_prediction
        return copied

    def _copy(self, swapped: SwappedSequence, *, spare: bool) -> SwappedSequence:
        if swapped.pages is not None and swapped.leave is not None:
            pages = swapped.pages.copy()
            return self.hold(swapped.position, pages, swapped.leave, spare=spare)
        state = self.take(swapped)
        sections = (bytes(section) for section in state.sections)
        held = StoreState(
            state.entries,
            state.evicted,
            swapped.section_bytes,
            sections,
            state.recalls_now,
            swapped.whole_from,
        )
        return self.put(state.position, state.shift, held, spare=spare)

    def await_prediction(self) -> None:
        """Mark all swapped out sequences, including checkpoints, as older than the predictor."""
        for swapped in self._swapped:
            swapped.awaits_prediction = True

    def _check_limit(self, swapped: SwappedSequence) -> None:
        if swapped.spare or self.limit_bytes is None:
            return
        counted = [each for each in (*self._swapped, swapped) if not each.spare]
        n_bytes = sum(sum(each.section_bytes) for each in counted)
        if n_bytes > self.limit_bytes:
            raise PoolError(
                f"{n_bytes} bytes of swapped out conversations are more than the limit of "
                f"{self.limit_bytes}; close some, or give a larger limit (swap_limit)"
            )

    def make_room(self) -> bool:
        """Move the sequence that was swapped out first out of the pool; returns False if none is in
        it.

        Raises PoolError if there is no room for it elsewhere; then nothing has changed.
        """
        if self.give_first():
            return True
        for swapped in self._swapped:
            if swapped.pages is not None and not self.stays(swapped):
                self.leave_pool(swapped)
                return True
        return False

    def leave_pool(self, swapped: SwappedSequence) -> None:
        """Copy a sequence from the pool to memory or disk; raises PoolError."""
        if swapped.pages is None or swapped.leave is None:
            return
        self._write(swapped, swapped.pages.shift, swapped.leave(swapped.pages))
        swapped.left_lost = swapped.pages.is_lost
        swapped.pages.drop()
        swapped.pages = swapped.leave = None

    def stays(self, swapped: SwappedSequence) -> bool:
        """Tell whether a swapped out sequence cannot leave the pool now."""
        return swapped is self._staying

    @contextmanager
    def staying(self, swapped: SwappedSequence) -> Iterator[None]:
        """Keep a swapped out sequence in the pool while it is being swapped in."""
        self._staying = swapped
        try:
            yield
        finally:
            self._staying = None

    def _write(self, swapped: SwappedSequence, shift: int, state: StoreState) -> None:
        saved = SavedState(
            swapped.position,
            state.entries,
            state.evicted,
            shift,
            [],
            state.recalls_now,
            state.whole_from,
        )
        if self._directory is None:
            saved = replace(saved, sections=[bytearray(section) for section in state.sections])
        else:
            swapped.file = self._written(state, self._directory)
        swapped.state = saved

    def _written(self, state: StoreState, directory: Path) -> BinaryIO:
        try:
            file: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (it stays open)
            file.writelines(state.sections)
            file.flush()
        except OSError as error:
            raise PoolError(
                f"{directory}: a conversation cannot be swapped out there ({error.strerror}); free "
                "some, or give another directory (swap)"
            ) from error
        return file

    def take(self, swapped: SwappedSequence) -> SavedState:
        """Return the state that was kept outside the pool; drop() removes it.

        Raises PoolError if its file cannot be read, and SessionFileError if its entries were lost
        before it left the pool.
        """
        if swapped.left_lost:
            raise SessionFileError(LOST)
        if swapped.state is None:
            raise PoolError("a conversation that is in the pool has no other state")
        if swapped.file is None:
            return replace(swapped.state, sections=[bytearray(s) for s in swapped.state.sections])
        swapped.file.seek(0)
        sections = [bytearray(swapped.file.read(n)) for n in swapped.section_bytes]
        if [len(section) for section in sections] != swapped.section_bytes:
            raise PoolError(
                "a swapped out conversation cannot be read any more; read its text again"
            )
        return replace(swapped.state, sections=sections)

    def drop(self, swapped: SwappedSequence) -> None:
        """Remove everything that was kept of a sequence."""
        self._swapped.remove(swapped)
        if swapped.pages is not None:
            swapped.pages.drop()
        if swapped.file is not None:
            swapped.file.close()


def _swapped(position: int, state: StoreState) -> SwappedSequence:
    n_entries = sum(map(sum, state.entries))
    return SwappedSequence(
        position, state.section_bytes, n_entries, state.evicted, whole_from=state.whole_from
    )
