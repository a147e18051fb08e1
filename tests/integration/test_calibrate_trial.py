"""Calibration finds by trial which measure policy auto should use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from entropykv import Session
from entropykv.calibration import trial
from entropykv.calibration.measure import calibrate
from entropykv.calibration.predictions import LEAST_TEXT
from entropykv.calibration.spread import Spread, StepSettings
from entropykv.calibration.trial import best_importance, trial_losses, trial_tokens
from entropykv.profile.curves import IMPORTANCES
from entropykv.profile.profile import EntropyProfile
from entropykv.session.echo import OVERLAP, REQUEST
from tests.support.calibration_texts import QUICK, some_texts
from tests.support.logits import tokens_for
from tests.support.model_reference import log_probabilities_after


@pytest.fixture(scope="module")
def profile(tiny_llama: Path) -> EntropyProfile:
    return calibrate(tiny_llama, some_texts(), QUICK)


def test_losses_of_a_trial_are_those_of_the_definition(
    tiny_llama: Path, profile: EntropyProfile
) -> None:
    """A session reads half of the text inside a tenth of it, and predicts the rest."""
    tokens = tokens_for(640)
    half, n_continued, n_repeated = 320, 80, 40
    asked: list[tuple[list[int], list[int]]] = []
    expected = []
    for importance in IMPORTANCES:
        with Session(
            tiny_llama,
            n_ctx=640,
            kv_budget=32,
            policy=f"profile:{importance}",
            entropy_config=profile,
            n_threads=2,
        ) as session:
            request = session.tokenize(REQUEST, add_bos=False)
            repeated = tokens[OVERLAP : OVERLAP + n_repeated]
            asked = [([], tokens[half : half + n_continued]), (request, repeated)]
            expected.append(sum(loss_of(session, tiny_llama, tokens[:half], *a) for a in asked))
    settings = StepSettings.of(tiny_llama, n_ctx=640, n_threads=2, profile=profile)
    texts = [tuple(tokens), tuple(tokens_for(LEAST_TEXT - 1))]
    losses = trial_losses(Spread(), settings, texts)
    assert losses is not None
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    assert min(expected) > 1e-3
    assert abs(expected[0] - expected[1]) > 0.04 * min(expected)
    again = trial_losses(Spread(), settings, [texts[0], texts[0]])
    np.testing.assert_allclose(again, losses)


def loss_of(
    session: Session, path: Path, read: list[int], before: list[int], following: list[int]
) -> float:
    session.reset()
    session.decode(read)
    rows = session.decode([*before, *following], all_logits=True)[len(before) :].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    first = len(read) + len(before)
    whole = log_probabilities_after(path, [*read, *before, *following], first)
    right = np.mean(whole[:-1].argmax(axis=1) == np.array(following[1:])) if before else 1.0
    return float(right * (np.exp(whole) * (whole - rows)).sum(axis=1).mean())


def test_the_least_loss_decides(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, profile: EntropyProfile
) -> None:
    settings = StepSettings.of(tiny_llama, n_ctx=0, profile=profile)
    for losses, best in (([0.2, 0.1], "predicted"), ([0.1, 0.2], "mass+values+predicted")):
        monkeypatch.setattr(trial, "trial_losses", lambda *_, found=losses: np.array(found))
        assert best_importance(Spread(), settings, []) == best


def test_a_profile_names_what_its_trial_found(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, profile: EntropyProfile
) -> None:
    assert profile.curves is not None
    assert profile.curves.importance is None  # The texts are too short.
    read: list[int] = []
    announced: list[int] = []
    settings = replace(QUICK, curve_length=LEAST_TEXT, curve_texts=1)
    monkeypatch.setattr(trial, "IMPORTANCES", IMPORTANCES[::-1])
    reversed_names = calibrate(tiny_llama, some_texts(), settings, announced.append, read.append)
    monkeypatch.undo()
    found = calibrate(tiny_llama, some_texts(), settings)
    assert sum(read) == sum(announced)
    assert found.curves is not None
    assert found.curves.importance in IMPORTANCES
    assert reversed_names.curves is not None
    assert reversed_names.curves.importance == found.curves.importance


def test_without_a_predictor_there_is_no_trial(tiny_llama: Path, profile: EntropyProfile) -> None:
    assert profile.predictor is not None
    settings = StepSettings.of(tiny_llama, n_ctx=0, profile=replace(profile, predictor=None))
    assert best_importance(Spread(), settings, [tuple(tokens_for(LEAST_TEXT))]) is None


def test_short_texts_are_no_trial(tiny_llama: Path, profile: EntropyProfile) -> None:
    settings = StepSettings.of(tiny_llama, n_ctx=0, profile=profile)
    assert best_importance(Spread(), settings, [tuple(tokens_for(LEAST_TEXT - 1))]) is None
    assert trial_tokens([LEAST_TEXT - 1]) == 0
    assert trial_tokens([LEAST_TEXT, 1024]) == 3 * (128 + 32 + 16 + 512 + 128 + 64)
