"""Give a headwise store its cold storage: settings for the extension, the file, and error
handling.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from entropykv import _core, system
from entropykv.errors import BudgetError, FreezeError, SettingsError
from entropykv.llamacpp.model import Model
from entropykv.model.identity import identity_of
from entropykv.policy.policy import Policy
from entropykv.settings.freezing import Freezing, Rung
from entropykv.store.protocol import StateDoesNotFit

MAGIC = b"EKVCOLD\0"
VERSION = 1
"""The version of the format, which changes with the header or what follows it."""
HEADER_BYTES = 4096

_PREFIX = "entropykv-"
_SUFFIX = ".cold"
_FIELDS = struct.Struct("<8sII16s16sI")
_DIGEST_BYTES = 8
_ATTEMPTS = 100


class ColdFile:
    """Hold a file that is locked for this process; create() makes one.

    The file belongs to one session of one process, and no other session reads it: its content is
    useless without what that session knows in memory. It is not protected against changes: check()
    detects a file that was truncated, replaced or changed at its start, but not a change further
    on.

    All numbers are little-endian; the first HEADER_BYTES are

        magic "EKVCOLD\\0", version (u32), bytes of a page (u32), nonce (16 bytes, random),
        digest of the model's identity (blake2b, 16 bytes), process (u32), zeros,
        digest (blake2b, 8 bytes) of all before it

    and the store writes its pages behind them.

    A process holds a lock on its file from before the header is written until it ends in any way.
    Therefore a file that can be locked is a leftover. Programs that the process starts do not
    inherit the lock (O_CLOEXEC); a forked child holds it as long as it lives.
    """

    def __init__(
        self, path: str, descriptor: int, *, page_bytes: int, identity: Mapping[str, Any]
    ) -> None:
        """Write the header of a new, locked file, whose descriptor the object owns from then on.
        `page_bytes`: the bytes of a page of entries; `identity`: that of the model, as for
        create(). Raises OSError.
        """
        self.path = path
        self.descriptor = descriptor
        self.nonce = secrets.token_bytes(16)
        self.expected_bytes = HEADER_BYTES
        """The least size of the file in bytes; code that makes it longer sets this."""
        self.n_leftovers = 0
        """How many files of dead processes create() removed."""
        self._process = os.getpid()
        self._header = _header(page_bytes, self.nonce, digest_of(identity))
        _write(descriptor, self._header)

    @classmethod
    def create(
        cls, directory: str | os.PathLike[str], page_bytes: int, identity: Mapping[str, Any]
    ) -> ColdFile:
        """Remove the files of dead processes in a directory, and make a new file there.

        `identity`: that of the model, see identity_of() in model/identity.py. Raises FreezeError if
        no file can be made there.
        """
        directory = os.path.abspath(directory)
        try:
            n_leftovers = _remove_leftovers(directory)
            path, descriptor = _new_locked(directory)
        except (OSError, ValueError) as error:  # ValueError: the name has a null byte.
            raise _unusable(directory, error) from None
        try:
            file = cls(path, descriptor, page_bytes=page_bytes, identity=identity)
        except BaseException as error:
            _remove_and_close(path, descriptor)
            if isinstance(error, OSError):
                raise _unusable(directory, error) from None
            raise
        file.n_leftovers = n_leftovers
        return file

    def check(self) -> None:
        """Raise FreezeError if the file is no longer as this session has left it.

        It costs one read of the header and one query of the size, which is little for each
        micro-batch.
        """
        try:
            header = system.read_at(self.descriptor, HEADER_BYTES, 0)
            status = os.fstat(self.descriptor)
        except OSError as error:
            raise self._refused(f"cannot be read any more ({error.strerror})") from None
        if status.st_nlink == 0:
            raise self._refused("was removed")
        if status.st_size < self.expected_bytes or len(header) < HEADER_BYTES:
            raise self._refused(f"was cut to {status.st_size} of {self.expected_bytes} bytes")
        if header != self._header:
            raise self._refused(self._what_differs(header))

    def _what_differs(self, header: bytes) -> str:
        magic, version, _, nonce, identity, _ = _FIELDS.unpack_from(header)
        if magic != MAGIC:
            return "is not a file of frozen entries any more"
        if version != VERSION:
            return f"has version {version} of the format, but this entropykv writes {VERSION}"
        if header[-_DIGEST_BYTES:] != _digest(header[:-_DIGEST_BYTES], _DIGEST_BYTES):
            return "has a damaged header"
        if identity != _FIELDS.unpack_from(self._header)[4]:
            return "belongs to another model"
        if nonce != self.nonce:
            return "belongs to another session"
        return "has another header than the one that was written"

    def _refused(self, what: str) -> FreezeError:
        return FreezeError(
            f"{self.path}: {what}, so that what was frozen is lost; make a new session, and keep "
            "other programs away from its file"
        )

    def close(self) -> None:
        """Remove the file and release the lock; raises nothing. A forked child removes nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        if os.getpid() == self._process:
            _remove_and_close(self.path, descriptor)
            return
        with contextlib.suppress(OSError):
            os.close(descriptor)


