"""Write a session to a file, and check a file before a session loads it."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv._build_info import LLAMA_CPP_PYTHON_VERSION
from entropykv._version import VERSION
from entropykv.errors import FreezeError, PoolError, ProfileError, SessionFileError
from entropykv.llamacpp.model import Model
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.learnt import LearntPredictor
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
from entropykv.session.image_spans import FIRST_PLACEHOLDER, ImageSpan, ImageSpans
from entropykv.session.model_runner import ModelRunner
from entropykv.session.sequence import TokenSequence
from entropykv.session.sequence_slot import SequenceSlot
from entropykv.settings.options import Budget
from entropykv.store.protocol import Store
from entropykv.store.states import DamagedState, SavedState, Section, StateDoesNotFit


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


def write_state(
    file: BinaryIO,
    settings: SavedSettings,
    store: Store,
    sequence: TokenSequence,
    chat: bool | None,
    document: DocumentNote | None = None,
    predictor: LearntPredictor | None = None,
) -> SavedContents:
    """Write a session to a binary file; `document` is what it has read, if it is a document, and
    `predictor` what was learnt and scores its entries.
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


def load_state(
    reader: SessionReader, settings: SavedSettings, store: Store, n_vocab: int, n_ubatch: int
) -> TokenSequence:
    """Replace the content of a store by a saved session, and return its text.

    Raises SessionFileError if it is damaged or does not fit, and leaves the store unchanged.
    """
    check_settings(reader.settings, settings, reader.where)
    contents = reader.contents
    if contents.position > settings.n_ctx:
        raise SessionFileError(
            f"{reader.where}: holds {contents.position} tokens, more than the context of "
            f"{settings.n_ctx}; raise -c (n_ctx)"
        )
    _check_shift(reader, settings, store)
    if (contents.whole_from or 0) > contents.position:
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
    """Return the predictor that a file brings; raises SessionFileError if it is damaged."""
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


class Saver:
    """Save one sequence to a file or to bytes, and load it again."""

    def __init__(self, runner: ModelRunner, slot: SequenceSlot) -> None:
        """Save and load the sequence of one slot of a model runner."""
        self._runner = runner
        self._slot = slot

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        chat: bool | None,
        document: DocumentNote | None = None,
    ) -> SavedContents:
        """Write a file, which appears complete or not at all: see Session.save()."""
        with new_session_file(path) as file:
            return self._write(file, chat, document, self._runner.learnt_predictor)

    def state(self) -> bytes:
        """Return the bytes that save() would write."""
        file = io.BytesIO()
        self._write(file, None)
        return file.getvalue()

    def load(self, path: str | os.PathLike[str]) -> SavedContents:
        """Load a file: see Session.load()."""
        with open_session(path) as reader:
            return self._load(reader)

    def load_state(self, data: bytes) -> SavedContents:
        """Load what state() has returned."""
        return self._load(reader_of(data))

    def settings(self) -> SavedSettings:
        """Return the settings that a file of this sequence has."""
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
            return write_state(
                file, self.settings(), store, self._slot.text, chat, document, learnt
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
                text = load_state(reader, self.settings(), store, n_vocab, n_ubatch)
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
                runner.take_predictor(learnt)
        return reader.contents
