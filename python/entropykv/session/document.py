"""Read a text once, keep it in a file as a document, and continue from it with questions.

A document is a saved session (see file.py) whose header also has a DocumentNote: its text, and the
files that it came from. The session ends where a question can follow: within the first turn of the
user if the model has a chat template, after the text and a line break.

While a document is read, its file does not exist. Beside it are `FILE.partial`, the session so far,
from which reading continues after a crash, and `FILE.lock`, which the reading process has locked.
If a process is killed while it saves, the next one that has the lock removes what it has left.
"""

from __future__ import annotations

import array
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from entropykv.errors import ContextError, DocumentBusyError, SessionFileError
from entropykv.file_locks import is_at, is_locked, lock_patiently
from entropykv.files import remove_left_overs
from entropykv.session.document_folder import partial_of
from entropykv.session.file import (
    DocumentNote,
    SavedContents,
    check_target,
    open_session,
)
from entropykv.session.session import QUESTION_MARK, Session
from entropykv.system import remove_and_close

MOST_TEXT_BYTES = 8 << 20
"""The longest text of a document, in bytes of UTF-8: about two million tokens of English."""
MOST_NAMES = 256
_SAVE_SHARE = 20
"""Progress is saved when reading has taken at least this many times as long as the last save."""


def read_document(
    session: Session,
    text: str,
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] = (),
    system: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> SavedContents:
    """Read a text into an empty session and write the file of the document; returns its contents.

    `names` are the files that the text came from, and `system` is a system message before it.
    `progress` is called before reading and after every micro-batch, with the tokens that were read
    and all tokens; if it raises, what was read stays in `FILE.partial`. A partial file of the same
    text, model and settings is continued, which gives the same bytes; any other one is replaced.
    The file appears complete or not at all.

    Raises ContextError for an empty or too long text, and for a system message if the model has no
    chat template; SessionFileError if the file cannot be written or another process reads a
    document into it; and the errors of Session.decode().
    """
    path = Path(path)
    tokens = _document_tokens(session, text, system)
    chat = session.model.chat_prompt("-") is not None
    note = _note_of(session, text, tokens, names, system)
    check_target(path)
    with _locked(path):
        partial = partial_of(path)
        _remove_left_overs(path)
        _continue_from(session, partial, note, tokens)
        step = _Steps(session, partial, chat, note, progress)
        step.read(tokens)
        contents = session.files.save(path, chat=chat, document=note)
        with contextlib.suppress(OSError):
            partial.unlink()
    return contents


def complete_document(
    session: Session,
    text: str,
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] = (),
    system: str | None = None,
) -> SavedContents | None:
    """Return the contents of a file if it holds what read_document() would write, else None.

    The arguments are those of read_document(). The whole file is read and checked. Raises
    ContextError as read_document() does.
    """
    try:
        with open_session(path) as reader:
            tokens = _document_tokens(session, text, system)
            note = _note_of(session, text, tokens, names, system)
            contents = reader.contents
            same = contents.document == note and contents.position == note.n_tokens
            if not same or reader.settings != session.files.settings:
                return None
            read = array.array("i", reader.sections()[0])
            return contents if list(read) == tokens else None
    except SessionFileError:
        return None


def _note_of(
    session: Session, text: str, tokens: Sequence[int], names: Sequence[str], system: str | None
) -> DocumentNote:
    full_bytes = len(tokens) * session.cache.bytes_full_per_token
    template = session.model.other_template
    return DocumentNote([*names][:MOST_NAMES], text, len(tokens), full_bytes, system, template)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def is_being_read(path: Path) -> bool:
    """Tell whether a process is reading a document into a file: whether one holds its lock."""
    return is_locked(_lock_of(path))


def remove_partial(path: Path) -> None:
    """Remove the partial file of an interrupted reading; raises SessionFileError if a process is
    still reading.
    """
    with _locked(path):
        _remove_left_overs(path)
        with contextlib.suppress(FileNotFoundError):
            partial_of(path).unlink()


