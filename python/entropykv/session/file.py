"""Define the file of a saved session, which is written as a whole and read without trusting it.

All numbers are little-endian:

    magic "EKVSESS\\0", version (u32), bytes of the header (u32)
    header: JSON, see SavedSettings and SavedContents, and spaces: the store's sections begin at a
        multiple of 16384 bytes if they have 65536 bytes or more, else at a multiple of 16
    digest (blake2b, 16 bytes) of all before it
    sections, one after the other: tokens (i32), logits of the last token (f32), the store's
    digest (blake2b, 16 bytes) of all before it

The headwise and device stores have a section for each KV head, layer by layer, see head_states.hpp;
if budgets follow the text, one more with the measurements (f64), see OnlineBudgets.state(); and one
with the state of recurrent layers, if there are any. The flat store has two: the positions that it
keeps (i32), and llama.cpp's state of the sequence, whose version is in the header.

If scores are predicted by what was learnt of the model, the header has `predictor`: see
profile/learnt.py. The file of a document is the same, and its header also has `document`: see
DocumentNote.

Because large sections begin where a page of memory does, a session can map them instead of copying
them: see SessionReader.sections().
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import itertools
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from entropykv import _core, system
from entropykv.errors import SessionFileError
from entropykv.files import new_file, open_regular
from entropykv.store.protocol import Section

MAGIC = b"EKVSESS\0"
VERSION = 8
"""The version of the format. It must change with any part of the file, including the layout of
pages.
"""

PREFIX = struct.Struct("<8sII")
DIGEST_BYTES = 16
SECTION_ALIGNMENT = 1 << 14
"""Where the sections of a store begin: at a multiple of this many bytes, which is also a multiple
of the size of memory pages on most systems.
"""
LEAST_ALIGNED_BYTES = 1 << 16
"""If a store has fewer bytes than this, its sections begin at a multiple of VALUE_ALIGNMENT:
aligning them to memory pages would gain nothing.
"""
VALUE_ALIGNMENT = 16
"""Where the sections of small stores begin: at a multiple of this many bytes, the largest alignment
that a number in them needs.
"""
AGAIN = "read the prompt again and save a new session"


@dataclass(frozen=True)
class SavedSettings:
    """Hold the settings that a session was saved with, to compare them with those of the loading
    session.
    """

    entropykv: str
    llama_cpp_python: str
    model: str
    fingerprint: dict[str, Any]
    """The identity of the model file: see model.identity.identity_of()."""
    store: str
    kv_type: str
    policy: str
    n_ctx: int
    kv_budget: str
    n_sinks: int
    recent_window: int | None
    freeze: str | None
    """The type of frozen entries; None: nothing is frozen."""
    sequence_state: int | None
    """The version of llama.cpp's own format for a sequence, if the file contains such a state;
    None: it contains none, and every release of llama.cpp can load the file.
    """
    key_centres: str | None = None
    """A hash of how keys are stored, see StoreFacts.key_centres; None: keys are stored
    unchanged.
    """


@dataclass(frozen=True)
class DocumentNote:
    """Say what document a session has read; the header of the file of a document contains it."""

    names: list[str]
    """The files that the document was read from, in that order."""
    text: str
    """The whole text, which is needed to read this document after another one."""
    n_tokens: int
    """How many tokens the whole text has, with what the chat template puts before it. If reading
    was interrupted, the session has read fewer.
    """
    full_bytes: int
    """The bytes that a full cache in f16 would take for the whole text."""
    system: str | None = None
    """The system message before the text; the header contains it only if there is one."""
    template: str | None = None
    """A hash of the chat template around the text: see Model.other_template. The header contains
    it only if that is not the template of the model.
    """


@dataclass(frozen=True)
class SavedContents:
    """Hold the contents of a session when it was saved."""

    position: int
    echoed: int
    """For how many of the first tokens echoes have scored the entries: see second_readings.py."""
    n_tokens: int
    """How many tokens of the text were read."""
    n_logits: int
    """The size of the vocabulary, or 0 if there are no logits of a last token, as after
    truncate().
    """
    entries: list[list[int]]
    """How many entries are kept, as [layer][KV head]."""
    evicted: int
    """How many entries were evicted so far, as counted by the store."""
    shift: int
    """How far positions of the text were ahead of those that RoPE saw: see
    llamacpp/positions.py.
    """
    chat: bool | None
    """True if the text is a chat by the model's template; None if unknown."""
    sections: list[int]
    """How many bytes each of the store's sections has."""
    recalls_now: bool
    """True if the next token searches frozen entries, as after thaw()."""
    whole_from: int
    """The position from which on layers with a window hold everything that they see."""
    images: list[list[int]] = dataclasses.field(default_factory=list)
    """The fields of every ImageSpan; the header contains them only if there are images."""
    document: DocumentNote | None = None
    """The document that was read; the header contains it only if there is one."""
    predictor: dict[str, Any] | None = None
    """The LearntPredictor, in JSON, that scores entries; the header contains it only if there is
    one.
    """

    def to_json(self) -> dict[str, Any]:
        """Return the fields for the JSON header of the file."""
        fields = dataclasses.asdict(self)
        if not self.images:
            del fields["images"]
        if self.predictor is None:
            del fields["predictor"]
        if self.document is None:
            del fields["document"]
        else:
            for name in ("system", "template"):
                if fields["document"][name] is None:
                    del fields["document"][name]
        return fields

    @property
    def n_entries(self) -> int:
        """Return how many entries all KV heads hold."""
        return sum(map(sum, self.entries))


