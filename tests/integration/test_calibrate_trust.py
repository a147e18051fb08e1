"""Calibration takes trust from KV heads in which predictions lose more than they gain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from entropykv import Session
from entropykv.calibration.predictions import LEAST_TEXT
from entropykv.calibration.spread import Spread, StepSettings
from entropykv.calibration.trust import head_trust, trust_tokens
from entropykv.model.shipped import DEMOS
from entropykv.profile.find import profile_beside
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.profile import EntropyProfile
from entropykv.store.headwise import HeadwiseStore
from tests.support.logits import tokens_for
from training.facts import Writer


def documents(model: Path) -> list[list[int]]:
    """Return documents of facts about which the package's model can answer questions."""
    with Session(model, n_ctx=64, n_threads=1) as session:
        words = [Writer(f"trust {seed}").test_document(600, 4)[0] for seed in range(2)]
        return [session.tokenize("".join(of_text[1:-1]), add_bos=True)[:512] for of_text in words]


def misled(predictor: ScorePredictor, layer: int, head: int) -> ScorePredictor:
    """Return a predictor that favours no entry, except in one KV head, where it predicts the
    opposite.
    """
    weights = [np.zeros_like(of_layer) for of_layer in predictor.weights]
    for of_layer in weights:
        of_layer[:, -1] = -30.0
    weights[layer][head] = -predictor.weights[layer][head]
    # A predictor returns the logarithm of a share, which is negative; lower the negated one, so
    # that it is negative, too.
    weights[layer][head, -1] -= 3.0
    return replace(predictor, weights=tuple(weights))


def test_a_head_that_predictions_mislead_goes_without() -> None:
    """Where nothing is predicted, nothing gets worse, and trust stays 1.

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
    """The measure `predicted` has nothing else to rank by, so it uses the predictions without
    trust, too.
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
