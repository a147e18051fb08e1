"""Decide which text is read twice and as what, and let a model's first texts teach its predictor.

While a text is read, nobody knows what will be asked about it. But to answer a question, a model
attends to much the same entries as to repeat the text. Therefore every chunk is followed, in the
same micro-batch, by its echo: a request to repeat the text, and the chunk once more. Only the
queries of the echo score the chunk's entries, and nothing of the echo is kept. The chunk is
complete only within the micro-batch, so that the budget holds while the text is read. This is the
measure `reconstruct`, after KVzip (Kim et al. 2025, arXiv:2505.23416), which reads a whole context
again after it was read with a full cache.

A PredictorFit learns from echoes. A lesson is what the echo of a chunk shows about one entry: its
features, and how much attention the echo gave to it. Lessons are collected in rounds. With the
lessons of each round, the predictor of the earlier rounds is tested, which was not fitted to them.
Until rounds with enough tokens agree, so that the predictor can be used, it is fitted to all of
them together; from then on, each round has a fit of its own, and the predictor is the mean of these
fits. So no sums of products of a text's keys and values are written to a file. The predictor is
complete when enough texts have each contributed about a round of lessons.

SecondReadings is called by the thread that makes a step, or between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from entropykv import _core
from entropykv.errors import ProfileError
from entropykv.llamacpp.model import Model
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.growing import GrowingPredictor
from entropykv.profile.learnt import LearntFile, LearntPredictor
from entropykv.profile.predictor import ScorePredictor
from entropykv.session.sequence import is_placeholder
from entropykv.session.shared_pool import SequenceSlot
from entropykv.store.protocol import Learning, Store
from entropykv.store.step import Part

REQUEST = "\n\nRepeat the previous context exactly:\n"
OVERLAP = 16
"""How many tokens before its chunk a repetition begins, so that the first tokens of the chunk get
attention, too.
"""
LEAST_ECHO = 16
"""The fewest tokens that an echo repeats: shorter texts, such as questions or single tokens, wait.
"""
LEAST_CHUNK = 32
"""The shortest chunk, in tokens. Budgets that follow the text change once in as many tokens
(policy/online.py).
"""
APART = 8
"""How many tokens are written between two echoes when the budget is nearly full."""
ROUND_TOKENS = 224
"""The fewest tokens of a round."""
TOKENS_TO_LEARN = 448
"""The fewest tokens that a predictor is learnt from before it is used."""
LEAST_TEXTS = 8
"""The fewest texts that a predictor is learnt from before it is complete. The lessons of one text
may be much better or worse than those of another, and a single conversation of a server may be made
to mislead.
"""
LEAST_CORRELATION = 0.3
"""The least correlation between predictions and the lessons of a round. Less means that the text of
the round and earlier texts have little in common, or that no linear function predicts what this
model attends to.
"""
MOST_DISAGREEMENTS = 4
"""How many rounds may disagree with earlier ones before learning ends; then this process uses the
predictor of the last round, and does not keep it for others.
"""
LEAST_NEW = 0.5
"""The fraction of the tokens of a text that must be new, each together with the three tokens before
it; a text that repeats itself teaches nothing.
"""
_CONTEXT = 4


class Echo:
    """Make the echoes of texts of one model: a request to repeat a chunk of text, and the chunk
    once more.
    """

    def __init__(self, tokenize: Callable[[str], list[int]], n_ubatch: int) -> None:
        """Choose the chunk so that it fits with its echo into a micro-batch of `n_ubatch` tokens.

        If a chunk would be shorter than LEAST_CHUNK, micro-batches are larger.
        """
        self._request = tokenize(REQUEST)
        besides = len(self._request) + OVERLAP
        self.chunk = max(LEAST_CHUNK, (n_ubatch - besides) // 2)
        """How many tokens of text are read at once."""
        self.n_ubatch = besides + 2 * self.chunk
        """How many tokens a chunk and its echo have together, at most."""

    def least_pending(self, n_tokens: int, recent_window: int) -> int:
        """Return how many tokens without an echo there must be before an echo of them is read;
        `n_tokens`: how many tokens are read next.

        Where text is written token by token, an echo of each token would take long. Therefore an
        echo waits until there are as many such tokens as the recent window or a chunk holds.
        """
        if n_tokens >= LEAST_ECHO:
            return LEAST_ECHO
        return max(LEAST_ECHO, min(recent_window, self.chunk))

    def tokens_ahead(self, n_pending: int) -> int:
        """Return how many tokens before the budget is full the echoes of written text must begin.

        `n_pending`: tokens of text without an echo. At most one chunk of these is repeated before
        each token, so that no token waits for more.
        """
        return APART * -(-n_pending // self.chunk)

    def of(self, text: Sequence[int], chunk: Sequence[int]) -> list[int]:
        """Return the echo of a chunk that follows `text`; none where the chunk is only images."""
        spoken = [token for token in chunk if not is_placeholder(token)]
        if not spoken:
            return []
        before = [token for token in text[-OVERLAP:] if not is_placeholder(token)]
        return [*self._request, *before, *spoken]


def echo_for(model: Model, config: ResolvedConfig) -> Echo | None:
    """Return the object that makes the echoes of a model's texts; None if no text is read twice."""
    return Echo(model.tokenize_within, config.n_ubatch) if config.reads_twice else None


