"""Decide which text is read twice, and let a model's first texts teach its predictor.

An echo is the second reading of a chunk (echo.py); a PredictorFit learns from it. Everything is
called by the thread that makes a step, or between two steps.

Lessons are taken in rounds. The predictor that the rounds before have left is tested with the
lessons of each round, which it was not fitted to. Until enough tokens agree for it to be used, it
is fitted to all rounds; then each round has a fit of its own, and the predictor is the mean of all.
So no sums of products of a text's keys and values are written to a file. The predictor is complete
when enough texts have taught a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from entropykv import _core
from entropykv.errors import ProfileError
from entropykv.llamacpp.model import Model
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.growing import GrowingPredictor
from entropykv.profile.learnt import LearntFile, LearntPredictor
from entropykv.profile.predictor import ScorePredictor
from entropykv.session.echo import Echo, echo_for
from entropykv.session.sequence_slot import SequenceSlot
from entropykv.store.protocol import Learning, Store
from entropykv.store.step import Part

ROUND_TOKENS = 224
"""The least tokens of a round."""
LEAST_TOKENS = 448
"""The least tokens that a predictor is learnt from before it is used."""
LEAST_TEXTS = 8
"""The least texts that a predictor is learnt from before it is complete. What one text teaches is
much better or worse than what another one does. Besides, a single conversation of a server may be
made to mislead.
"""
LEAST_CORRELATION = 0.3
"""The least correlation of predictions with what a round shows; less means that its text and those
before it have little in common, or that the model's lookups cannot be predicted.
"""
MOST_DISAGREEMENTS = 4
"""The most rounds that disagree with what earlier ones have taught; after them, the predictor of
the last round is used by this process, and not kept for others.
"""
LEAST_NEW = 0.5
"""The share of a text's tokens that must be new, each with the three tokens before it; a text that
repeats itself teaches nothing.
"""
_CONTEXT = 4


class PredictorFit:
    """Collect what the second reading of the first texts shows, and learn the predictor from it.

    All stores of a pool share the collected sums and the predictor. The texts alone decide when it
    is complete, between two steps, so that the same texts are always treated equally.
    """

    predictor: ScorePredictor | None = None
    """The complete predictor; None while texts are still read twice."""
    n_tokens = 0
    """How many tokens were read twice in this process."""
    n_needed = LEAST_TOKENS
    """How many tokens the predictor is learnt from at least before it is used."""

    def __init__(
        self,
        model_name: str,
        learnt: LearntPredictor | None = None,
        file: LearntFile | None = None,
        obstacle: str | None = None,
        outcome: str | None = None,
    ) -> None:
        """Continue from what earlier processes have `learnt`, if anything.

        `file`: where it is kept; None: nowhere. For the user, `obstacle` says why what was kept
        there cannot be used, and `outcome` why nothing can be kept.
        """
        self._model_name = model_name
        self._file = file
        self.learnt = learnt
        """What is known so far, complete or not; None: nothing."""
        self._growing: GrowingPredictor | None = None
        self._n_texts = 0 if learnt is None else learnt.n_texts
        self._obstacle = obstacle
        self.predicts = learnt is not None
        """Whether scores are predicted by now."""
        self._n_taught = 0
        """The tokens of the current round."""
        self._n_disagreed = 0
        self._seen: set[tuple[int, ...]] = set()
        """The tokens that have taught something, each with the tokens before it."""
        self._teachers: dict[int, tuple[int, int]] = {}
        """Where the part of each slot's text ends that has taught something, and how many tokens
        that were.
        """
        self._outcome = outcome
        self._told = False

    def watch(self, learning: Learning, layers: Sequence[_core.LayerShape]) -> None:
        """Collect sums from the texts of a store, until the predictor is complete; `layers`: the
        model's attention layers.
        """
        if self.predictor is None:
            learning.collect_lessons(True)
        if self._growing is None:
            known = None if self.learnt is None else self.learnt.predictor
            self._growing = GrowingPredictor(value_features(layers), known)

    @property
    def candidate(self) -> ScorePredictor | None:
        """Return the predictor as far as it is known, complete or not."""
        return None if self._growing is None else self._growing.predictor

    @property
    def usable(self) -> ScorePredictor | None:
        """Return what scores the entries of later texts; None if too little is known."""
        known = self.predictor or self.candidate
        return known if known is not None and known.n_tokens >= self.n_needed else None

    def reads_twice(self, slot: SequenceSlot) -> bool:
        """Tell whether the text of a slot is read twice, as far as the budget does not hold it.

        Once enough is known, a text that has taught a round is read once, and other texts are
        awaited.
        """
        if self.predictor is not None or slot.text.is_document:
            return False
        if self.usable is None:
            return True
        return self._taught_by(slot, slot.text.position) < ROUND_TOKENS

    def teaches(self, tokens: Sequence[int]) -> bool:
        """Tell whether most of these tokens are new, so that they teach something."""
        contexts = _contexts_of(tokens)
        return len(contexts - self._seen) >= LEAST_NEW * len(tokens)

    def is_worth_echo(self, tokens: Sequence[int]) -> bool:
        """Tell whether tokens should be read twice: while nothing is known, because their own
        second reading ranks them; later, only if they teach something.
        """
        return not self.predicts or self.teaches(tokens)

    def _taught_by(self, slot: SequenceSlot, position: int) -> int:
        """Return how many tokens a slot's text has taught, if it goes on at `position`; 0 for
        another text.
        """
        end, n_taught = self._teachers.get(slot.number, (0, 0))
        return n_taught if position >= end else 0

    def prepare(self, parts: Sequence[Part], slots: Sequence[SequenceSlot]) -> bool:
        """Collect lessons of the next step, unless the text of one of its echoes repeats itself;
        returns whether they are collected.
        """
        if self.predictor is not None:
            return False
        texts = [part.tokens for part in parts if part.echo and part.tokens]
        collects = bool(texts) and all(map(self.teaches, texts))
        _learning_of(slots).collect_lessons(collects)
        return collects

    def note(self, slot: SequenceSlot, begin: int, tokens: Sequence[int]) -> None:
        """Count tokens of a slot's text, from position `begin` on, whose lessons were collected."""
        n_taught = self._taught_by(slot, begin)
        if n_taught == 0:
            self._n_texts += 1
        self._teachers[slot.number] = begin + len(tokens), n_taught + len(tokens)
        self._seen |= _contexts_of(tokens)
        self._n_taught += len(tokens)

    def close_round(self, slots: Sequence[SequenceSlot]) -> bool:
        """Learn from the round if it has enough tokens; returns whether predictions begin with it.

        `slots`: all slots of the runner, at least one; then the scores of live entries are
        predicted.
        """
        if self.predictor is not None or self._growing is None or self._n_taught < ROUND_TOKENS:
            return False
        self._n_taught = 0
        learning = _learning_of(slots)
        grown = self._growing.grow(learning.lessons())
        agreement = self._growing.correlation
        agrees = grown and (agreement is None or agreement >= LEAST_CORRELATION)
        if not agrees:
            self._n_disagreed += 1
        predictor = self.candidate
        if agrees and predictor is not None:
            enough = agreement is not None and predictor.n_tokens >= self.n_needed
            if enough:
                self._growing.settle()
                learning.clear_lessons()
            if enough and self._has_all(predictor):
                self.predictor = predictor
            self._keep(predictor)
        elif grown and self._n_disagreed >= MOST_DISAGREEMENTS:
            enough, self.predictor = True, predictor
            self._outcome = "texts differ too much in it for other sessions to use it"
        else:
            self._growing.forget()
            learning.clear_lessons()
            self._n_texts = 0
            self._teachers.clear()
            return False
        if self.predictor is not None:
            self._end(learning)
        return enough and predictor is not None and self._adopt(predictor, learning, slots)

    def _has_all(self, predictor: ScorePredictor) -> bool:
        """Tell whether enough texts have taught a predictor, each about a round."""
        enough = predictor.n_tokens >= LEAST_TEXTS * ROUND_TOKENS
        return enough and self._n_texts >= LEAST_TEXTS

    def _adopt(
        self,
        predictor: ScorePredictor,
        learning: Learning,
        slots: Sequence[SequenceSlot],
    ) -> bool:
        """Predict scores from now on; returns whether nothing was predicted before.

        Entries that have a prediction keep it, because the larger of two would not be comparable
        with that of others.
        """
        learning.adopt(predictor)
        if self.predicts:
            return False
        self.predicts = True
        for slot in slots:
            if slot.live and not slot.half_read:
                _learning_of([slot]).predict_held(slot.position, slot.store.shift)
        return True

    def _end(self, learning: Learning) -> None:
        """Free what only learning needs."""
        learning.collect_lessons(False)
        learning.clear_lessons()
        self._seen.clear()
        self._teachers.clear()

    def end_with(self, predictor: ScorePredictor, learning: Learning) -> None:
        """Take the predictor that a loaded file brings, and learn nothing more; it is not kept."""
        self.predictor = predictor
        self._end(learning)

    def _keep(self, candidate: ScorePredictor) -> None:
        """Write what is known for other processes; an error is only told."""
        complete = self.predictor is not None
        n_texts = max(self._n_texts, 1)
        self.learnt = LearntPredictor(candidate, self._model_name, n_texts, complete)
        if self._file is None:
            return
        try:
            self._file.keep(self.learnt)
        except OSError as error:
            reason = error.strerror or error
            self._outcome = (
                f"it cannot be kept for other sessions ({self._file.path}: {reason}), and each "
                "learns again"
            )
            return
        if complete:
            self._outcome = f"kept in {self._file.path}, so that other sessions read texts once"

    def news(self) -> str | None:
        """Return the sentence of report() about the complete predictor, only once."""
        if self.predictor is None or self._told:
            return None
        self._told = True
        return self.report()

    def report(self) -> str | None:
        """Return a final sentence for the user; None if nothing was read twice."""
        if self.n_tokens == 0:
            return self._obstacle
        known = 0 if self.candidate is None else self.candidate.n_tokens
        if self._outcome is not None:
            then = self._outcome
        elif self.predictor is not None:
            then = "later ones are read once"
        elif known >= self.n_needed:
            then = (
                f"{min(self._n_texts, LEAST_TEXTS)} of {LEAST_TEXTS} texts have taught something, "
                "and later ones are read twice in a smaller part"
            )
        else:
            then = f"{known} tokens have taught something so far, and {self.n_needed} are needed"
        said = (
            f"{self.n_tokens} tokens beyond the budget were read twice, to learn what this model "
            f"looks up; {then}"
        )
        return said if self._obstacle is None else f"{self._obstacle}; {said}"