def check_model(
    theirs: SavedSettings, fingerprint: Mapping[str, Any], name: str, where: str
) -> None:
    """Raise SessionFileError if a session was saved with another model than the one with this
    fingerprint and name. `where`: the name of the file.
    """
    if theirs.fingerprint != fingerprint:
        raise SessionFileError(
            f"{where}: was saved with another model file ({theirs.model}) than this one "
            f"({name}); load it with that file"
        )


def check_settings(theirs: SavedSettings, ours: SavedSettings, where: str) -> None:
    """Raise SessionFileError, naming the setting, if a session that was saved with `theirs` cannot
    be loaded by one with `ours`. `where`: the name of the file.

    Context, budget, sinks and recent window may differ: the entries decide whether they fit.
    """
    check_model(theirs, ours.fingerprint, ours.model, where)
    for field, option in (("store", "--store"), ("kv_type", "--kv-type"), ("policy", "--policy")):
        value, own = getattr(theirs, field), getattr(ours, field)
        if value != own:
            raise SessionFileError(
                f"{where}: was saved with {field} {value}, but this session has {own}; use "
                f"{option} {value} ({field}={value!r})"
            )
    if theirs.freeze != ours.freeze:
        raise SessionFileError(f"{where}: {_other_freezing(theirs.freeze, ours.freeze)}")
    if theirs.key_centres != ours.key_centres:
        raise SessionFileError(
            f"{where}: holds keys {_stored(theirs)}, but this session stores them {_stored(ours)}; "
            f"{AGAIN}"
        )
    if theirs.sequence_state != ours.sequence_state:
        raise SessionFileError(
            f"{where}: holds {_version_of_state(theirs)} of llama.cpp's state of a sequence "
            f"(llama-cpp-python {theirs.llama_cpp_python}), but {ours.llama_cpp_python} reads "
            f"{_version_of_state(ours)} here; {AGAIN}"
        )


def _stored(settings: SavedSettings) -> str:
    if settings.key_centres is None:
        return "with their biases"
    return f"without their biases (in the form {settings.key_centres[:8]})"


def _version_of_state(settings: SavedSettings) -> str:
    version = settings.sequence_state
    return "nothing" if version is None else f"version {version}"


def _other_freezing(theirs: str | None, ours: str | None) -> str:
    if theirs is None:
        return (
            "was saved without frozen entries, but this session freezes; leave --freeze (freeze=) "
            "out"
        )
    own = "does not freeze" if ours is None else f"freezes as {ours}"
    return (
        f"was saved with frozen entries of type {theirs}, but this session {own}; use --freeze ram "
        f"--freeze-type {theirs} (freeze=Freezing(kv_type={theirs!r})), or disk:DIR"
    )


