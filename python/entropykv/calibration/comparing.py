"""Compare the ways in which policy auto can use a profile, on texts that were held back.

Loss curves, damage and correlations are means to an end: they do not say what a model loses inside
a budget. So passages with planted facts are read inside small budgets, with and without the
profile. The model predicts how a passage continues, and is asked for every fact. Policy auto then
uses the profile in the way that lost least here, if its advantage is sure; otherwise in a simpler
way, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from entropykv.calibration.spread import Arrays, Progress, Spread, StepSettings, TextWork
from entropykv.errors import SettingsError
from entropykv.evaluation.passkeys import plant
from entropykv.evaluation.texts import Text
from entropykv.llamacpp.distributions import Logits, mean_divergence
from entropykv.llamacpp.model import Model
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.profile import EntropyProfile
from entropykv.profile.ways import (
    NO_PROFILE,
    PREDICTOR_ONLY,
    WAYS,
    ComparedWay,
    WayComparison,
    best_way,
)
from entropykv.session.second_readings import LEAST_TEXTS, OVERLAP, REQUEST
from entropykv.session.session import Session
from entropykv.settings.options import Budget

BUDGETS = (0.2, 0.1)
"""Fractions of the bytes that the passage takes in a full f16 cache."""
PASSAGE = 1024
"""The length of a passage with its facts in tokens, at most."""
LEAST_PASSAGE = 256
"""The shortest passage in tokens; a shorter one would have budgets of a few dozen entries."""
LESSON = 512
"""The most tokens of a text from which the model learns the predictor that it has without a
profile.
"""
LEAST_HELD_BACK = LEAST_PASSAGE + LEAST_PASSAGE // 7 + 1
"""The shortest text in tokens that has a passage of LEAST_PASSAGE, and goes on for an eighth of its
own length.
"""
CONTINUATION = 128
"""How many tokens are predicted after a passage."""
REPETITION = 64
"""How many tokens of a passage are predicted after a request to repeat it."""
FACTS = 8
"""How many facts are planted in a passage."""

Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class PlantedPassage:
    """Hold the tokens of a passage with planted facts, and what is asked after it."""

    tokens: tuple[int, ...]
    following: tuple[int, ...]
    """The tokens with which the text goes on after the passage."""
    request: tuple[int, ...]
    """The tokens of a request to repeat the passage."""
    asked: tuple[tuple[int, ...], ...]
    """The tokens of a question about each fact, and those of its answer, in turns."""

    @property
    def work(self) -> TextWork:
        """Return the texts of this passage as the TextWork that try_ways() measures."""
        return TextWork("ways", (self.tokens, self.following, self.request, *self.asked))

    @property
    def repeated(self) -> tuple[int, ...]:
        """Return the tokens that are repeated after the request."""
        return self.tokens[OVERLAP : OVERLAP + REPETITION]

    @property
    def n_read(self) -> int:
        """Return how many tokens are read to measure one way at one budget."""
        besides = (self.following, self.request, self.repeated, *self.asked)
        return len(self.tokens) + sum(map(len, besides))

    @property
    def n_predicted(self) -> int:
        """Return how many of the tokens that are read to measure one way have logits."""
        answers = self.asked[1::2]
        return len(self.following) + len(self.repeated) + sum(map(len, answers))


def passages_of(
    texts: Sequence[Text],
    tokenize: Tokenize,
    tokenize_plainly: Tokenize,
    length: int,
    seed: int,
) -> list[PlantedPassage]:
    """Return a passage of every text that is long enough.

    `tokenize` adds BOS if the model wants it, `tokenize_plainly` does not. `length`: the most
    tokens that a passage and what is read after it may have together. `seed` determines the facts.
    """
    passages: list[PlantedPassage] = []
    for number, text in enumerate(texts):
        found = len(tokenize(text.content))
        n_following = min(CONTINUATION, min(found, length) // 8)
        n_tokens = min(PASSAGE, length - CONTINUATION, found - n_following)
        if n_tokens < LEAST_PASSAGE:
            continue
        case, rest = plant(
            text.content,
            lambda part: len(tokenize_plainly(part)),
            n_tokens=n_tokens,
            n_facts=FACTS,
            seed=seed + number,
        )
        tokens = tokenize(case.text)[:n_tokens]
        following = tokenize_plainly(rest)[:n_following]
        asked = [
            tuple(tokenize_plainly(part))
            for fact in case.facts
            for part in (fact.prompt, f" {fact.value}")
        ]
        if len(tokens) < LEAST_PASSAGE or not following:
            # Texts that have hardly any ends of sentences have no place for facts.
            whole = tokenize(text.content)
            tokens = whole[:n_tokens]
            following, asked = whole[n_tokens:][:n_following], []
        request = tokenize_plainly(REQUEST)
        passages.append(
            PlantedPassage(tuple(tokens), tuple(following), tuple(request), tuple(asked))
        )
    return passages


def ways_of(profile: EntropyProfile) -> list[str]:
    """Return the ways to use a profile that are compared; without a predictor, its curves can only
    share budgets.
    """
    return possible_ways(profile.predictor is not None)


def possible_ways(predictable: bool) -> list[str]:
    """Return the ways to use a profile; `predictable`: the profile has a predictor."""
    return list(WAYS) if predictable else [NO_PROFILE, WAYS[2]]


def lessons_of(texts: Sequence[Text], tokenize: Tokenize, length: int) -> list[tuple[int, ...]]:
    """Return the tokens of the texts that teach a model all that it learns without a profile;
    `tokenize` adds BOS if the model wants it, and `length` is the most tokens of a text.
    """
    return [tuple(tokenize(text.content)[: min(LESSON, length)]) for text in texts[:LEAST_TEXTS]]


def comparison_tokens(
    passages: Sequence[PlantedPassage], taught: Sequence[Sequence[int]], predictable: bool
) -> int:
    """Return how many tokens compare_ways() reads; `taught`: see lessons_of(), `predictable`: the
    profile has a predictor.
    """
    n_taught = sum(map(len, taught)) if predictable and passages else 0
    return _n_readings(predictable) * sum(passage.n_read for passage in passages) + n_taught


def compared_rows(passages: Sequence[PlantedPassage], predictable: bool) -> int:
    """Return how many of the tokens that compare_ways() reads have logits."""
    return _n_readings(predictable) * sum(passage.n_predicted for passage in passages)


def _n_readings(predictable: bool) -> int:
    """Return how often a passage is read: with everything kept, and in each way in each budget."""
    return 1 + len(possible_ways(predictable)) * len(BUDGETS)


def compare_ways(
    spread: Spread,
    settings: StepSettings,
    passages: Sequence[PlantedPassage],
    taught: Sequence[tuple[int, ...]] = (),
    on_progress: Callable[[int], None] = lambda _: None,
) -> WayComparison:
    """Return what a model loses in each of ways_of(settings.profile), and the best way.

    In NO_PROFILE, the model has learnt from the texts `taught` (see lessons_of()); without them, or
    if the profile has no predictor, it learns from each passage. Without passages, the best way is
    PREDICTOR_ONLY, or NO_PROFILE if the profile has no predictor. Memory holds one model and the
    logits of two readings of a passage. Raises SettingsError if settings.profile is None.
    """
    if settings.profile is None:
        raise SettingsError("ways to use a profile are compared; give one")
    ways = ways_of(settings.profile)
    if not passages:
        simplest = PREDICTOR_ONLY if PREDICTOR_ONLY in ways else NO_PROFILE
        return going(simplest)
    if settings.profile.predictor is not None and taught:
        settings = replace(settings, learnt=learnt_from(taught, spread, settings, on_progress))
    work = [passage.work for passage in passages]
    found = spread.run(try_ways, settings, work, on_progress)
    continued = np.array([continuing for continuing, *_ in found])
    repeated = np.array([repeating for _, repeating, *_ in found])
    facts = np.concatenate([right[:, :, known] for *_, known, right in found], axis=2).astype(int)
    comparison = WayComparison(
        BUDGETS,
        max(len(passage.tokens) for passage in passages),
        repeats=tuple(float(weight) for _, _, weight, *_ in found),
        compared=tuple(
            ComparedWay(way, _table(continued[:, i].T), _table(repeated[:, i].T), _table(facts[i]))
            for i, way in enumerate(ways)
        ),
        best=NO_PROFILE,
    )
    return replace(comparison, best=best_way(comparison))


def learnt_from(
    taught: Sequence[tuple[int, ...]],
    spread: Spread,
    settings: StepSettings,
    on_progress: Progress = lambda _: None,
) -> ScorePredictor | None:
    """Return the predictor that the model learns from the texts `taught` if it does not use
    settings.profile; None if they teach too little. Raises SettingsError without settings.profile.
    """
    (weights,) = spread.run(teach, settings, [TextWork("taught", tuple(taught))], on_progress)
    return ScorePredictor(tuple(weights), sum(map(len, taught))) if weights else None


def _table(figures: npt.NDArray[Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, figures.tolist()))


def going(way: str) -> WayComparison:
    """Return a comparison without figures, whose best way is `way`, so that policy auto uses it."""
    return WayComparison((), 0, (), (), way)


def try_ways(
    settings: StepSettings, work: Sequence[TextWork], on_progress: Callable[[int], None]
) -> Iterator[Arrays]:
    """Yield for each passage the mean KL divergences of its continuation and of its repetition,
    each (ways, budgets); the fraction of the repetition that the full cache predicts, (); which
    facts the full cache knows, (facts,); and which are known inside budgets, (ways, budgets,
    facts). This function is a Step. Raises SettingsError without settings.profile.
    """
    if settings.profile is None:
        raise SettingsError("ways to use a profile are compared; give one")
    with closing(Model(settings.path, n_gpu_layers=0, verbose=False)) as model:
        for each in work:
            tokens, following, request, *asked = each.texts
            passage = PlantedPassage(tokens, following, request, tuple(asked))
            reader = PassageReader(model, settings, passage, on_progress)
            yield _try_ways(reader, settings.profile, settings.learnt)


def _try_ways(
    reader: PassageReader, profile: EntropyProfile, learnt: ScorePredictor | None
) -> Arrays:
    ways, passage = ways_of(profile), reader.passage
    whole = reader.read_whole(profile)
    shape = (len(ways), len(BUDGETS))
    continuing, repeating = np.zeros(shape), np.zeros(shape)
    right = np.zeros((*shape, len(whole.right)), bool)
    for i, way in enumerate(ways):
        for j, fraction in enumerate(BUDGETS):
            inside = reader.read_inside(as_if(profile, way, learnt), fraction)
            continuing[i, j] = mean_divergence(whole.continuing, inside.continuing)
            repeating[i, j] = mean_divergence(whole.repeating, inside.repeating)
            right[i, j] = inside.right
    predicted = whole.repeating[:-1].argmax(axis=1) == np.asarray(passage.repeated[1:])
    return continuing, repeating, predicted.mean(), whole.right, right


def as_if(
    profile: EntropyProfile, way: str, learnt: ScorePredictor | None = None
) -> EntropyProfile:
    """Return the profile with a comparison that makes policy auto use it in this way.

    With NO_PROFILE, `learnt` is the predictor that the model has; None: the model learns one from
    the text.
    """
    if way == NO_PROFILE:
        return replace(profile, curves=None, predictor=learnt, comparison=None)
    return replace(profile, comparison=going(way))


def teach(
    settings: StepSettings, work: Sequence[TextWork], on_progress: Progress
) -> Iterator[Arrays]:
    """Yield for each piece of work the weights that sessions without the profile learn from its
    texts, for every layer (KV heads, features); an empty tuple if they teach too little. This
    function is a Step. Raises SettingsError without settings.profile.
    """
    if settings.profile is None:
        raise SettingsError("ways to use a profile are compared; give one")
    with closing(Model(settings.path, n_gpu_layers=0, verbose=False)) as model:
        for each in work:
            longest = max(map(len, each.texts))
            if longest < LEAST_PASSAGE:
                yield ()
                continue
            full_bytes = 2 * model.geometry.cached_values * longest
            with Session(
                model.share(),
                n_ctx=longest,
                kv_budget=Budget("bytes", max(1, int(BUDGETS[0] * full_bytes))),
                policy="auto",
                store="headwise",
                entropy_config=as_if(settings.profile, NO_PROFILE),
                learn=False,
                n_threads=settings.n_threads,
                n_threads_batch=settings.n_threads,
            ) as session:
                for tokens in each.texts:
                    session.reset()
                    session.decode(tokens)
                    on_progress(len(tokens))
                fit = session.cache.predictor_fit
                known = None if fit is None else fit.usable
            yield () if known is None else known.weights


class Predictions(NamedTuple):
    """Hold what a model predicts after a passage."""

    continuing: Logits
    """The model's logits while the passage goes on."""
    repeating: Logits
    """The model's logits while the beginning of the passage is repeated."""
    right: npt.NDArray[np.bool_]
    """For every fact, whether it is known."""


