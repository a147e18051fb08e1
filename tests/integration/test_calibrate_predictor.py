"""Calibration fits predictors to its texts, and takes trust from KV heads in which predictions lose
more than they gain.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from entropykv import Session
from entropykv.calibration.fitting import _EchoReader, fit_by_echoes, fitting_tokens
from entropykv.calibration.measure import Extent, calibrate
from entropykv.calibration.predictions import LEAST_TEXT
from entropykv.calibration.spread import Spread, StepSettings
from entropykv.calibration.trust import head_trust, trust_tokens
from entropykv.model.shipped import DEMOS
from entropykv.profile.curves import N_SINKS
from entropykv.profile.find import profile_beside
from entropykv.profile.growing import GrowingPredictor
from entropykv.profile.predictor import LOOKUP_SHARE, ScorePredictor
from entropykv.profile.profile import EntropyProfile
from entropykv.store.headwise import HeadwiseStore
from tests.architectures import MODELS
from tests.support.architecture_models import some, written
from tests.support.calibration_texts import QUICK, some_texts
from tests.support.logits import tokens_for
from training.facts import Writer


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
    """Beyond its floor, a small budget keeps the entries with the highest predicted scores."""
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
    """A predictor is the mean of the fits to single texts, each weighted by its tokens; the last
    text tests the fit to the others.
    """
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
    """Calibration makes no predictor for models with learned positions, which cannot be removed
    from keys, or with recurrent layers, which cannot read a text twice.
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


def documents(model: Path) -> list[list[int]]:
    """Return the beginnings of two documents of facts, 512 tokens each, for the shipped model."""
    with Session(model, n_ctx=64, n_threads=1) as session:
        words = [Writer(f"trust {seed}").test_document(600, 4)[0] for seed in range(2)]
        return [session.tokenize("".join(of_text[1:-1]), add_bos=True)[:512] for of_text in words]


def misled(predictor: ScorePredictor, layer: int, head: int) -> ScorePredictor:
    """Return a predictor that favours no entry, except that one KV head predicts the opposite."""
    weights = [np.zeros_like(of_layer) for of_layer in predictor.weights]
    for of_layer in weights:
        of_layer[:, -1] = -30.0
    weights[layer][head] = -predictor.weights[layer][head]
    # A predictor returns the logarithm of a share, which is negative; lower the negated one, so
    # that it is negative, too.
    weights[layer][head, -1] -= 3.0
    return replace(predictor, weights=tuple(weights))


def test_a_head_that_predictions_mislead_goes_without() -> None:
    """Trust becomes 0 in a KV head with opposite predictions, and stays 1 where none are made.

    Layer 0 is left out: its attention is so concentrated that even the smallest share, 2^-20,
    matters.
    """
    demo = DEMOS["bitnet"]
    whole = EntropyProfile.load(profile_beside(demo.path))
    predictor = whole.predictor
    assert predictor is not None
    read: list[int] = []
    texts = documents(demo.path)
    settings = StepSettings.of(
        demo.path, n_ctx=0, n_threads=1, profile=replace(whole, predictor=misled(predictor, 1, 0))
    )
    trust = head_trust(Spread(), settings, [tuple(text) for text in texts], read.append)
    expected = np.ones((len(predictor.shape), max(predictor.shape)))
    expected[1, 0] = 0.0
    assert trust is not None
    np.testing.assert_array_equal(trust[1:], expected[1:])
    assert sum(read) == trust_tokens([len(text) for text in texts])


def test_texts_that_are_too_short_show_nothing(tiny_llama: Path, profile: EntropyProfile) -> None:
    settings = StepSettings.of(tiny_llama, n_ctx=0, profile=profile)
    assert head_trust(Spread(), settings, [tuple(tokens_for(LEAST_TEXT - 1))]) is None
    assert trust_tokens([LEAST_TEXT - 1]) == 0


def scores(model: Path, profile: EntropyProfile, policy: str) -> list[np.ndarray]:
    with Session(
        model,
        n_ctx=512,
        kv_budget=1.0,
        kv_type="f16",
        policy=policy,
        entropy_config=profile,
        n_threads=1,
    ) as session:
        session.decode(tokens_for(300))
        store = session._slot.store
        assert isinstance(store, HeadwiseStore)
        return [store.core.importance(1, head) for head in range(2)]


def test_sessions_add_no_predictions_where_there_is_no_trust(
    tiny_llama: Path, profile: EntropyProfile
) -> None:
    """Sessions add no predictions in KV heads without trust; the measure `predicted` alone ignores
    trust, because it has nothing else to rank by.
    """
    assert profile.predictor is not None
    trust = np.ones((len(profile.predictor.shape), 2))
    trust[1, 0] = 0.0
    distrusting = replace(profile, predictor=replace(profile.predictor, trust=trust))
    mass = scores(tiny_llama, distrusting, "uniform")
    before = scores(tiny_llama, profile, "uniform:mass+predicted")
    after = scores(tiny_llama, distrusting, "uniform:mass+predicted")
    np.testing.assert_allclose(after[0], mass[0], rtol=1e-3, atol=1e-9)
    assert np.abs(before[0] - mass[0]).max() > 1e-4
    np.testing.assert_array_equal(after[1], before[1])
    alone = scores(tiny_llama, distrusting, "uniform:predicted")
    np.testing.assert_array_equal(alone, scores(tiny_llama, profile, "uniform:predicted"))