def longest_part(model: Model, config: ResolvedConfig) -> int:
    """Return the most tokens that one sequence has in a micro-batch, with its echo."""
    echo = echo_for(model, config)
    return max(config.n_ubatch, echo.n_ubatch if echo else 0)


class PredictorFit:
    """Collect lessons from the second reading of the first texts, and learn the predictor of scores
    from them.

    All stores of a pool share the collected sums and the predictor. When the predictor is complete
    depends on the texts alone, and it changes only between two steps, so that the same texts always
    give the same results.
    """

    predictor: ScorePredictor | None = None
    """The complete predictor; None while texts are still read twice."""
    n_tokens = 0
    """How many tokens were read twice in this process."""
    n_needed = TOKENS_TO_LEARN
    """The fewest tokens that the predictor is learnt from before it is used."""

    def __init__(
        self,
        model_name: str,
        learnt: LearntPredictor | None = None,
        file: LearntFile | None = None,
        obstacle: str | None = None,
        outcome: str | None = None,
    ) -> None:
        """Continue from what earlier processes have `learnt`, if anything.

        `file`: where the predictor is kept for other processes; None: nowhere. `obstacle`,
        `outcome`: sentences for the user that say why the content of the file cannot be used, and
        why nothing can be kept.
        """
        self._model_name = model_name
        self._file = file
        self.learnt = learnt
        """The predictor that is known so far, complete or not; None if none is known."""
        self._kept = learnt
        """The predictor that this process read from the file or added to it last; None: none."""
        self._growing: GrowingPredictor | None = None
        self._n_texts = 0 if learnt is None else learnt.n_texts
        self._obstacle = obstacle
        self.predicts = learnt is not None
        """True if scores of new entries are predicted already."""
        self._n_taught = 0
        """How many tokens have given lessons in the current round."""
        self._n_disagreed = 0
        self._seen: set[tuple[int, ...]] = set()
        """The tokens that have given lessons, each with the tokens before it."""
        self._outcome = outcome
        self._told = False

    def watch(self, learning: Learning, layers: Sequence[_core.LayerShape]) -> None:
        """Collect lessons from the texts of a store, until the predictor is complete. `layers`: the
        attention layers of the model.
        """
        if self.predictor is None:
            learning.collect_lessons(True)
        if self._growing is None:
            known = None if self.learnt is None else self.learnt.predictor
            self._growing = GrowingPredictor(value_features(layers), known)

    @property
    def candidate(self) -> ScorePredictor | None:
        """Return the predictor as far as it is known, complete or not; None if nothing is known."""
        return None if self._growing is None else self._growing.predictor

    @property
    def usable(self) -> ScorePredictor | None:
        """Return the predictor that scores the entries of later texts; None if it was not learnt
        from enough tokens yet.
        """
        known = self.predictor or self.candidate
        return known if known is not None and known.n_tokens >= self.n_needed else None

    def reads_twice(self, slot: SequenceSlot) -> bool:
        """Tell whether the text of a slot is read twice, if the budget cannot hold it whole.

        Once a predictor can be used, a text that has given a round of lessons is read only once, so
        that other texts give the next rounds. It stays the same text in the slot of a fork.
        """
        if self.predictor is not None or slot.text.is_document:
            return False
        if self.usable is None:
            return True
        return slot.text.n_taught < ROUND_TOKENS

    def teaches(self, tokens: Sequence[int]) -> bool:
        """Tell whether enough of these tokens are new, so that an echo of them gives useful
        lessons.
        """
        contexts = _contexts_of(tokens)
        return len(contexts - self._seen) >= LEAST_NEW * len(tokens)

    def is_worth_echo(self, tokens: Sequence[int]) -> bool:
        """Tell whether tokens should be read twice. While no scores are predicted, they should,
        because only their own echo ranks them; later, only if teaches() is true.
        """
        return not self.predicts or self.teaches(tokens)

    def prepare(self, parts: Sequence[Part], slots: Sequence[SequenceSlot]) -> bool:
        """Let the stores collect lessons in the next step if all its echoes give useful lessons:
        see teaches(). Returns whether the stores do.
        """
        if self.predictor is not None:
            return False
        texts = [part.tokens for part in parts if part.echo and part.tokens]
        collects = bool(texts) and all(map(self.teaches, texts))
        _learning_of(slots).collect_lessons(collects)
        return collects

    def note(self, slot: SequenceSlot, begin: int, tokens: Sequence[int]) -> None:
        """Count the `tokens` of a slot's text, from position `begin` on, whose lessons were
        collected.
        """
        self._n_texts += not slot.text.is_teacher
        slot.text.is_teacher = True
        slot.text.note_lessons(begin, len(tokens))
        self._seen |= _contexts_of(tokens)
        self._n_taught += len(tokens)

    def close_round(self, slots: Sequence[SequenceSlot]) -> bool:
        """Learn from the current round if it has enough tokens; returns whether scores are
        predicted from now on and were not before.

        `slots`: all slots of the runner, at least one. When predictions begin, the scores of all
        live entries are predicted, too. If the round does not agree with the predictor, all that is
        known is forgotten; at the MOST_DISAGREEMENTS-th time, learning ends instead.
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
            learnt = LearntPredictor(
                predictor, self._model_name, max(self._n_texts, 1), complete=False
            )
            if enough and _is_complete(learnt):
                self.predictor, learnt = predictor, replace(learnt, complete=True)
            self._keep(learnt)
        elif grown and self._n_disagreed >= MOST_DISAGREEMENTS:
            enough, self.predictor = True, predictor
            self._outcome = "texts differ too much in it for other sessions to use it"
        else:
            self._growing.forget()
            learning.clear_lessons()
            self._n_texts = 0
            for slot in slots:
                slot.text.forget_lessons()
            return False
        if self.predictor is not None:
            self._end(learning)
        return enough and predictor is not None and self._adopt(predictor, learning, slots)

    def _adopt(
        self,
        predictor: ScorePredictor,
        learning: Learning,
        slots: Sequence[SequenceSlot],
    ) -> bool:
        """Predict scores from now on; returns whether nothing was predicted before.

        Entries that already have a prediction keep it: a store takes the larger of two predictions,
        which would not be comparable with single ones.
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
        """Stop collecting lessons, and free their memory."""
        learning.collect_lessons(False)
        learning.clear_lessons()
        self._seen.clear()

    def end_with(self, predictor: ScorePredictor, learning: Learning) -> None:
        """Take the predictor of a loaded file, and learn nothing more; it is not kept for other
        processes.
        """
        self.predictor = predictor
        self._end(learning)

    def _keep(self, learnt: LearntPredictor) -> None:
        """Add to the file for other processes what was learnt; an error becomes a sentence of
        report().
        """
        self.learnt = learnt
        if self._file is None:
            return
        try:
            self._file.keep(learnt, self._kept, _is_complete)
        except OSError as error:
            reason = error.strerror or error
            self._outcome = (
                f"it cannot be kept for other sessions ({self._file.path}: {reason}), and each "
                "learns again"
            )
            return
        self._kept = learnt
        if learnt.complete:
            self._outcome = f"kept in {self._file.path}, so that other sessions read texts once"

    def news(self) -> str | None:
        """Return the sentence of report() when the predictor is complete, in the first call; None
        before that, and in later calls.
        """
        if self.predictor is None or self._told:
            return None
        self._told = True
        return self.report()

    def report(self) -> str | None:
        """Return a sentence for the user about what was read twice and learnt; None if there is
        nothing to say.
        """
        if self.n_tokens == 0:
            return self._obstacle
        known = 0 if self.candidate is None else self.candidate.n_tokens
        if self._outcome is not None:
            then = self._outcome
        elif self.predictor is not None:
            then = "later ones are read once"
        elif known >= self.n_needed:
            # Only a text that completed a round of lessons counts, so a text of a few tokens has
            # taught nothing yet.
            n_texts = 0 if self.learnt is None else min(self.learnt.n_texts, LEAST_TEXTS)
            then = (
                f"{n_texts} of {LEAST_TEXTS} texts have taught something, "
                "and later ones are read twice in a smaller part"
            )
        else:
            then = f"{known} tokens have taught something so far, and {self.n_needed} are needed"
        said = f"{self.n_tokens} tokens were read twice, to learn what this model looks up; {then}"
        return said if self._obstacle is None else f"{self._obstacle}; {said}"


