"""Give a headwise store its cold storage: settings for the extension, the file, and error
handling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from entropykv import _core, system
from entropykv.errors import BudgetError, FreezeError, SettingsError
from entropykv.llamacpp.model import Model
from entropykv.model.identity import identity_of
from entropykv.policy.policy import Policy
from entropykv.settings.freezing import Freezing
from entropykv.settings.recovery import Rung
from entropykv.store.cold_file import ColdFile
from entropykv.store.states import StateDoesNotFit


class ColdSide:
    """Freeze entries of a headwise store; without `freezing`, nothing is frozen.

    Raises SettingsError if the policy cannot freeze, BudgetError for a limit that is too small for
    any entry, FreezeError if the file cannot be made.
    """

    def __init__(
        self,
        freezing: Freezing | None,
        model: Model,
        layers: Sequence[_core.LayerShape],
        kv_type: str,
        policy: Policy,
    ) -> None:
        """Make the file if frozen entries go to disk."""
        self.settings: _core.FreezeSettings | None = None
        self._freezing = freezing
        self._file: ColdFile | None = None
        self._store: _core.HeadwiseStore | None = None
        self._peak = 0
        self._error: FreezeError | None = None
        if freezing is None:
            return
        if policy.rule.by_layer:
            raise SettingsError(
                f"policy {policy.name} keeps the same tokens for all heads of a layer, but what is "
                "frozen comes back for each head by itself; use another policy, or no --freeze "
                "(freeze=)"
            )
        if all(shape.window for shape in layers):
            raise SettingsError(
                f"{model.name}: every layer has a sliding window, and what has left it is never "
                "needed again, so nothing can be frozen; use no --freeze (freeze=)"
            )
        cold_type = "as stored" if freezing.kv_type in ("auto", kv_type) else freezing.kv_type
        page_bytes = _core.cold_page_bytes(layers, kv_type, cold_type)
        # A KV head needs a page to fill, as wide as the store's, and one in storage.
        of_head = page_bytes + _core.page_geometry(layers, kv_type)[0]
        least = of_head * sum(shape.n_head_kv for shape in layers if not shape.window)
        if freezing.limit_bytes is not None and freezing.limit_bytes < least:
            raise BudgetError(
                f"a limit of {freezing.limit} holds no frozen entries of this model; give "
                f"--freeze-limit {least}B or more"
            )
        if freezing.directory is not None:
            self._file = ColdFile.create(
                freezing.directory, page_bytes, identity_of(model.geometry)
            )
        self.settings = _core.FreezeSettings(
            kv_type=cold_type,
            limit_bytes=freezing.limit_bytes or 0,
            recall_interval=freezing.recall_interval,
            schedule=_schedule(freezing, policy) if policy.schedule else None,
            descriptor=system.number_of(self._file.descriptor) if self._file else -1,
            nonce=self._file.nonce if self._file else b"",
        )

    def serve(self, store: _core.HeadwiseStore) -> None:
        """Serve the store that was made with these settings."""
        self._store = store if self.settings else None

    def check_file(self) -> None:
        """Check the file before a micro-batch; raises FreezeError if it was changed elsewhere."""
        if self._file and self._store:
            try:
                self._file.check()
            except FreezeError:
                self._give_up()
                raise

    @contextmanager
    def growing(self) -> Iterator[None]:
        """Let cold storage grow in the `with` block; without room, raises FreezeError and changes
        nothing.
        """
        try:
            yield
        except _core.ColdStorageError as error:
            raise FreezeError(
                f"{self._where()}: has no room for more frozen entries ({error}); free some, give "
                "--freeze-limit, or another --freeze disk:DIR"
            ) from None
        finally:
            self._note_size()

    @contextmanager
    def growing_later(self) -> Iterator[None]:
        """Let cold storage grow after a micro-batch; check() raises errors later."""
        try:
            with self.growing():
                yield
        except FreezeError as error:
            self._error = error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read frozen entries in the `with` block; on an error, gives them all up and raises
        FreezeError.
        """
        try:
            yield
        except _core.ColdStorageError:
            self.check()
            raise

    def check_loading(self) -> None:
        """Raise StateDoesNotFit if frozen entries were given up, because a state could not be
        loaded then.
        """
        if self.settings and self._store is None:
            raise StateDoesNotFit(
                "cannot be loaded by a session whose cold storage failed; make a new session"
            )

    def check(self) -> None:
        """Raise FreezeError if a micro-batch could not read or write frozen entries.

        All frozen entries are given up then, and the session can continue with its active ones.
        """
        error, self._error = self._error, None
        why = self._store.cold_failure if self._store else None
        if why:
            self._give_up()
            error = FreezeError(
                f"{self._where()}: {why}, so that what was frozen is lost; keep other programs "
                "away from its file, and read the text again"
            )
        if error:
            raise error

    def thaw(self, rung: Rung, window: int, position: int) -> int:
        """Restore the frozen entries of a rung of the recovery ladder: see SessionCache.thaw()."""
        if self._store is None:
            return 0
        now = position - 1
        restored = self._store.restore(
            now=now,
            frozen_after=now - window if rung is Rung.WINDOW else -1,
            due_after=now + 1 if rung is Rung.SOFT else -1,
            forget=rung is Rung.FULL,
        )
        self.recalls_now = True
        return restored

    @property
    def recalls_now(self) -> bool:
        """Tell whether the next token searches frozen entries, as it does after thaw()."""
        return self._store is not None and self._store.recalls_now

    @recalls_now.setter
    def recalls_now(self, value: bool) -> None:
        if self._store is not None:
            self._store.recalls_now = value

    def counters(self) -> dict[str, Any]:
        """Return the figures of cold storage for SessionStats."""
        store = self._store
        if store is None:
            return {}
        self._note_size()
        return {
            "frozen_entries": store.frozen,
            "frozen_bytes": store.cold_bytes,
            "frozen_bytes_peak": self._peak,
            "frozen_sketch_bytes": store.sketch_bytes,
            "frozen_overhead_bytes": store.cold_overhead_bytes,
            "entries_frozen": store.frozen_total,
            "entries_restored": store.restored_total,
            "entries_recalled": store.recalled_total,
            "cold_seconds": store.cold_seconds,
        }

    def close(self) -> None:
        """Remove the file if there is one."""
        self._store = None
        if self._file:
            self._file.close()

    def _note_size(self) -> None:
        if self._store is None:
            return
        self._peak = max(self._peak, self._store.cold_bytes)
        if self._file:
            self._file.expected_bytes = max(self._file.expected_bytes, self._store.cold_file_bytes)

    def _give_up(self) -> None:
        if self._store:
            self._store.stop_freezing()
        self.close()

    def _where(self) -> str:
        return self._file.path if self._file else "memory"


def _schedule(freezing: Freezing, policy: Policy) -> _core.FreezeSchedule:
    return _core.FreezeSchedule(
        window=freezing.window,
        threshold=policy.importance.threshold if freezing.threshold is None else freezing.threshold,
        rate=freezing.rate,
        history=freezing.history,
    )