def write_session(
    file: BinaryIO, settings: SavedSettings, contents: SavedContents, sections: Iterable[bytes]
) -> None:
    """Write a session to a binary file; `sections`: tokens, logits, and the sections of the store,
    in this order.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def put(data: bytes) -> None:
        file.write(data)
        digest.update(data)

    parts = {"settings": dataclasses.asdict(settings), "contents": contents.to_json()}
    header = json.dumps(parts).encode()
    n_before = PREFIX.size + len(header) + DIGEST_BYTES
    n_before += 4 * (contents.n_tokens + contents.n_logits)
    is_large = sum(contents.sections) >= LEAST_ALIGNED_BYTES
    header += b" " * (-n_before % (SECTION_ALIGNMENT if is_large else VALUE_ALIGNMENT))
    put(PREFIX.pack(MAGIC, VERSION, len(header)))
    put(header)
    put(digest.digest())
    for section in sections:
        put(section)
    file.write(digest.digest())


@contextmanager
def new_session_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that becomes `path` when everything is written; raises SessionFileError if that
    fails.
    """
    check_target(path)
    try:
        with new_file(path, private=True) as part, open(part, "wb") as file:
            yield file
            file.flush()
    except OSError as error:
        raise _unwritable(path, error) from error


def check_room(file: BinaryIO, n_bytes: int) -> None:
    """Raise SessionFileError if the disk of a file has less room than a session takes.

    Files that are not on a disk, such as files in memory, are not checked.
    """
    name = getattr(file, "name", None)
    if not isinstance(name, (str, os.PathLike)):
        return
    folder = Path(name).parent
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise SessionFileError(
            f"{folder}: the disk has {free / 2**20:.1f} MiB free, but the session needs "
            f"{n_bytes / 2**20:.1f}; choose another place"
        )


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise SessionFileError if a session cannot be saved there, or would replace another file."""
    path = Path(path)
    try:
        if not os.path.lexists(path):
            _check_directory(path.parent)
            return
        with open_regular(path) as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise _unwritable(path, error) from None
    if start not in (b"", MAGIC):
        raise SessionFileError(
            f"{path}: exists and is not a saved session; give another path, or remove it"
        )


def _check_directory(path: Path) -> None:
    code = 0
    if not stat.S_ISDIR(os.stat(path).st_mode):
        code = errno.ENOTDIR
    elif not os.access(path, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code:
        raise OSError(code, os.strerror(code))


def _unwritable(path: str | os.PathLike[str], error: OSError) -> SessionFileError:
    reason = error.strerror or error
    return SessionFileError(f"{path}: cannot be written ({reason}); give the path of a new file")


_MOST_HEADER_BYTES = 1 << 26
_MOST = 1 << 31  # No text has more tokens, and no store more entries.
_MOST_BYTES = 1 << 53


@contextmanager
def open_session(path: str | os.PathLike[str]) -> Iterator[SessionReader]:
    """Open a saved session and check its header; raises SessionFileError, naming the file."""
    try:
        with open_regular(path) as file:
            yield SessionReader(file, str(path))
    except FileNotFoundError:
        raise SessionFileError(
            f"{path}: no such file; give the path of a saved session or document"
        ) from None
    except OSError as error:
        raise SessionFileError(
            f"{path}: cannot be read ({error.strerror}); give the path of a saved session or "
            "document"
        ) from error


def reader_of(data: bytes) -> SessionReader:
    """Read a session that was saved into memory, as open_session() reads one from a file."""
    return SessionReader(io.BytesIO(data), "the saved state")


class SessionReader:
    """Read a saved session whose header is checked; sections() reads and checks the rest."""

    def __init__(self, file: io.BufferedReader | io.BytesIO, where: str) -> None:
        """Read the header; raises SessionFileError if write_session() did not write it."""
        self.where = where
        self._file = file
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.mapped: _core.MappedFile | None = None
        """The mapped sections of the store, after sections(); None if they were copied."""
        self._size = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.settings, self.contents = self._header()

    def _header(self) -> tuple[SavedSettings, SavedContents]:
        prefix = self._file.read(PREFIX.size)
        self._digest.update(prefix)
        if not prefix or not prefix.startswith(MAGIC[: len(prefix)]):
            raise SessionFileError(
                f"{self.where}: is not a saved session or document; give a file of "
                "--save-session (Session.files.save), or one that `entropykv read` has written"
            )
        if len(prefix) < PREFIX.size:
            raise self._cut(PREFIX.size)
        _, version, size = PREFIX.unpack(prefix)
        if version != VERSION:
            raise SessionFileError(
                f"{self.where}: has version {version} of the format, but this entropykv reads "
                f"version {VERSION}; load it with the entropykv that saved it, or {AGAIN}"
            )
        if size > _MOST_HEADER_BYTES:
            raise self.damaged(f"a header of {size} bytes")
        header = self._read(size)
        self._check_digest("header")
        return self._parse(bytes(header))

    def _parse(self, header: bytes) -> tuple[SavedSettings, SavedContents]:
        try:
            data = json.loads(header)
            settings = SavedSettings(**data["settings"])
            fields = data["contents"]
            if "document" in fields:
                fields["document"] = DocumentNote(**fields["document"])
            contents = SavedContents(**fields)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self.damaged("a header that cannot be read") from error
        for name, value in (*vars(settings).items(), *vars(contents).items()):
            if not _is_possible(name, value):
                raise self.damaged(f"an impossible {name}")
        return settings, contents

    def sections(self) -> list[Section]:
        """Return tokens, logits and the store's sections, after checking the digest.

        The store's sections of a file are mapped into memory if the system can do so. Then several
        processes share this memory, and writing to it does not change the file. Raises
        SessionFileError for a damaged file.
        """
        contents = self.contents
        sizes = [4 * contents.n_tokens, 4 * contents.n_logits]
        expected = self._file.tell() + sum((*sizes, *contents.sections)) + DIGEST_BYTES
        if self._size < expected:
            raise self._cut(expected)
        if self._size > expected:
            raise self.damaged(f"{self._size - expected} bytes too many")
        sections: list[Section] = [self._read(size) for size in sizes]
        sections += self._mapped() or map(self._read, contents.sections)
        self._check_digest("contents")
        return sections

    def _mapped(self) -> list[Section]:
        """Return the store's sections in mapped memory; empty if they have to be read."""
        if not isinstance(self._file, io.BufferedReader):
            return []
        start, sizes = self._file.tell(), self.contents.sections
        number = system.number_of(self._file.fileno())
        self.mapped = _core.MappedFile.map(number, start, sum(sizes))
        if self.mapped is None:
            return []
        memory = memoryview(self.mapped)
        ends = list(itertools.accumulate(sizes))
        sections: list[Section] = [
            memory[end - size : end] for size, end in zip(sizes, ends, strict=True)
        ]
        for section in sections:
            self._digest.update(section)
        self._file.seek(start + ends[-1])
        return sections

    def _read(self, size: int) -> bytearray:
        if self._file.tell() + size > self._size:
            raise self._cut(self._file.tell() + size)
        data = bytearray(size)
        if self._file.readinto(data) != size:
            raise self._cut(self._size)
        self._digest.update(data)
        return data

    def _check_digest(self, what: str) -> None:
        expected = self._digest.digest()
        if self._read(DIGEST_BYTES) != expected:
            raise self.damaged(f"the digest of its {what} is another one")

    def _cut(self, expected: int) -> SessionFileError:
        return SessionFileError(
            f"{self.where}: is cut short, {self._size} of at least {expected} bytes; {AGAIN}"
        )

    def damaged(self, what: str) -> SessionFileError:
        """Return the error for a damaged file."""
        return SessionFileError(f"{self.where}: is damaged ({what}); {AGAIN}")


