"""Where idle sequences of a pool are kept: all that decoding depends on, in memory or in files."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from entropykv.errors import PoolError, SettingsError
from entropykv.settings.freezing import DISK, RAM
from entropykv.settings.options import parse_bytes
from entropykv.store.protocol import SavedState, StoreState


@dataclass
class Parked:
    """What a store held when its sequence was parked."""

    state: SavedState
    """Without its sections where they are in a file."""
    n_bytes: int
    file: BinaryIO | None
    """Has no name: it goes with the process, however that ends."""
    section_bytes: list[int]

    @property
    def n_entries(self) -> int:
        """Entries of all KV heads."""
        return sum(map(sum, self.state.entries))


class Parking:
    """Parked sequences, in `ram` or `disk:DIR`, of no more than `limit` bytes together.

    SettingsError for anything else, and for a directory that cannot be used.
    """

    def __init__(self, where: str = RAM, limit: str | int | None = None) -> None:
        """`limit`: bytes, such as `1GiB`; None: as much as there is."""
        n_bytes = parse_bytes(limit) if isinstance(limit, str) else limit
        if limit is not None and (isinstance(n_bytes, bool) or not n_bytes or n_bytes < 1):
            raise SettingsError(
                f"the limit of parked conversations cannot be {limit!r}; give bytes such as 1GiB"
            )
        self.limit_bytes = n_bytes
        self.bytes = 0
        """Of all that is parked now."""
        self.count = 0
        """Sequences that are parked now."""
        self._directory: Path | None = None
        if where.startswith(DISK) and where != DISK:
            self._directory = Path(where[len(DISK) :])
            if not self._directory.is_dir():
                raise SettingsError(f"{self._directory}: is no directory; give one that is there")
        elif where != RAM:
            raise SettingsError(f"park cannot be {where!r}; use ram or disk:DIRECTORY")

    def put(self, position: int, shift: int, state: StoreState) -> Parked:
        """Keep what a store holds. PoolError where there is no room, and nothing has changed."""
        n_bytes = sum(state.section_bytes)
        if self.limit_bytes is not None and self.bytes + n_bytes > self.limit_bytes:
            raise PoolError(
                f"{self.bytes + n_bytes} bytes of parked conversations are more than the limit of "
                f"{self.limit_bytes}; close some, or give a larger limit (park_limit)"
            )
        saved = SavedState(position, state.entries, state.evicted, shift, [])
        file = None
        if self._directory is None:
            saved = replace(saved, sections=[bytearray(section) for section in state.sections])
        else:
            file = self._written(state, self._directory)
        self.bytes += n_bytes
        self.count += 1
        return Parked(saved, n_bytes, file, state.section_bytes)

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
        """Return what was kept; drop() forgets it. PoolError where its file cannot be read."""
        if parked.file is None:
            return replace(parked.state, sections=[bytearray(s) for s in parked.state.sections])
        parked.file.seek(0)
        sections = [bytearray(parked.file.read(n)) for n in parked.section_bytes]
        if [len(section) for section in sections] != parked.section_bytes:
            raise PoolError("a parked conversation cannot be read any more; read its text again")
        return replace(parked.state, sections=sections)

    def drop(self, parked: Parked) -> None:
        """Forget what was kept."""
        self.bytes -= parked.n_bytes
        self.count -= 1
        if parked.file is not None:
            parked.file.close()
