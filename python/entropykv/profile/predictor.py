"""Predict how much attention an entry will get, by a linear function of its key and value.

For every KV head, the target is the logarithm of the largest attention that any query of a
repetition of the text gives to the entry. This is the score of KVzip (Kim et al. 2025,
arXiv:2505.23416), for which a text is read twice. A linear function that was fitted once on other
texts computes it while a text is read for the first time. KVzap (arXiv:2601.07891) also predicts
this score, but from hidden states instead of keys and values.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv.errors import ProfileError
from entropykv.profile.json_fields import (
    ADVICE,
    FloatArray,
    integer_in,
    number_in,
    object_in,
    rounded,
    shown,
    table_in,
    text_in,
)

Weights = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]
LayerLessons = tuple[int, Sums]
Lessons = Sequence[LayerLessons]
"""For every layer: how many entries were seen, and sums of products of their features and targets.

The sums are (n_head_kv, n_features + 1, n_features + 1); the last feature is always 1, and the last
row and column belong to the target: see `HeadwiseStore.lessons` in _core.pyi.
"""

LOOKUP_SHARE = 0.2
"""The share of a text's entries, those with the highest predicted scores, that `lookups` counts."""
_LEAST_DEVIATION = 1e-6
_MOST_FEATURES = 1 << 16
_MOST_TOKENS = 2**31 - 1
_NAMES = ("n_features", "n_tokens", "correlation", "lookups", "weights")
_LEAST_TRUST = 1e-9
"""A factor that makes any share of attention negligible."""


