"""Keep idle sequences of a pool: all that decoding depends on.

They stay in the pool as long as nobody needs their pages; then they go to memory, or to files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from entropykv.errors import PoolError, SettingsError
from entropykv.settings.freezing import DISK, RAM
from entropykv.settings.options import parse_bytes
from entropykv.store.checkpoint import StoreCheckpoint
from entropykv.store.protocol import SavedState, StoreState


@dataclass(eq=False)
class Parked:
    """Hold what a store held when its sequence was parked."""

    position: int
    section_bytes: list[int]
    """Bytes of each section of its state, once it has left the pool."""
    n_entries: int
    """How many entries all its KV heads hold."""
    evicted: int
    """How many entries were evicted until it was parked."""
    pages: StoreCheckpoint | None = None
    """Its pages while it is in the pool; None once it has left."""
    leave: Callable[[StoreCheckpoint], StoreState] | None = None
    """Makes the state of `pages`, to leave the pool."""
    state: SavedState | None = None
    """Its state once it has left the pool; without the sections where they are in a file."""
    file: BinaryIO | None = None
    """The file of the sections. Without a name, it goes with the process, however that ends."""
    awaits_prediction: bool = False
    """Whether it is older than the predictor of its model, and is predicted when it comes back."""
    spare: bool = False
    """True where it may be forgotten, as checkpoints may: who keeps it has a limit of its own."""

    @property
    def n_bytes(self) -> int:
        """Return bytes besides the pool: of a part of a sequence that is still in it, or of all."""
        pages = self.pages
        return sum(self.section_bytes) if pages is None else pages.n_bytes

    @property
    def n_pages(self) -> int:
        """Return how many pages of the pool it holds, those that others hold as well included."""
        pages = self.pages  # another thread may take them meanwhile
        return 0 if pages is None else pages.n_pages


class Parking:
    """Keep parked sequences; those that leave the pool go to `ram` or `disk:DIR`.

    All of them together would take no more than `limit` bytes there, so that each can leave at any
    time. Raises SettingsError for anything else, and for a directory that cannot be used.
    """

    def __init__(self, where: str = RAM, limit: str | int | None = None) -> None:
        """Check the place; `limit` is bytes, such as `1GiB`, and None is as much as there is."""
        n_bytes = parse_bytes(limit) if isinstance(limit, str) else limit
        if limit is not None and (isinstance(n_bytes, bool) or not n_bytes or n_bytes < 1):
            raise SettingsError(
                f"the limit of parked conversations cannot be {limit!r}; give bytes such as 1GiB"
            )
        self.limit_bytes = n_bytes
        self._parked: list[Parked] = []
        """Parked sequences, the one that is parked longest first."""
        self._staying: Parked | None = None
        self.give_first: Callable[[], bool] = lambda: False
        """Called to move what may be forgotten out of the pool, before what may not be."""
        self._directory: Path | None = None
        if where.startswith(DISK) and where != DISK:
            self._directory = Path(where[len(DISK) :])
            if not self._directory.is_dir():
                raise SettingsError(f"{self._directory}: is no directory; give one that is there")
        elif where != RAM:
            raise SettingsError(f"park cannot be {where!r}; use ram or disk:DIRECTORY")

    @property
    def bytes(self) -> int:
        """Return the bytes of all that is parked now, besides the pool."""
        return sum(each.n_bytes for each in self._parked if not each.spare)

    @property
    def count(self) -> int:
        """Return how many sequences are parked now."""
        return sum(not each.spare for each in self._parked)

    def hold(
        self,
        position: int,
        pages: StoreCheckpoint,
        leave: Callable[[StoreCheckpoint], StoreState],
        *,
        spare: bool = False,
    ) -> Parked:
        """Keep a checkpoint in the pool until its pages are needed; raises PoolError as put()."""
        parked = _parked(position, leave(pages))
        parked.pages, parked.leave, parked.spare = pages, leave, spare
        try:
            self._check_limit(parked)
        except PoolError:
            pages.drop()
            raise
        self._parked.append(parked)
        return parked

    def put(self, position: int, shift: int, state: StoreState) -> Parked:
        """Keep what a store holds; where there is no room, change nothing and raise PoolError."""
        parked = _parked(position, state)
        self._check_limit(parked)
        self._write(parked, shift, state)
        self._parked.append(parked)
        return parked

    def copy(self, parked: Parked) -> Parked:
        """Keep the same once more, for another sequence; raises PoolError as put()."""
        copied = self._copy(parked)
        copied.awaits_prediction = parked.awaits_prediction
        return copied

    def _copy(self, parked: Parked) -> Parked:
        if parked.pages is not None and parked.leave is not None:
            return self.hold(parked.position, parked.pages.copy(), parked.leave)
        state = self.take(parked)
        sections = (bytes(section) for section in state.sections)
        sizes = parked.section_bytes
        held = StoreState(state.entries, state.evicted, sizes, sections, state.recalls_now)
        return self.put(state.position, state.shift, held)

    def await_prediction(self) -> None:
        """Note that all that is parked, checkpoints included, is older than the predictor."""
        for parked in self._parked:
            parked.awaits_prediction = True

    def _check_limit(self, parked: Parked) -> None:
        if parked.spare or self.limit_bytes is None:
            return
        counted = [each for each in (*self._parked, parked) if not each.spare]
        n_bytes = sum(sum(each.section_bytes) for each in counted)
        if n_bytes > self.limit_bytes:
            raise PoolError(
                f"{n_bytes} bytes of parked conversations are more than the limit of "
                f"{self.limit_bytes}; close some, or give a larger limit (park_limit)"
            )

    def make_room(self) -> bool:
        """Move the one that is parked longest out of the pool; returns False where none is in it.

        Raises PoolError where nothing else has room for it: then nothing has changed.
        """
        if self.give_first():
            return True
        for parked in self._parked:
            if parked.pages is not None and not self.stays(parked):
                self.leave_pool(parked)
                return True
        return False

    def leave_pool(self, parked: Parked) -> None:
        """Copy what is in the pool to where parked sequences are kept; raises PoolError."""
        if parked.pages is None or parked.leave is None:
            return
        self._write(parked, parked.pages.shift, parked.leave(parked.pages))
        parked.pages.drop()
        parked.pages = parked.leave = None

    def stays(self, parked: Parked) -> bool:
        """Tell whether a parked sequence cannot leave the pool now."""
        return parked is self._staying

    @contextmanager
    def staying(self, parked: Parked) -> Iterator[None]:
        """Keep a parked sequence in the pool while its sequence comes back."""
        self._staying = parked
        try:
            yield
        finally:
            self._staying = None

    def _write(self, parked: Parked, shift: int, state: StoreState) -> None:
        saved = SavedState(
            parked.position, state.entries, state.evicted, shift, [], state.recalls_now
        )
        if self._directory is None:
            saved = replace(saved, sections=[bytearray(section) for section in state.sections])
        else:
            parked.file = self._written(state, self._directory)
        parked.state = saved

    def _written(self, state: StoreState, directory: Path) -> BinaryIO:
        try:
            file: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (it stays open)
            file.writelines(state.sections)
            file.flush()
        except OSError as error:
            raise PoolError(
                f"{directory}: a conversation cannot be parked there ({error.strerror}); free "
                "some, or give another directory (park)"
            ) from error
        return file

    def take(self, parked: Parked) -> SavedState:
        """Return what was kept outside of the pool; drop() forgets it.

        Raises PoolError where its file cannot be read.
        """
        if parked.state is None:
            raise PoolError("a conversation that is in the pool has no other state")
        if parked.file is None:
            return replace(parked.state, sections=[bytearray(s) for s in parked.state.sections])
        parked.file.seek(0)
        sections = [bytearray(parked.file.read(n)) for n in parked.section_bytes]
        if [len(section) for section in sections] != parked.section_bytes:
            raise PoolError("a parked conversation cannot be read any more; read its text again")
        return replace(parked.state, sections=sections)

    def drop(self, parked: Parked) -> None:
        """Forget what was kept of a sequence."""
        self._parked.remove(parked)
        if parked.pages is not None:
            parked.pages.drop()
        if parked.file is not None:
            parked.file.close()


def _parked(position: int, state: StoreState) -> Parked:
    n_entries = sum(map(sum, state.entries))
    return Parked(position, state.section_bytes, n_entries, state.evicted)
