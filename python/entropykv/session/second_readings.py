"""Decide which text is read twice, and let a model's first texts teach its predictor.

An echo is the second reading of a chunk (echo.py); a PredictorFit learns from it. Everything is
called by the thread that makes a step, or between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from entropykv.llamacpp.model import Model
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.learnt import LearntPredictor
from entropykv.session.echo import Echo, echo_for
from entropykv.session.predictor_fit import PredictorFit, fit_for
from entropykv.session.sequence_slot import SequenceSlot
from entropykv.store.protocol import Store
from entropykv.store.step import Part


class SecondReadings:
    """Hold what makes the echoes of a runner's texts, and what is learnt from them."""

    fit: PredictorFit | None = None
    """Learns the model's predictor from its first texts; None if it is known, or not needed."""

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        slots: Sequence[SequenceSlot],
        begins_to_predict: Callable[[], object],
    ) -> None:
        """Serve all slots of a runner, a list that changes.

        `begins_to_predict` is called once, when scores begin to be predicted.
        """
        self._model = model
        self._config = config
        self._slots = slots
        self._begins_to_predict = begins_to_predict
        self._echo = echo_for(model, config)
        self._from_file: LearntPredictor | None = None
        """The predictor that a loaded file has brought."""

    def watch(self, store: Store) -> None:
        """Learn from the texts of a new store, if the model has no predictor yet."""
        if self._config.learns_predictor and store.learning is not None:
            self.fit = self.fit or fit_for(self._model, self._config)
            self.fit.watch(store.learning, store.context.layers)

    def echo_of(self, slot: SequenceSlot) -> Echo | None:
        """Return what makes the echoes of a slot's text; None if it is not, or no longer, read
        twice.
        """
        return self._echo if self.fit is None or self.fit.reads_twice(slot) else None

    def is_worth_echo(self, tokens: Sequence[int]) -> bool:
        """Tell whether tokens should be read twice: see PredictorFit.is_worth_echo()."""
        return self.fit is None or self.fit.is_worth_echo(tokens)

    def prepare(self, parts: Sequence[Part]) -> bool:
        """Collect the lessons of a step if its echoes teach something; returns whether they do."""
        return self.fit is not None and self.fit.prepare(parts, self._slots)

    def note(self, slot: SequenceSlot, begin: int, tokens: Sequence[int], *, teaches: bool) -> None:
        """Count tokens of a slot's text, from position `begin` on, that were read twice; `teaches`:
        their lessons were collected.
        """
        if self.fit is not None:
            self.fit.n_tokens += len(tokens)
            if teaches and tokens:
                self.fit.note(slot, begin, tokens)

    def learn(self) -> None:
        """Learn from what was read twice, once it is enough."""
        if self.fit is not None and self.fit.close_round(self._slots):
            self._begins_to_predict()

    def teach(self, store: Store, slot: SequenceSlot, begin: int, end: int) -> None:
        """Learn from the attention of an echo to older text of a live sequence, at these
        positions.
        """
        if self.fit is None or self.fit.predictor is not None:
            return
        tokens = slot.text.tokens[begin:end]
        teaches = self.fit.teaches(tokens)
        if teaches and store.learning is not None:
            store.learning.collect_lessons(True)
            store.learning.teach_stored(begin, end, store.shift)
        self.note(slot, begin, tokens, teaches=teaches)
        self.learn()

    @property
    def learnt(self) -> LearntPredictor | None:
        """Return what was learnt and scores new entries now; None if nothing does, or a profile's
        predictor.
        """
        if self._from_file is not None:
            return self._from_file
        if self.fit is None:
            return self._config.learnt
        return self.fit.learnt if self.fit.predicts else None

    def take(self, learnt: LearntPredictor, *, is_alone: bool) -> None:
        """Score new entries as those of a loaded file, and learn nothing more.

        A predictor of the model's profile stays, and so does one that sequences of a pool share:
        `is_alone` says that there is no other sequence.
        """
        own = self.learnt
        if not self._config.policy.importance.predicts or (own is None and self.fit is None):
            return
        learning = self._slots[0].store.learning
        if learning is None or not learning.fits(learnt.predictor):
            return
        if own is not None and not is_alone:
            return
        learning.adopt(learnt.predictor)
        self._from_file = learnt
        if self.fit is not None:
            self.fit.end_with(learnt.predictor, learning)
