"""Write a session to a file, and check a file before a session loads it: `session.files`."""

from __future__ import annotations

import io
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv._build_info import LLAMA_CPP_PYTHON_VERSION
from entropykv._version import VERSION
from entropykv.errors import ContextError, FreezeError, PoolError, ProfileError, SessionFileError
from entropykv.llamacpp.model import Model
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.learnt import LearntPredictor
from entropykv.session.document_folder import local_document
from entropykv.session.file import (
    AGAIN,
    DocumentNote,
    SavedContents,
    SavedSettings,
    SessionReader,
    check_room,
    check_settings,
    new_session_file,
    open_session,
    reader_of,
    write_session,
)
from entropykv.session.model_runner import ModelRunner
from entropykv.session.reader import SequenceReader
from entropykv.session.sequence import FIRST_PLACEHOLDER, ImageSpan, ImageSpans, TokenSequence
from entropykv.session.shared_pool import SequenceSlot
from entropykv.session.stats import SessionCounts
from entropykv.settings.options import Budget
from entropykv.store.protocol import DamagedState, SavedState, Section, StateDoesNotFit, Store


def saved_settings(
    model: Model, config: ResolvedConfig, store: Store, budget: Budget
) -> SavedSettings:
    """Return the settings of a session for its file; `budget` is its current budget."""
    freezing = config.freezing
    return SavedSettings(
        entropykv=VERSION,
        llama_cpp_python=LLAMA_CPP_PYTHON_VERSION,
        model=model.name,
        fingerprint=model.identity,
        store=store.facts.file_format or store.name,
        kv_type=config.kv_type,
        policy=config.policy.name,
        n_ctx=config.n_ctx,
        kv_budget=str(budget),
        n_sinks=config.options.n_sinks,
        recent_window=config.options.recent_window,
        freeze=None if freezing is None else freezing.kv_type,
        key_centres=store.facts.key_centres,
        sequence_state=_core.SEQUENCE_STATE_VERSION if store.facts.saves_cells else None,
    )


def write_sequence(
    file: BinaryIO,
    settings: SavedSettings,
    store: Store,
    sequence: TokenSequence,
    chat: bool | None,
    document: DocumentNote | None = None,
    predictor: LearntPredictor | None = None,
) -> SavedContents:
    """Write a session to a binary file, and return what was written. `chat`, `document`: as for
    SessionFiles.save(). `predictor`: the learnt predictor that scores the session's entries, if
    any. Raises SessionFileError if the file cannot hold the session.
    """
    state = store.state()
    # Copy the array: an exported buffer that an exception keeps alive would prevent it from
    # growing.
    tokens = np.array(sequence.tokens, "<i4")
    logits = np.empty(0) if sequence.logits is None else sequence.logits
    contents = SavedContents(
        position=sequence.position,
        echoed=sequence.echoed,
        n_tokens=tokens.size,
        n_logits=logits.size,
        entries=state.entries,
        evicted=state.evicted,
        shift=store.shift,
        recalls_now=state.recalls_now,
        whole_from=state.whole_from,
        chat=chat,
        sections=state.section_bytes,
        images=[[span.start, span.n_tokens, span.behind] for span in sequence.images],
        document=document,
        predictor=None if predictor is None else predictor.to_json(),
    )
    check_room(file, tokens.nbytes + 4 * logits.size + sum(state.section_bytes))
    own = (tokens.tobytes(), logits.astype("<f4").tobytes())
    write_session(file, settings, contents, itertools.chain(own, state.sections))
    return contents


def load_sequence(
    reader: SessionReader, settings: SavedSettings, store: Store, n_vocab: int, n_ubatch: int
) -> TokenSequence:
    """Replace the content of a store by a saved session, and return its text.

    Raises SessionFileError if the file is damaged or does not fit, and leaves the store unchanged;
    raises further errors as the store's load_state() does.
    """
    check_settings(reader.settings, settings, reader.where)
    contents = reader.contents
    if contents.position > settings.n_ctx:
        raise SessionFileError(
            f"{reader.where}: holds {contents.position} tokens, more than the context of "
            f"{settings.n_ctx}; raise -c (n_ctx)"
        )
    _check_shift(reader, settings, store)
    if contents.whole_from > contents.position:
        raise reader.damaged("windows beyond its text")
    tokens, logits, *sections = reader.sections()
    sequence = _sequence(reader, tokens, logits, n_vocab, n_ubatch)
    state = SavedState(
        contents.position,
        contents.entries,
        contents.evicted,
        contents.shift,
        sections,
        contents.recalls_now,
        contents.whole_from,
        reader.mapped,
    )
    try:
        store.check_state(state)
        store.load_state(state)
    except DamagedState as error:
        raise reader.damaged(str(error)) from None
    except StateDoesNotFit as error:
        raise SessionFileError(f"{reader.where}: {error}") from None
    except (MemoryError, RuntimeError) as error:
        raise SessionFileError(f"{reader.where}: cannot be loaded ({error}); {AGAIN}") from error
    return sequence