_TEXTS = {"entropykv", "llama_cpp_python", "model", "store", "kv_type", "policy", "kv_budget"}
_MAY_BE_NONE = {
    *("chat", "document", "freeze", "key_centres", "predictor", "recent_window"),
    "sequence_state",
}
_TYPES: dict[str, type] = {
    "fingerprint": dict,
    "chat": bool,
    "recalls_now": bool,
    "predictor": dict,
}
_LARGE = {"evicted": _MOST_BYTES, "sections": _MOST_BYTES}


def _is_possible(name: str, value: object) -> bool:
    """Tell whether a value of the header has the type of its field."""
    if value is None:
        return name in _MAY_BE_NONE
    if name in _TEXTS or name in ("freeze", "key_centres"):
        return isinstance(value, str)
    if name in _TYPES:
        return isinstance(value, _TYPES[name])
    if isinstance(value, DocumentNote):
        return name == "document" and _is_possible_document(value)
    rows = value if name in ("entries", "images") else [value if name == "sections" else [value]]
    most = _LARGE.get(name, _MOST)
    if not isinstance(rows, list) or not all(_are_counts(row, most) for row in rows):
        return False
    return name != "images" or all(len(row) == 3 for row in rows)


def _is_possible_document(note: DocumentNote) -> bool:
    return (
        isinstance(note.names, list)
        and all(isinstance(text, str) for text in (note.text, *note.names))
        and all(each is None or isinstance(each, str) for each in (note.system, note.template))
        and _are_counts([note.n_tokens, note.full_bytes], _MOST_BYTES)
    )


def _are_counts(values: object, most: int) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < most for value in values
    )