@dataclass(frozen=True, eq=False)
class ScorePredictor:
    """Hold the linear functions of all KV heads, and how good their predictions are.

    `weights`: for every attention layer, (n_head_kv, n_features), float32, read-only; _core.pyi
    describes the features of an entry. `n_tokens`: the tokens of text that they were fitted to.
    `correlation`: Pearson's r of predicted and true logarithms in texts that were held back when it
    was measured, the mean over all KV heads; None if no text was. `lookups`: (n_layer, n_head_kv),
    for every KV head the share of its entries that is among the LOOKUP_SHARE of all entries, of all
    KV heads, with the highest predicted scores; it is large for heads that look facts up; None if
    it was not counted. `trust`: (n_layer, n_head_kv), what predicted shares of attention are
    multiplied by, from 0 to 1, where they are added to what queries gave. It is 0 where a KV head
    keeps more of what it needs without them (calibration/trust.py); None, if it was not measured,
    means 1 everywhere. Raises ProfileError for values that are not numbers, and for other shapes.
    """

    weights: tuple[Weights, ...]
    n_tokens: int
    correlation: float | None = None
    lookups: FloatArray | None = None
    trust: FloatArray | None = None

    def __post_init__(self) -> None:
        """Make read-only copies, and check them; raises ProfileError."""
        copies = []
        for of_layer in self.weights:
            copy = np.array(of_layer, dtype=np.float32)
            if copy.ndim != 2 or not np.isfinite(copy).all():
                raise ProfileError(
                    "profile: predictor.weights must be numbers, [KV head][feature] for every "
                    f"layer; {ADVICE}"
                )
            copy.flags.writeable = False
            copies.append(copy)
        object.__setattr__(self, "weights", tuple(copies))
        for name in ("lookups", "trust"):
            self._check_shares(name)

    def _check_shares(self, name: str) -> None:
        if getattr(self, name) is None:
            return
        shares = np.array(getattr(self, name), dtype=np.float64)
        expected = (len(self.shape), max(self.shape, default=0))
        if shares.shape != expected or not np.all((shares >= 0.0) & (shares <= 1.0)):
            raise ProfileError(
                f"profile: predictor.{name} must be numbers from 0 to 1, [layer][KV head]; {ADVICE}"
            )
        shares.flags.writeable = False
        object.__setattr__(self, name, shares)

    def beside_queries(self) -> ScorePredictor:
        """Return the predictor of shares that are added to what queries gave.

        Its shares are those of this one, multiplied by `trust`: what it returns are logarithms.
        """
        if self.trust is None:
            return self
        weights = [of_layer.copy() for of_layer in self.weights]
        for of_layer, trust in zip(weights, self.trust, strict=True):
            of_layer[:, -1] += np.log(np.maximum(trust[: len(of_layer)], _LEAST_TRUST))
        return replace(self, weights=tuple(weights), trust=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of KV heads of every layer."""
        return tuple(len(of_layer) for of_layer in self.weights)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the predictor: weights are base64 of float32, little-endian."""
        flat = b"".join(of_layer.astype("<f4").tobytes() for of_layer in self.weights)
        trust = {} if self.trust is None else {"trust": rounded(self.trust)}
        r = self.correlation
        return {
            "n_features": [of_layer.shape[1] for of_layer in self.weights],
            "n_tokens": self.n_tokens,
            # The last digits of the correlation depend on the threads of numpy's linear algebra.
            "correlation": None if r is None else rounded(np.asarray(r)),
            "lookups": None if self.lookups is None else rounded(self.lookups),
            **trust,
            "weights": base64.b64encode(flat).decode("ascii"),
        }

    @classmethod
    def from_json(cls, value: object, where: str, shape: tuple[int, int]) -> ScorePredictor:
        """Read the JSON object; `shape`: (n_layer, n_head_kv). ProfileError names a field."""
        n_layer, n_head_kv = shape
        trusts = isinstance(value, dict) and "trust" in value  # Earlier versions wrote no trust.
        data = object_in(value, where, "predictor", (*_NAMES, *(["trust"] if trusts else [])))
        sizes = data["n_features"]
        if not isinstance(sizes, list) or len(sizes) != n_layer:
            raise ProfileError(
                f"{where}: predictor.n_features must be a list of {n_layer}; {ADVICE}"
            )
        n_features = [
            integer_in(n, where, f"predictor.n_features[{i}]", 1, _MOST_FEATURES)
            for i, n in enumerate(sizes)
        ]
        correlation = data["correlation"]
        if correlation is not None:
            correlation = number_in(correlation, where, "predictor.correlation", -1.0, 1.0)
        lookups = data["lookups"]
        if lookups is not None:
            lookups = table_in(lookups, where, "predictor.lookups", shape, 1.0)
        trust = table_in(data["trust"], where, "predictor.trust", shape, 1.0) if trusts else None
        return cls(
            _weights_in(data["weights"], where, n_head_kv, n_features),
            integer_in(data["n_tokens"], where, "predictor.n_tokens", 1, _MOST_TOKENS),
            correlation,
            lookups,
            trust,
        )


def lookups_of(scores: Sequence[Sequence[npt.NDArray[np.float32]]]) -> FloatArray:
    """Return ScorePredictor.lookups from the predicted scores of a text, [layer][KV head][entry].

    Only the order of the scores matters.
    """
    threshold = np.quantile(
        np.concatenate([s for layer in scores for s in layer]), 1 - LOOKUP_SHARE
    )
    return np.array([[float(np.mean(s > threshold)) for s in layer] for layer in scores])


def _weights_in(
    value: object, where: str, n_head_kv: int, n_features: Sequence[int]
) -> tuple[Weights, ...]:
    text = text_in(value, where, "predictor.weights")
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")
    except (binascii.Error, ValueError):
        raise ProfileError(
            f"{where}: predictor.weights must be base64 of float32 values, not {shown(text)}; "
            f"{ADVICE}"
        ) from None
    if flat.size != n_head_kv * sum(n_features):
        raise ProfileError(
            f"{where}: predictor.weights has {flat.size} values; {n_head_kv} KV heads of "
            f"{len(n_features)} layers need {n_head_kv * sum(n_features)}; {ADVICE}"
        )
    if not np.isfinite(flat).all():
        raise ProfileError(f"{where}: predictor.weights has values that are not finite; {ADVICE}")
    ends = np.cumsum([n_head_kv * n for n in n_features])[:-1]
    return tuple(
        part.reshape(n_head_kv, n)
        for part, n in zip(np.split(flat.astype(np.float32), ends), n_features, strict=True)
    )


class Ridge:
    """Fit the linear function of one KV head from its sums of products."""

    def __init__(self, sums: Sums, least_variation: float) -> None:
        """Standardise `sums`, those of one KV head in Lessons: (n_features + 1, n_features + 1).

        Features whose deviation is at most `least_variation` of their mean, or of the median of all
        deviations, are ignored.
        """
        n = len(sums) - 2  # The constant feature is not counted.
        count = max(sums[n, n], 1.0)
        self._means = sums[:n, n] / count
        self._mean = sums[n + 1, n] / count
        covariance = sums[:n, :n] / count - np.outer(self._means, self._means)
        with_target = sums[:n, n + 1] / count - self._means * self._mean
        self._deviations = np.sqrt(np.maximum(np.diag(covariance), 0.0))
        # Features that vary only by rounding carry no information.
        usual = np.maximum(np.abs(self._means), np.median(self._deviations))
        least = np.maximum(_LEAST_DEVIATION, least_variation * usual)
        self._varies = self._deviations > least
        scale = self._deviations[self._varies]
        self._matrix = covariance[np.ix_(self._varies, self._varies)] / np.outer(scale, scale)
        self._target = with_target[self._varies] / scale

    def weights(self, ridges: FloatArray) -> Sums:
        """Return the weights of all features, (n_features,), the constant one at the end; `ridges`:
        one for each feature but the constant one, (n_features - 1,).
        """
        matrix = self._matrix + np.diag(ridges[self._varies])
        return self._unscaled(np.linalg.solve(matrix, self._target))

    def _unscaled(self, solution: Sums) -> Sums:
        weights = np.zeros(len(self._means) + 1)
        weights[:-1][self._varies] = solution / self._deviations[self._varies]
        weights[-1] = self._mean - weights[:-1] @ self._means
        return weights