def _predictor_in(reader: SessionReader) -> LearntPredictor | None:
    """Return the learnt predictor in a file, if any; raises SessionFileError if it is damaged."""
    value = reader.contents.predictor
    if value is None:
        return None
    try:
        return LearntPredictor.from_json(value, reader.where)
    except ProfileError:
        raise reader.damaged("an impossible predictor") from None


def _check_shift(reader: SessionReader, settings: SavedSettings, store: Store) -> None:
    shift, sinks = reader.contents.shift, reader.settings.n_sinks
    if shift == 0:
        return
    if sinks != settings.n_sinks:
        raise SessionFileError(
            f"{reader.where}: goes beyond the trained context with {sinks} sinks, but this session "
            f"has {settings.n_sinks}; use --sinks {sinks} (n_sinks={sinks})"
        )
    facts = store.facts
    beyond = reader.contents.position - shift > facts.rope.limit
    if facts.rope_obstacle or beyond or shift % facts.rope.step != 0:
        raise reader.damaged("an impossible shift")


def _sequence(
    reader: SessionReader, tokens: Section, last: Section, n_vocab: int, n_ubatch: int
) -> TokenSequence:
    contents = reader.contents
    ids = np.frombuffer(tokens, "<i4")
    row = np.frombuffer(last, "<f4")
    if contents.echoed > ids.size:
        raise reader.damaged("echoes of text that it does not hold")
    images = [ImageSpan(*numbers) for numbers in contents.images]
    if contents.position > ids.size or not _are_possible(ids, images, n_vocab):
        raise reader.damaged("tokens that cannot be")
    if row.size not in (0, n_vocab) or np.isnan(row).any():
        raise reader.damaged("logits that cannot be")
    sequence = TokenSequence(n_ubatch, ids.tolist())
    sequence.position = contents.position
    sequence.images = ImageSpans(images)
    sequence.logits = row if row.size else None
    sequence.echoed = min(contents.echoed, contents.position)
    if sequence.echoed:
        # The session that saved the text has learnt its lessons, so they must not count again.
        sequence.is_teacher = True
        sequence.note_lessons(0, sequence.echoed)
    return sequence


def _are_possible(ids: npt.NDArray[np.int32], images: Sequence[ImageSpan], n_vocab: int) -> bool:
    """Tell whether tokens are those of a vocabulary, and placeholders exactly in the images."""
    of_image = np.zeros(ids.size, bool)
    end = 0
    for span in images:
        if not end <= span.start < span.end <= ids.size:
            return False
        end = span.end
        of_image[span.start : end] = True
    known = (ids >= 0) & (ids < n_vocab)
    return bool(np.all(np.where(of_image, ids <= FIRST_PLACEHOLDER, known)))


MOST_DOCUMENTS = 16
"""The most documents of one question."""


@dataclass(frozen=True)
class DocumentHeader:
    """Hold what the header of a document's file says."""

    path: str | os.PathLike[str]
    settings: SavedSettings
    contents: SavedContents
    note: DocumentNote


def document_header(path: str | os.PathLike[str]) -> DocumentHeader:
    """Read the header of a document, whose path may be an address in object storage.

    Raises SessionFileError if the file is not a document, or if its text was not read to the end,
    and StorageError if object storage refuses.
    """
    with local_document(path) as file, open_session(file) as reader:
        contents, note = reader.contents, reader.contents.document
        if note is None:
            raise SessionFileError(
                f"{path}: is a saved session, not a document; give --load-session "
                "(Session.files.load)"
            )
        if contents.position != note.n_tokens:
            raise SessionFileError(
                f"{path}: holds {contents.position} of the {note.n_tokens} tokens of the "
                "document; run `entropykv read` again, which continues there"
            )
        return DocumentHeader(file, reader.settings, contents, note)


def check_template(model: Model, header: DocumentHeader) -> None:
    """Raise SessionFileError if a document was read with another chat template than the model has
    now, so that questions would not continue it.
    """
    if header.note.template != model.other_template:
        raise SessionFileError(
            f"{header.path}: was read with another chat template; read it again with this one, or "
            "give the same --chat-template as then"
        )