def _is_complete(learnt: LearntPredictor) -> bool:
    """Tell whether a predictor was learnt from enough texts, with about a round of lessons each on
    average, and was tested with some of them.
    """
    predictor = learnt.predictor
    enough = predictor.n_tokens >= LEAST_TEXTS * ROUND_TOKENS and learnt.n_texts >= LEAST_TEXTS
    return enough and predictor.correlation is not None


def _learning_of(slots: Sequence[SequenceSlot]) -> Learning:
    """Return the part of the first slot's store that predicts scores for all stores of its pool."""
    return cast(Learning, slots[0].store.learning)  # watch() is only for stores that have it.


def fit_for(model: Model, config: ResolvedConfig) -> PredictorFit:
    """Return the object that learns the predictor of a model. It keeps nothing for other processes
    if the options say so.
    """
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
    """Return for each layer which features of an entry are values of V: see
    HeadwiseStore.predictor_features() in _core.pyi.
    """
    return [
        slice(shape.k_dim, shape.k_dim + (0 if shape.latent else shape.v_dim)) for shape in layers
    ]


def _contexts_of(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    """Return every run of `_CONTEXT` tokens, that is, each token with the ones before it."""
    return {tuple(tokens[i : i + _CONTEXT]) for i in range(len(tokens) - _CONTEXT + 1)}


class SecondReadings:
    """Hold the maker of echoes for the texts of a runner, and the predictor that is learnt from
    them.
    """

    fit: PredictorFit | None = None
    """The object that learns the model's predictor from its first texts; None if a predictor is
    known, or not needed.
    """

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
        """The predictor of a loaded session file, if it scores entries; else None."""

    def watch(self, store: Store) -> None:
        """Learn from the texts of a new store, if the model has no predictor yet."""
        if self._config.learns_predictor and store.learning is not None:
            self.fit = self.fit or fit_for(self._model, self._config)
            self.fit.watch(store.learning, store.context.layers)

    def echo_of(self, slot: SequenceSlot) -> Echo | None:
        """Return the object that makes the echoes of a slot's text; None if this text is not read
        twice, or not any more.
        """
        return self._echo if self.fit is None or self.fit.reads_twice(slot) else None

    def is_worth_echo(self, tokens: Sequence[int]) -> bool:
        """Tell whether tokens should be read twice: see PredictorFit.is_worth_echo()."""
        return self.fit is None or self.fit.is_worth_echo(tokens)

    def prepare(self, parts: Sequence[Part]) -> bool:
        """Let the stores collect lessons in the next step if its echoes give useful lessons.
        Returns whether the stores do.
        """
        return self.fit is not None and self.fit.prepare(parts, self._slots)

    def note(self, slot: SequenceSlot, begin: int, tokens: Sequence[int], *, teaches: bool) -> None:
        """Count tokens of a slot's text, from position `begin` on, that were read twice; `teaches`:
        their lessons were collected.
        """
        if self.fit is not None:
            self.fit.n_tokens += len(tokens)
            if teaches and tokens:
                self.fit.note(slot, begin, tokens)
            elif tokens and not self.fit.teaches(tokens):
                slot.text.note_lessons(begin, len(tokens))

    def learn(self) -> None:
        """Learn from what was read twice, if that is enough for a round."""
        if self.fit is not None and self.fit.close_round(self._slots):
            self._begins_to_predict()

    def teach(self, store: Store, slot: SequenceSlot, begin: int, end: int) -> None:
        """Learn from the attention that an echo gave to older text of a live sequence, at the
        positions [begin, end).
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
        """Return the learnt predictor that scores new entries now; None if none does, or if the
        predictor is that of a profile.
        """
        if self._from_file is not None:
            return self._from_file
        if self.fit is None:
            return self._config.learnt
        return self.fit.learnt if self.fit.predicts else None

    def take(self, learnt: LearntPredictor, *, is_alone: bool) -> None:
        """Score new entries as those of a loaded file, and learn nothing more.

        A predictor of the model's profile stays in use. So does one that several sequences of a
        pool share: `is_alone` says that no other sequence shares it.
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
