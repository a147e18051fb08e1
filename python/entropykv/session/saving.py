"""Save sessions to disk or into memory, and load them."""

from __future__ import annotations

import io
import os
from typing import BinaryIO

from entropykv.errors import FreezeError, PoolError, SessionFileError
from entropykv.session.file import SavedContents, SavedSettings, new_session_file
from entropykv.session.file_reader import SessionReader, open_session, reader_of
from entropykv.session.going_back import RollbackMixin
from entropykv.session.state import load_state, saved_settings, write_state


class Saving(RollbackMixin):
    """Be a session that can be written, and that goes on from what was written."""

    def save(self, path: str | os.PathLike[str], *, chat: bool | None = None) -> SavedContents:
        """Write all that decoding depends on to a file, which appears complete or not at all.

        `chat`: whether the text is a chat by the model's template. Raises SessionFileError.
        """
        with new_session_file(path) as file:
            return self._save(file, chat)

    def save_state(self) -> bytes:
        """Return the bytes that save() would write."""
        file = io.BytesIO()
        self._save(file, None)
        return file.getvalue()

    def load(self, path: str | os.PathLike[str]) -> SavedContents:
        """Go on with a session that was saved: the same numbers as if it had never ended.

        Model file, store, kv_type and policy must be those of the file. Where the budget is smaller
        than what the file holds, it evicts. All of the file is read and checked before anything
        changes. Raises SessionFileError, or FreezeError where cold storage has no room for it, and
        leaves the session as it was before.
        """
        with open_session(path) as reader:
            return self._load(reader)

    def load_state(self, data: bytes) -> SavedContents:
        """Go on with what save_state() returned, as load() does with a file."""
        return self._load(reader_of(data))

    def _saved_settings(self) -> SavedSettings:
        return saved_settings(self._model, self.config, self._store, self._runner.budget)

    def _save(self, file: BinaryIO, chat: bool | None) -> SavedContents:
        self._check_usable()
        with self._runner.live_store(self._slot) as store:
            return write_state(file, self._saved_settings(), store, self._sequence, chat)

    def _load(self, reader: SessionReader) -> SavedContents:
        self._check_usable()
        self._broken = True
        # Its share of a pool is to hold all of it before it is there.
        self._slot.expected = max(self._slot.expected, reader.contents.position)
        try:
            with self._runner.live_store(self._slot) as store:
                if self._runner.shared is not None:
                    self._runner.shared.note_growth(self._slot)
                read = load_state(
                    reader, self._saved_settings(), store, self.n_vocab, self.config.n_ubatch
                )
        except (FreezeError, PoolError, SessionFileError):
            self._broken = False
            raise
        self._clear_counts()
        self._sequence = read
        self._slot.position = self._slot.expected = read.position
        read.begin_after_load(self.evicted)
        self._broken = False
        return reader.contents
