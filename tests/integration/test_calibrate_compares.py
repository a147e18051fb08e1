"""Calibration ends with a comparison of the ways to use its profile, on texts that it held back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from entropykv import Session
from entropykv.calibration import comparing
from entropykv.calibration.comparing import (
    BUDGETS,
    CONTINUATION,
    FACTS,
    LEAST_PASSAGE,
    PASSAGE,
    REPETITION,
    PlantedPassage,
    as_if,
    compare_ways,
    comparison_tokens,
    passages_of,
    teach,
    try_ways,
    ways_of,
)
from entropykv.calibration.measure import Extent, calibrate
from entropykv.calibration.spread import Spread, StepSettings, TextWork
from entropykv.evaluation.texts import Text, read_texts
from entropykv.model.geometry import read_geometry
from entropykv.policy.policy import policy_named
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.profile import EntropyProfile
from entropykv.profile.ways import NO_PROFILE, PREDICTOR_ONLY, WAYS
from entropykv.session.second_readings import OVERLAP
from tests.architectures import MODELS
from tests.support.architecture_models import some, written
from tests.support.calibration_texts import QUICK
from tests.support.logits import tokens_for
from tests.support.model_reference import log_probabilities_after

LONG = replace(QUICK, curve_length=256, curve_texts=1, compared_texts=1)


def sentences(n: int, seed: int = 0) -> str:
    words = ["the", "and", "of", "to", "in", "ion", "an", "he", "on", "at"]
    picked = np.random.default_rng(seed).integers(0, len(words), (n, 8))
    return " ".join(" ".join(words[i] for i in row).capitalize() + "." for row in picked)


def long_texts(n: int = 5) -> list[Text]:
    return [Text(f"{i}.txt", sentences(60, i)) for i in range(n)]


def test_what_is_compared_is_what_the_definition_says(
    tiny_llama: Path, profile: EntropyProfile
) -> None:
    """Compared figures are those of a reference, which reads a passage inside a fraction of its f16
    bytes, and measures the KL of a continuation and of a repetition from those of a full cache.
    """
    tokens = tokens_for(640 + 64 + 9)
    read, following, question = tokens[:640], tokens[640:704], tokens[704:709]
    request = tokens[709:]
    repeated = read[OVERLAP : OVERLAP + REPETITION]
    whole = log_probabilities_after(tiny_llama, [*read, *question], 640 + 4)
    right = [int(whole[-1].argmax())]
    wrong = [(right[0] + 1) % 300 + 5]
    asked = (tuple(question), tuple(right), tuple(question), tuple(wrong))
    passage = PlantedPassage(tuple(read), tuple(following), tuple(request), asked)
    settings = StepSettings.of(tiny_llama, n_ctx=0, n_threads=2, profile=profile)
    taught = [tuple(tokens_for(600, seed=seed)) for seed in (3, 4)]
    n_read: list[int] = []
    (weights,) = teach(settings, [TextWork("taught", tuple(taught))], n_read.append)
    learnt = ScorePredictor(tuple(weights), 1200)
    settings = replace(settings, learnt=learnt)
    ((*divergences, weight, known, found),) = try_ways(settings, [passage.work], n_read.append)
    assert known.tolist() == [True, False]
    assert found.shape == (len(WAYS), len(BUDGETS), 2)
    assert sum(n_read) == comparison_tokens([passage], taught, predictable=True)
    asked_for = (([], following), (request, repeated))
    wholes = [
        log_probabilities_after(tiny_llama, [*read, *before, *after], 640 + len(before))
        for before, after in asked_for
    ]
    predicted = wholes[1][:-1].argmax(axis=1) == np.array(repeated[1:])
    assert weight == pytest.approx(predicted.mean(), abs=0.02)
    n_bytes = 2 * read_geometry(tiny_llama).cached_values * len(read)
    for i, way in enumerate(WAYS):
        used = as_if(profile, way, learnt)
        for j, fraction in enumerate(BUDGETS):
            with Session(
                tiny_llama,
                n_ctx=640 + len(request) + len(repeated),
                kv_budget=f"{int(fraction * n_bytes)}B",
                policy=policy_named("auto", used, "headwise").name,
                entropy_config=used,
                learn=False,
                n_threads=2,
            ) as session:
                session.decode(read)
                state = session.files.save_state()
                for of_kind, whole, (before, after) in zip(
                    divergences, wholes, asked_for, strict=True
                ):
                    session.files.load_state(state)
                    rows = session.decode([*before, *after], all_logits=True)
                    kl = divergence(whole, rows[len(before) :])
                    assert of_kind[i, j] == pytest.approx(kl, rel=0.02), (way, fraction)
    for of_kind in divergences:
        assert of_kind[:, 1].min() > 1e-3
        assert len(set(of_kind[:, 1].tolist())) == len(WAYS)


def divergence(whole: np.ndarray, rows: np.ndarray) -> float:
    """Return the mean KL in nats from log-probabilities to logits, each (positions, vocabulary)."""
    precise = rows.astype(np.float64)
    precise -= precise.max(axis=1, keepdims=True)
    precise -= np.log(np.exp(precise).sum(axis=1, keepdims=True))
    return float((np.exp(whole) * (whole - precise)).sum(axis=1).mean())


def test_a_profile_goes_each_way_that_is_compared(profile: EntropyProfile) -> None:
    assert ways_of(profile) == list(WAYS)
    none, *others = WAYS
    assert as_if(profile, none).predictor is None
    without = policy_named("auto", None, "headwise").name
    assert policy_named("auto", as_if(profile, none), "headwise").name == without
    for way in others:
        assert policy_named("auto", as_if(profile, way), "headwise").name == way
        assert as_if(profile, way).predictor is profile.predictor
    assert ways_of(replace(profile, predictor=None)) == [NO_PROFILE, WAYS[2]]


def test_figures_are_those_of_the_passages(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, profile: EntropyProfile
) -> None:
    kl = 1.0 - np.arange(8.0).reshape(4, 2) / 10
    known = np.array([True, False, True, True, False, True])
    right = np.zeros((4, 2, 6), bool)
    right[2] = True
    right[3, 0, 5] = True  # This is the fourth fact of the first text that a full cache knows.

    def step(*_: object) -> list[tuple[np.ndarray, ...]]:
        return [(kl, kl, 0.25, known, right), (3 * kl, 5 * kl, 0.75, ~known, right)]

    monkeypatch.setattr(comparing, "try_ways", step)
    step.__name__ = "step"
    settings = StepSettings.of(tiny_llama, n_ctx=0, profile=profile)
    passages = [PlantedPassage((1,) * n, (1,), (1,), ()) for n in (300, 400)]
    found = compare_ways(Spread(), settings, passages)
    assert (found.n_texts, found.n_tokens, found.n_facts) == (2, 400, 6)
    assert [each.n_known for each in found.compared] == [(0, 0), (0, 0), (6, 6), (1, 0)]
    assert found.compared[3].facts == ((0, 0, 0, 1, 0, 0), (0,) * 6)
    for factors, kind in (((1, 3), "divergences"), ((1, 5), "repetitions")):
        expected = kl[:, :, None] * np.array(factors)
        tables = [getattr(each, kind) for each in found.compared]
        np.testing.assert_allclose(tables, expected)
    assert found.repeats == (0.25, 0.75)
    assert found.best == WAYS[2]


def test_calibration_compares_and_names_what_won(tiny_llama: Path) -> None:
    announced: list[Extent] = []
    read: list[int] = []
    found = calibrate(tiny_llama, long_texts(), LONG, announced.append, read.append)
    assert sum(read) == announced[0].n_tokens
    assert announced[0].seconds is not None
    assert 0.0 < announced[0].seconds < 600.0
    comparison = found.comparison
    assert comparison is not None
    assert [each.way for each in comparison.compared] == list(WAYS)
    assert comparison.n_texts == 1
    assert LEAST_PASSAGE < comparison.n_tokens <= PASSAGE
    assert comparison.best in WAYS
    assert (found.predictor is None) == (comparison.best == NO_PROFILE)
    assert policy_named("auto", found, "headwise").name == (
        PREDICTOR_ONLY if comparison.best == NO_PROFILE else comparison.best
    )


def test_a_profile_that_is_worse_than_none_is_not_used(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "best_way", lambda *_: NO_PROFILE)
    found = calibrate(tiny_llama, long_texts(), LONG)
    assert found.comparison is not None
    assert found.comparison.best == NO_PROFILE
    assert found.predictor is None
    assert found.curves is not None
    assert policy_named("auto", found, "headwise") == policy_named("auto", None, "headwise")


def test_texts_too_short_to_compare_leave_only_the_predictor(profile: EntropyProfile) -> None:
    assert profile.comparison is not None
    assert profile.comparison.compared == ()
    assert profile.comparison.best == PREDICTOR_ONLY


@some("gpt2", "jamba")
def test_models_without_a_predictor_compare_budgets(name: str, tmp_path: Path) -> None:
    read: list[int] = []
    announced: list[Extent] = []
    path = written(MODELS[name], tmp_path)
    found = calibrate(path, long_texts(), LONG, announced.append, read.append)
    assert sum(read) == announced[0].n_tokens
    assert found.comparison is not None
    assert [each.way for each in found.comparison.compared] == [NO_PROFILE, WAYS[2]]


@some("gemma3")
def test_models_with_windows_are_calibrated(name: str, tmp_path: Path) -> None:
    """Models with windows are calibrated, though calibration reads parts of a text again, which
    needs entries outside the windows.
    """
    texts = [Text(f"{i}.txt", sentences(160, i)) for i in range(5)]
    path = written(MODELS[name], tmp_path)
    found = calibrate(path, texts, replace(LONG, curve_length=1024))
    assert found.curves is not None
    assert found.curves.layer_damage is not None
    assert found.predictor is not None or found.comparison is not None


def test_passages_have_facts_and_go_on() -> None:
    def tokenize(text: str) -> list[int]:
        return [len(word) for word in text.split()]

    texts = read_texts()
    passages = passages_of(texts, tokenize, tokenize, 10_000, seed=1)
    assert len(passages) == len(texts)
    for passage in passages:
        assert LEAST_PASSAGE <= len(passage.tokens) <= PASSAGE
        assert 16 <= len(passage.following) <= CONTINUATION
    assert sum(len(passage.asked) == 2 * FACTS for passage in passages) > 15
    short = passages_of([Text("a", "word " * 200)], tokenize, tokenize, 10_000, seed=1)
    assert short == []
    (plain,) = passages_of([Text("a", "word " * 2000)], tokenize, tokenize, 600, seed=1)
    assert plain.asked == ()
    assert len(plain.tokens) == 600 - CONTINUATION
    assert len(plain.following) == 600 // 8