def _remove_left_overs(path: Path) -> None:
    """Remove the temporary files of processes that were killed while they saved. The caller holds
    the lock.
    """
    for target in (path, partial_of(path)):
        remove_left_overs(target)


def _document_tokens(session: Session, text: str, system: str | None) -> list[int]:
    if not text.strip():
        raise ContextError("the document is empty; give a file with text")
    n_bytes = len(text.encode("utf-8", "replace"))
    if n_bytes > MOST_TEXT_BYTES:
        raise ContextError(
            f"the document has {n_bytes} bytes, and a document can have {MOST_TEXT_BYTES}; split it"
        )
    prompt = session.model.chat_prompt(f"{text}\n{QUESTION_MARK}", system)
    if prompt is None:
        if system is not None:
            raise ContextError(
                "a system message needs a chat template, and the model has none; put the message "
                "into the document"
            )
        tokens = session.tokenize(session.model.said(f"{text}\n"))
    else:
        tokens = session.tokenize(prompt.rpartition(QUESTION_MARK)[0], add_bos=False)
    if len(tokens) > session.config.n_ctx:
        raise ContextError(
            f"the document has {len(tokens)} tokens, more than the context of "
            f"{session.config.n_ctx}; shorten it or raise -c (n_ctx)"
        )
    return tokens


def _continue_from(
    session: Session, partial: Path, note: DocumentNote, tokens: Sequence[int]
) -> None:
    """Load a partial file of this note and the session's settings, if it holds the beginning of
    `tokens`; else leave the session empty.
    """
    with contextlib.suppress(SessionFileError):  # If the file does not fit, all text is read.
        with open_session(partial) as reader:
            if reader.contents.document != note or reader.settings != session.files.settings:
                return
        session.files.load(partial)
        if session.tokens != tokens[: session.position]:
            session.reset()


class _Steps:
    """Read a document step by step, and save what was read on the way."""

    def __init__(
        self,
        session: Session,
        partial: Path,
        chat: bool,
        note: DocumentNote,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self._session = session
        self._partial = partial
        self._chat = chat
        self._note = note
        self._progress = progress
        self._saved_at = time.perf_counter()
        self._seconds = 0.0
        """How many seconds the last save took."""

    def read(self, tokens: Sequence[int]) -> None:
        """Read the tokens that were not read yet; `tokens`: all tokens of the document."""
        self._report()
        session = self._session
        rest = tokens[session.position :]
        if not rest:
            return
        # With gives_way, other sessions of a pool need not wait until the whole document is read.
        steps = session.reader.read(rest, False, writes=False, gives_way=True)
        for _ in steps:
            self._save_if_due()
            self._report()

    def _report(self) -> None:
        if self._progress is None:
            return
        try:
            self._progress(self._session.position, self._note.n_tokens)
        except BaseException:
            self._save()
            raise

    def _save_if_due(self) -> None:
        since = time.perf_counter() - self._saved_at
        is_last = self._session.position == self._note.n_tokens
        if not is_last and since >= _SAVE_SHARE * self._seconds:
            self._save()

    def _save(self) -> None:
        start = time.perf_counter()
        if self._session.position:
            self._session.files.save(self._partial, chat=self._chat, document=self._note)
        self._saved_at = time.perf_counter()
        self._seconds = self._saved_at - start


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a document that is being read; raises SessionFileError if another process
    has it, or if its file cannot be made.
    """
    name = _lock_of(path)
    descriptor = -1
    try:
        while descriptor < 0:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            if not lock_patiently(descriptor):
                os.close(descriptor)
                raise DocumentBusyError(
                    f"{path}: another process is reading this document; wait for it, or give "
                    "another path"
                )
            if not is_at(name, descriptor):
                os.close(descriptor)  # The lock's owner removed the file just before we locked it.
                descriptor = -1
    except OSError as error:
        raise SessionFileError(
            f"{path}: cannot be written ({error.strerror}); give the path of a new file"
        ) from error
    try:
        yield
    finally:
        remove_and_close(name, descriptor)
