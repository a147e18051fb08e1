"""Calibration fits predictors to the right data, and sessions use them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from entropykv import Session
from entropykv.calibration.fitting import _EchoReader, fit_by_echoes, fitting_tokens
from entropykv.calibration.measure import Extent, calibrate
from entropykv.calibration.spread import Spread, StepSettings
from entropykv.profile.curves import N_SINKS
from entropykv.profile.growing import GrowingPredictor
from entropykv.profile.predictor import LOOKUP_SHARE
from entropykv.profile.profile import EntropyProfile
from entropykv.store.headwise import HeadwiseStore
from tests.architectures import MODELS
from tests.support.architecture_models import some, written
from tests.support.calibration_texts import QUICK, some_texts
from tests.support.logits import tokens_for


def test_calibration_fits_a_predictor(profile: EntropyProfile) -> None:
    predictor = profile.predictor
    assert predictor is not None
    assert predictor.shape == (2, 2, 2)
    assert predictor.n_tokens == 4 * (96 - N_SINKS)
    assert predictor.correlation is not None
    assert predictor.correlation > 0.4
    assert predictor.lookups is not None
    assert predictor.lookups.mean() == pytest.approx(LOOKUP_SHARE, abs=0.01)
    assert predictor.lookups.std() > 0.01


def test_sessions_rank_by_the_predictor_of_a_file(
    tiny_llama: Path, profile: EntropyProfile, tmp_path: Path
) -> None:
    """Beyond its floor, a small budget keeps the entries with the highest scores of the
    functions.
    """
    path = tmp_path / "profile.json"
    profile.save(path)
    tokens = tokens_for(400)  # One micro-batch, so that everything is evicted at once.
    scores, kept, recent = [], [], 0
    for kv_budget in (1.0, 0.25):
        with Session(
            tiny_llama,
            n_ctx=512,
            kv_budget=kv_budget,
            kv_type="f16",
            policy="uniform:predicted",
            entropy_config=path,
            n_threads=1,
        ) as session:
            session.decode(tokens)
            store = session._slot.store
            assert isinstance(store, HeadwiseStore)
            scores.append(store.core.importance(1, 1))
            kept, recent = store.entries(1, 1).tolist(), store.reach().recent_window
    assert len(scores[0]) == 400
    chosen = [p for p in kept if N_SINKS <= p < 400 - recent]
    dropped = sorted(set(range(400)) - set(kept))
    assert len(chosen) > 20
    assert scores[0][chosen].min() >= scores[0][dropped].max()
    assert len(set(scores[0].tolist())) > 50


def test_it_is_the_mean_of_the_fits_of_texts(tiny_llama: Path) -> None:
    """The fit of each text counts by its tokens, and the last text tests the others."""
    texts = [tuple(tokens_for(n, seed=seed)) for seed, n in enumerate((500, 300, 400))]
    settings = StepSettings.of(tiny_llama, n_ctx=500, n_threads=2)
    read: list[int] = []
    predictor = fit_by_echoes(Spread(), settings, texts, read.append)
    assert predictor is not None
    assert predictor.n_tokens == sum(len(text) - N_SINKS for text in texts)
    assert sum(read) == fitting_tokens([500, 300, 400]) == 1200 + 400
    assert fitting_tokens([]) == 0
    before = fit_by_echoes(Spread(), settings, texts[:2])
    with _EchoReader(settings.path, 500, settings.kv_type, 2) as reader:
        reader.read(texts[2])
        lessons = reader.take_lessons()
        values = reader.value_features
    assert before is not None
    growing = GrowingPredictor(values, before)
    growing.grow(lessons)
    assert growing.predictor is not None
    assert predictor.correlation == pytest.approx(growing.correlation)
    for ours, theirs in zip(predictor.weights, growing.predictor.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_end_of_a_single_text_tests_the_fit_of_the_rest(tiny_llama: Path) -> None:
    read: list[int] = []
    text = tuple(tokens_for(640))  # The text is longer than a chunk.
    settings = StepSettings.of(tiny_llama, n_ctx=640, n_threads=2)
    predictor = fit_by_echoes(Spread(), settings, [text], read.append)
    assert predictor is not None
    assert predictor.n_tokens == 640 - N_SINKS
    assert predictor.correlation is not None
    assert predictor.correlation > 0.3
    assert sum(read) == fitting_tokens([640]) == 2 * 640


def test_the_threads_do_not_change_it(tiny_llama: Path) -> None:
    texts = [tuple(tokens_for(300, seed=seed)) for seed in range(2)]
    settings = [StepSettings.of(tiny_llama, n_ctx=300, n_threads=n) for n in (1, 2)]
    one, two = (fit_by_echoes(Spread(), each, texts) for each in settings)
    assert one is not None
    assert two is not None
    assert one.to_json() == two.to_json()


@some("gpt2", "jamba")
def test_models_whose_keys_cannot_be_turned_back_get_none(name: str, tmp_path: Path) -> None:
    """Learned positions cannot be removed from keys, and recurrent layers cannot read a
    text twice.
    """
    announced: list[Extent] = []
    read: list[int] = []
    path = written(MODELS[name], tmp_path)
    profile = calibrate(path, some_texts(), QUICK, announced.append, read.append)
    assert profile.curves is not None
    assert profile.curves.importance is None
    assert profile.predictor is None
    assert [extent.n_tokens for extent in announced] == [sum(read)]
    assert np.isfinite(profile.head_entropies).all()