def digest_of(identity: Mapping[str, Any]) -> bytes:
    """Return 16 bytes that identify a model; the order of the fields does not matter."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return _digest(canonical.encode(), 16)


def _header(page_bytes: int, nonce: bytes, identity: bytes) -> bytes:
    fields = _FIELDS.pack(MAGIC, VERSION, page_bytes, nonce, identity, os.getpid())
    padded = fields.ljust(HEADER_BYTES - _DIGEST_BYTES, b"\0")
    return padded + _digest(padded, _DIGEST_BYTES)


def _digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


def _write(descriptor: int, header: bytes) -> None:
    if system.write_at(descriptor, header, 0) != len(header):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _new_locked(directory: str) -> tuple[str, int]:
    """Return path and descriptor of a new, empty file whose lock is held; raises OSError.

    Between opening and locking, another process may take the file for a leftover and lock or remove
    it; then another name is tried.
    """
    for _ in range(_ATTEMPTS):
        path = os.path.join(directory, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}{_SUFFIX}")
        descriptor = os.open(path, system.private_file_flags(), 0o600)
        try:
            if system.lock(descriptor) and os.fstat(descriptor).st_nlink:
                return path, descriptor
        except BaseException:
            _remove_and_close(path, descriptor)
            raise
        _remove_and_close(path, descriptor)
    raise OSError(errno.EBUSY, "other processes remove every new file there")


def _remove_and_close(path: str, descriptor: int) -> bool:
    """Close a file, and remove its path if the path still leads to this file; returns whether it
    was removed.
    """
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
            return system.remove_and_close(path, descriptor)
    with contextlib.suppress(OSError):
        os.close(descriptor)
    return False


def _remove_leftovers(directory: str) -> int:
    """Remove the leftovers in a directory: files of frozen entries that no process has locked;
    returns how many were removed. Raises OSError for a directory that cannot be read.
    """
    with os.scandir(directory) as entries:
        paths = [
            entry.path
            for entry in entries
            if entry.name.startswith(_PREFIX)
            and entry.name.endswith(_SUFFIX)
            and entry.is_file(follow_symlinks=False)
        ]
    return sum(map(_remove_leftover, paths))


def _remove_leftover(path: str) -> bool:
    """Remove a file if it is a leftover; returns whether it was removed."""
    try:
        descriptor = os.open(path, system.existing_file_flags())
    except OSError:
        return False
    is_leftover = False
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and system.lock(descriptor):
            # The header may be incomplete, because a process may have died before writing it.
            is_leftover = MAGIC.startswith(system.read_at(descriptor, len(MAGIC), 0))
    if is_leftover:
        return _remove_and_close(path, descriptor)
    os.close(descriptor)
    return False


def _unusable(directory: str, error: OSError | ValueError) -> FreezeError:
    reason = error.strerror if isinstance(error, OSError) else error
    return FreezeError(
        f"{directory}: cannot hold frozen entries ({reason}); give --freeze disk:DIR a directory "
        "that can be written, or use --freeze ram"
    )


class ColdSide:
    """Give a headwise store its cold storage. Without `freezing`, nothing is frozen.

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
        # Each KV head needs two pages: one of the store's size that is being filled, and one in
        # cold storage.
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
        """Remember the store that was made with these settings, so that its frozen entries can be
        restored and counted. Does nothing if nothing is frozen.
        """
        self._store = store if self.settings else None

    def check_file(self) -> None:
        """Check the file before a micro-batch. If another program has changed it, give up all
        frozen entries, and raise FreezeError.
        """
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
        """Let cold storage grow in the `with` block, after a micro-batch; an error is kept, and
        check() raises it.
        """
        try:
            with self.growing():
                yield
        except FreezeError as error:
            self._error = error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let the `with` block read frozen entries; if that fails, give up all frozen entries and
        raise FreezeError.
        """
        try:
            yield
        except _core.ColdStorageError:
            self.check()
            raise

    def check_loading(self) -> None:
        """Raise StateDoesNotFit if cold storage has failed before, because then no state can be
        loaded.
        """
        if self.settings and self._store is None:
            raise StateDoesNotFit(
                "cannot be loaded by a session whose cold storage failed; make a new session"
            )

    def check(self) -> None:
        """Raise FreezeError if a micro-batch could not read or write frozen entries, or if there
        was no room for more of them after it.

        If entries could not be read or written, all frozen entries are given up, and the session
        can continue with its active ones.
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
        """Restore the frozen entries of a rung of the recovery ladder, after `position` tokens;
        returns how many entries of all KV heads. For rungs and `window` (in tokens) see
        SessionCache.thaw().
        """
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
        """Restore nothing any more, and remove the file if there is one."""
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
