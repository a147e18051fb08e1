"""A predictor that is fitted again as lessons grow has the least-squares weights of all entries."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from entropykv.profile.growing import MOST_WEIGHT, GrowingPredictor
from entropykv.profile.predictor import ScorePredictor

Floats = npt.NDArray[np.float64]
N_FEATURES = 9
VALUES = slice(4, 7)
N_HEADS = 2


class Entries:
    """Hold entries of two KV heads: features of different size and mean, and their targets."""

    def __init__(self, n: int, seed: int, sign: float = 1.0) -> None:
        truth = np.random.default_rng(99)
        random = np.random.default_rng(seed)
        mixing = truth.standard_normal((N_FEATURES, N_FEATURES))
        slopes = truth.standard_normal((N_HEADS, N_FEATURES)) / 4
        means = np.arange(N_FEATURES) * 3.0
        self.x = random.standard_normal((N_HEADS, n, N_FEATURES)) @ mixing + means
        noise = random.standard_normal((N_HEADS, n))
        self.y = sign * np.einsum("hnf,hf->hn", self.x - means, slopes) - 4.0 + noise

    def rows(self) -> Floats:
        ones = np.ones((*self.y.shape, 1))
        return np.concatenate([self.x, ones, self.y[..., None]], axis=2)


def lessons(*seen: Entries) -> list[tuple[int, Floats]]:
    """Return the lessons of one layer: the number of entries, and their sums of products."""
    rows = np.concatenate([each.rows() for each in seen], axis=1)
    return [(rows.shape[1], np.einsum("hni,hnj->hij", rows, rows))]


def fitted(*seen: Entries, n_known: int = 0) -> Floats:
    """Return the weights of a ridge regression over the entries, computed from its definition.

    The ridge is smaller if the weights are averaged with those of `n_known` other entries.
    """
    weights = []
    for head in range(N_HEADS):
        x = np.concatenate([each.x[head] for each in seen])
        y = np.concatenate([each.y[head] for each in seen])
        mean, deviation = x.mean(axis=0), x.std(axis=0)
        ridge = np.full(N_FEATURES, N_FEATURES / (n_known + len(x)))
        ridge[VALUES] *= 2.0
        pull = np.diag(np.sqrt(ridge * len(x)))
        targets = np.concatenate([y - y.mean(), np.zeros(N_FEATURES)])
        solution, *_ = np.linalg.lstsq(
            np.concatenate([(x - mean) / deviation, pull]), targets, rcond=None
        )
        slopes = solution / deviation
        weights.append([*slopes, y.mean() - slopes @ mean])
    return np.array(weights)


def correlation(weights: Floats, entries: Entries) -> float:
    predicted = np.einsum("hnf,hf->hn", entries.rows()[..., :-1], weights)
    return float(
        np.mean([np.corrcoef(p, y)[0, 1] for p, y in zip(predicted, entries.y, strict=True)])
    )


def test_it_is_the_ridge_regression_of_all_lessons() -> None:
    first, second = Entries(40, 1), Entries(30, 2)
    growing = GrowingPredictor([VALUES], None)
    assert growing.grow(lessons(first))
    assert growing.correlation is None
    assert growing.grow(lessons(first, second))
    assert growing.predictor is not None
    np.testing.assert_allclose(growing.predictor.weights[0], fitted(first, second), rtol=1e-4)
    assert growing.predictor.n_tokens == 70


def test_what_was_known_is_tested_with_what_is_new() -> None:
    """A predictor's correlation is measured on new entries, not on those it was fitted to."""
    first, second, third = Entries(40, 1), Entries(30, 2), Entries(50, 3)
    growing = GrowingPredictor([VALUES], None)
    growing.grow(lessons(first))
    growing.grow(lessons(first, second))
    assert growing.correlation == pytest.approx(correlation(fitted(first), second), abs=1e-5)
    growing.grow(lessons(first, second, third))
    assert growing.correlation == pytest.approx(correlation(fitted(first, second), third), abs=1e-5)
    assert growing.predictor is not None
    assert growing.predictor.correlation == growing.correlation


def test_other_lessons_do_not_agree() -> None:
    growing = GrowingPredictor([VALUES], None)
    first, opposite = Entries(80, 1), Entries(80, 2, sign=-1.0)
    growing.grow(lessons(first))
    growing.grow(lessons(first, opposite))
    assert growing.correlation is not None
    assert growing.correlation < -0.3
    growing.forget()
    assert growing.predictor is None
    growing.grow(lessons(opposite))
    assert growing.correlation is None


def test_what_other_processes_have_learnt_is_averaged_in() -> None:
    elsewhere, here, then = Entries(60, 4), Entries(20, 5), Entries(40, 6)
    known = ScorePredictor((fitted(elsewhere).astype(np.float32),), 60)
    growing = GrowingPredictor([VALUES], known)
    assert growing.predictor is known
    growing.grow(lessons(here))
    assert growing.correlation == pytest.approx(correlation(fitted(elsewhere), here), abs=1e-5)
    mean = 0.75 * fitted(elsewhere) + 0.25 * fitted(here, n_known=60)
    assert growing.predictor is not None
    np.testing.assert_allclose(growing.predictor.weights[0], mean, rtol=1e-4)
    growing.grow(lessons(here, then))
    assert growing.correlation == pytest.approx(correlation(mean, then), abs=1e-5)
    np.testing.assert_allclose(
        growing.predictor.weights[0],
        0.5 * fitted(elsewhere) + 0.5 * fitted(here, then, n_known=60),
        rtol=1e-4,
    )
    assert growing.predictor.n_tokens == 120


def test_what_is_settled_is_averaged_with_what_comes_later() -> None:
    """After settle(), lessons begin anew, and their fit is averaged with the former one."""
    first, second = Entries(40, 1), Entries(80, 2)
    growing = GrowingPredictor([VALUES], None)
    growing.grow(lessons(first))
    growing.settle()
    growing.grow(lessons(second))
    assert growing.correlation == pytest.approx(correlation(fitted(first), second), abs=1e-5)
    assert growing.predictor is not None
    assert growing.predictor.n_tokens == 120
    mean = (fitted(first) + 2.0 * fitted(second, n_known=40)) / 3.0
    np.testing.assert_allclose(growing.predictor.weights[0], mean, rtol=1e-4)


def test_weights_of_texts_that_say_nothing_are_refused() -> None:
    """Texts in which a feature hardly varies are refused, because a huge weight of it would explain
    the targets.
    """
    first, odd = Entries(40, 1), Entries(40, 2)
    odd.x[:, :, 3] = 5e-3 * odd.y
    growing = GrowingPredictor([VALUES], None)
    assert growing.grow(lessons(first))
    before = growing.predictor
    growing.forget()
    assert not growing.grow(lessons(odd))
    assert growing.predictor is None
    assert before is not None
    assert np.abs(before.weights[0]).max() < MOST_WEIGHT


def test_features_that_vary_by_rounding_alone_are_left_out() -> None:
    """Features that vary only by rounding get no weight, such as a channel of keys with a huge
    bias, or one that is 1e-5 where usual channels are 1.
    """
    entries = Entries(60, 1)
    rounding = np.random.default_rng(5).standard_normal((N_HEADS, 60))
    entries.x[:, :, 2] = 145.0 + 0.05 * rounding
    entries.x[:, :, 8] = 1e-5 * rounding
    growing = GrowingPredictor([VALUES], None)
    assert growing.grow(lessons(entries))
    assert growing.predictor is not None
    assert not growing.predictor.weights[0][:, [2, 8]].any()
    assert growing.predictor.weights[0][:, :2].all()
