"""Learn a predictor from few tokens: fit it again as lessons grow, and test it with what is new.

The predictor of several texts is the mean of their fits, not the fit of all their lessons: each fit
finds what matters within a text, while a fit of all lessons also explains how texts differ as
wholes, which ranks no entry of a text against another one.

A few hundred tokens are fewer than twice the features of an entry. Then the ridge decides how good
the fit is: one that is the number of features divided by that of tokens, and twice that for the
features that are values, is near the best for models with heads of 64, 128 and 256 numbers, for
prose, code, dialogue and French (docs/background/predicted-scores.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from entropykv.profile.predictor import LayerLessons, Ridge, ScorePredictor, Sums, Weights

RIDGE_OF_VALUES = 2.0
"""The factor of the ridge for the features that are elements of the value (V)."""
LEAST_VARIATION = 1e-3
"""A feature whose deviation is a smaller part of its mean varies by the rounding of sums alone, as
the channels of keys with huge biases do; so does one whose deviation is a smaller part of the
median deviation.
"""
MOST_WEIGHT = 100.0
"""The largest weight of a fit that is used; fits to ordinary texts have weights below 10."""
_LEAST_VARIANCE = 1e-12

_Moments = npt.NDArray[np.float64]


class GrowingPredictor:
    """Hold a predictor, and what shows how good it is for lessons that it was not fitted to."""

    correlation: float | None = None
    """Pearson's r of predicted and true logarithms in the newest lessons, of the predictor that was
    known before them; the mean over all KV heads. None: there was none before.
    """

    def __init__(self, value_features: Sequence[slice], known: ScorePredictor | None) -> None:
        """Begin without lessons; `known`: what was learnt elsewhere, None for nothing.

        `value_features`: for every layer, which features are elements of the value (V).
        """
        self._value_features = value_features
        self._known = known
        self.predictor = known
        """The mean of what is known and of what the lessons show, weighted by tokens; None if
        nothing is known.
        """
        self._former: list[_Moments] = []
        """The result of _moments() for the predictor and the lessons that it was fitted to."""

    def forget(self) -> None:
        """Forget all that is known, because newer lessons do not agree with it."""
        self._known = self.predictor = None
        self._former = []

    def settle(self) -> None:
        """Take the current predictor as what is known: the next lessons begin anew, and their fits
        are averaged with it.
        """
        self._known = self.predictor
        self._former = []

    def grow(self, lessons: Iterable[LayerLessons]) -> bool:
        """Fit the predictor again to lessons that have grown, and test the former one with what is
        new.

        `lessons`: the sums since the beginning, or since forget() or settle(). Returns False, and
        keeps the former predictor, if are_possible() rejects the new weights.
        """
        before, former = self.predictor, self._former
        n_known = self._known.n_tokens if self._known else 0
        weights, moments, correlations, n_tokens = [], [], [], 1
        for layer, (n_entries, sums) in enumerate(lessons):
            n_tokens = max(n_tokens, n_entries)
            if before is not None:
                new = _moments(before.weights[layer], sums)
                correlations += _correlations(new - former[layer] if former else new)
            of_layer = self._fitted(layer, n_known + n_entries, sums)
            if self._known is not None:
                share = n_known / (n_known + n_entries)
                of_layer = share * self._known.weights[layer] + (1.0 - share) * of_layer
            weights.append(of_layer.astype(np.float32))
            moments.append(_moments(weights[-1], sums))
        self.correlation = float(np.mean(correlations)) if correlations else None
        if not are_possible(weights):
            return False
        self.predictor = ScorePredictor(tuple(weights), n_known + n_tokens, self.correlation)
        self._former = moments
        return True

    def _fitted(self, layer: int, n_tokens: int, sums: Sums) -> Sums:
        """Return the weights of the sums' fit, (n_head_kv, n_features), as one part of a mean over
        `n_tokens` tokens.
        """
        n_features = sums.shape[1] - 2
        ridges = np.full(n_features, n_features / max(n_tokens, 1))
        ridges[self._value_features[layer]] *= RIDGE_OF_VALUES
        return np.array([Ridge(of_head, LEAST_VARIATION).weights(ridges) for of_head in sums])


def are_possible(weights: Iterable[Weights]) -> bool:
    """Tell whether all weights are finite, and smaller than MOST_WEIGHT except that of the
    constant; a fit to a text that teaches nothing may have others.
    """
    return all(
        np.isfinite(of_layer).all() and np.all(np.abs(of_layer[:, :-1]) < MOST_WEIGHT)
        for of_layer in weights
    )


def _moments(weights: Weights, sums: Sums) -> _Moments:
    """Return sums over the entries of every KV head, (n_head_kv, 6): 1, the prediction, its square,
    the target, its square, and prediction times target.
    """
    n = sums.shape[1] - 1
    of_heads = []
    for of_head, w in zip(sums, weights.astype(np.float64), strict=True):
        features = of_head[:n, :n]
        of_heads.append(
            [
                of_head[n - 1, n - 1],
                w @ features[n - 1],
                w @ features @ w,
                of_head[n, n - 1],
                of_head[n, n],
                w @ of_head[:n, n],
            ]
        )
    return np.array(of_heads)


def _correlations(moments: _Moments) -> list[float]:
    """Return Pearson's r of every KV head; 0 if one side does not vary."""
    count, predicted, square, target, of_targets, together = moments.T
    count = np.maximum(count, 1.0)
    variance = square / count - (predicted / count) ** 2
    of_targets = of_targets / count - (target / count) ** 2
    common = together / count - predicted * target / count**2
    varies = (variance > _LEAST_VARIANCE) & (of_targets > _LEAST_VARIANCE)
    scale = np.sqrt(np.where(varies, variance * of_targets, 1.0))
    r: list[float] = np.where(varies, np.clip(common / scale, -1.0, 1.0), 0.0).tolist()
    return r