class PassageReader:
    """Read a passage inside different budgets, and predict what follows."""

    def __init__(
        self,
        model: Model,
        settings: StepSettings,
        passage: PlantedPassage,
        on_progress: Callable[[int], None],
    ) -> None:
        """Read the passage with a model, which is kept open, and `settings.n_threads` threads.
        `on_progress` is called with the number of tokens that were read since the last call.
        """
        self._model = model
        self._settings = settings
        self.passage = passage
        self._on_progress = on_progress
        self._full_bytes = 2 * model.geometry.cached_values * len(passage.tokens)

    def read_whole(self, profile: EntropyProfile) -> Predictions:
        """Read the passage with all entries kept."""
        return self._read(profile, "uniform", "f16", Budget("fraction", 1.0))

    def read_inside(
        self, profile: EntropyProfile, fraction: float, kv_type: str = "auto"
    ) -> Predictions:
        """Read the passage as policy auto does with this profile, inside a fraction of the bytes
        that it takes in a full f16 cache.
        """
        budget = Budget("bytes", max(1, int(fraction * self._full_bytes)))
        return self._read(profile, "auto", kv_type, budget)

    def _read(
        self, profile: EntropyProfile, policy: str, kv_type: str, budget: Budget
    ) -> Predictions:
        passage, n_threads = self.passage, self._settings.n_threads
        questions = list(zip(passage.asked[::2], passage.asked[1::2], strict=True))
        repetition = [*passage.request, *passage.repeated]
        longest = max(map(len, (passage.following, repetition, *((*q, *a) for q, a in questions))))
        with Session(
            self._model.share(),
            n_ctx=len(passage.tokens) + longest,
            kv_budget=budget,
            kv_type=kv_type,
            policy=policy,
            store="headwise",
            entropy_config=profile,
            learn=False,
            n_threads=n_threads,
            n_threads_batch=n_threads,
        ) as session:
            session.decode(passage.tokens)
            self._on_progress(len(passage.tokens))
            state = session.files.save_state()
            continuing = session.decode(passage.following, all_logits=True)
            session.files.load_state(state)
            repeating = _rows(session, repetition, len(passage.repeated))
            self._on_progress(len(passage.following) + len(repetition))
            right = []
            for question, answer in questions:
                session.files.load_state(state)
                found = _rows(session, [*question, *answer[:-1]], len(answer))
                right.append(_is_right(found, answer))
                self._on_progress(len(question) + len(answer))
        return Predictions(continuing, repeating, np.array(right, bool))


def _rows(session: Session, tokens: Sequence[int], n_last: int) -> Logits:
    """Read tokens; returns the logits of the last `n_last` of them, (n_last, n_vocab)."""
    read = session.reader.read(tokens, all_logits=False, n_last=n_last)
    return np.concatenate([rows for rows in read if rows is not None])


def _is_right(rows: Logits, answer: Sequence[int]) -> bool:
    """Tell whether every token of an answer is the most probable one."""
    return bool(np.all(rows.argmax(axis=1) == np.asarray(answer)))