def _learning_of(slots: Sequence[SequenceSlot]) -> Learning:
    """Return what predicts scores in the store of the first slot, and so in all of its pool."""
    return cast(Learning, slots[0].store.learning)  # Only stores that predict are watched.


def fit_for(model: Model, config: ResolvedConfig) -> PredictorFit:
    """Return what learns the predictor of a model; nothing is kept if the options say so."""
    name, learnt = model.name, config.learnt
    if not config.options.learns:
        return PredictorFit(name)
    try:
        file = LearntFile.of(model.geometry)
    except (OSError, RuntimeError) as error:
        return PredictorFit(name, outcome=f"nothing can be kept for other sessions: {error}")
    if learnt is None:
        try:
            file.read()
        except ProfileError as error:
            return PredictorFit(name, file=file, obstacle=f"{error}, and the model teaches anew")
    return PredictorFit(name, learnt, file)


def value_features(layers: Sequence[_core.LayerShape]) -> list[slice]:
    """Return which features of the entries of each layer are values: see _core.pyi."""
    return [
        slice(shape.k_dim, shape.k_dim + (0 if shape.latent else shape.v_dim)) for shape in layers
    ]


def _contexts_of(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    """Return each token with the tokens before it."""
    return {tuple(tokens[i : i + _CONTEXT]) for i in range(len(tokens) - _CONTEXT + 1)}


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