class SessionFiles:
    """Save one sequence to a file or to bytes, and load it again."""

    def __init__(
        self, runner: ModelRunner, slot: SequenceSlot, reader: SequenceReader, counts: SessionCounts
    ) -> None:
        """Save and load the sequence of one slot of a model runner.

        `reader` reads the texts of further documents; loading clears `counts`.
        """
        self._runner = runner
        self._slot = slot
        self._reader = reader
        self._counts = counts

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        chat: bool | None = None,
        document: DocumentNote | None = None,
    ) -> SavedContents:
        """Write the whole state to a file, which appears complete or not at all.

        `chat`: whether the text is a chat by the model's template; None: unknown. `document`: what
        document was read, for a session that holds one. Raises SessionFileError if the file cannot
        be written, PoolError if the pool has no room for the session, and FreezeError if frozen
        entries cannot be read.
        """
        with new_session_file(path) as file:
            return self._write(file, chat, document, self._runner.second_readings.learnt)

    def save_state(self) -> bytes:
        """Return the bytes that save() would write, without `chat`, `document` or a learnt
        predictor; raises what save() raises.
        """
        file = io.BytesIO()
        self._write(file, None)
        return file.getvalue()

    def load(self, path: str | os.PathLike[str]) -> SavedContents:
        """Load a saved session, which continues with the same numbers as if it had never ended.

        Model file, store, kv_type and policy must be those of the file. If the budget is too small
        for its entries, it evicts. The whole file is read and checked before anything changes.
        Raises SessionFileError for a file that is damaged or does not fit, FreezeError if cold
        storage has no room, and PoolError if the pool has none, and leaves the session unchanged;
        EntropyKVError if other programs took the memory meanwhile: then call reset().
        """
        with open_session(path) as reader:
            return self._load(reader)

    def load_state(self, data: bytes) -> SavedContents:
        """Load what save_state() returned; does and raises what load() does with a file."""
        return self._load(reader_of(data))

    def open_document(
        self,
        document: str | os.PathLike[str] | DocumentHeader,
        *more: str | os.PathLike[str] | DocumentHeader,
    ) -> SavedContents:
        """Continue from a document that read_document() or `entropykv read` has written.

        The first document is loaded, as load() does; the texts of the others are read behind it, in
        their order, as if the first had just been read. A question can follow: the tokens of
        Session.question(). Documents are paths, addresses in object storage, or headers that
        document_header() has read. Returns the contents of the first. Raises ContextError for more
        than MOST_DOCUMENTS, SessionFileError for a document that was read with another chat
        template, and the errors of document_header(), load() and Session.decode().
        """
        documents = (document, *more)
        if len(documents) > MOST_DOCUMENTS:
            raise ContextError(f"give 1 to {MOST_DOCUMENTS} documents, not {len(documents)}")
        first, *others = [
            each if isinstance(each, DocumentHeader) else document_header(each)
            for each in documents
        ]
        model = self._runner.model
        for header in (first, *others):
            check_template(model, header)
        contents = self.load(first.path)
        for header in others:
            start = time.perf_counter()
            tokens = model.tokenize(
                model.said(f"{header.note.text}\n"), add_bos=False, special=True
            )
            for _ in self._reader.read(tokens, all_logits=False):
                pass
            self._counts.add_prompt(len(tokens), time.perf_counter() - start)
        return contents

    @property
    def settings(self) -> SavedSettings:
        """Return the settings that files of this session have, to compare them with those of
        another file.
        """
        runner = self._runner
        return saved_settings(runner.model, runner.config, self._slot.store, runner.budget)

    def _write(
        self,
        file: BinaryIO,
        chat: bool | None,
        document: DocumentNote | None = None,
        learnt: LearntPredictor | None = None,
    ) -> SavedContents:
        self._runner.check_usable(self._slot)
        with self._runner.live_store(self._slot) as store:
            return write_sequence(
                file, self.settings, store, self._slot.text, chat, document, learnt
            )

    def _load(self, reader: SessionReader) -> SavedContents:
        runner, slot = self._runner, self._slot
        runner.check_usable(slot)
        learnt = _predictor_in(reader)
        slot.broken = True
        # Announce the length first, so that the share of the pool can hold all of it.
        slot.expected = max(slot.expected, reader.contents.position)
        try:
            with runner.live_store(slot) as store:
                if not runner.shared.is_private:
                    runner.shared.note_growth(slot)
                n_vocab, n_ubatch = runner.model.n_vocab, runner.config.n_ubatch
                text = load_sequence(reader, self.settings, store, n_vocab, n_ubatch)
        except (FreezeError, PoolError, SessionFileError):
            slot.broken = False
            raise
        if slot.trajectory:
            slot.trajectory.clear()
        note = reader.contents.document
        text.is_document = note is not None and text.position == note.n_tokens
        slot.text = text
        slot.position = slot.expected = text.position
        text.begin_after_load(store.evicted)
        slot.mend()
        if learnt is not None:
            with runner.exclusively(slot):
                is_alone = runner.shared.is_private
                runner.second_readings.take(learnt, is_alone=is_alone)
        self._counts.clear()
        return reader.contents
