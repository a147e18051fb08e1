"""Predict the scores of a headwise store's entries, and collect the sums that a predictor is fitted
to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import ProfileError
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.predictor import ScorePredictor


def ranking_predictor(config: ResolvedConfig) -> ScorePredictor | None:
    """Return what predicts the scores of new entries; None if the policy predicts nothing, or if
    no predictor is known.
    """
    predictor = config.predictor
    if predictor is None or not config.policy.importance.adds_predictions:
        return predictor
    return predictor.beside_queries()


def check_features(predictor: ScorePredictor, n_features: Sequence[int]) -> None:
    """Raise ProfileError unless a predictor is for entries with so many features in each layer."""
    known = [of_layer.shape[1] for of_layer in predictor.weights]
    if known != list(n_features):
        raise ProfileError(
            f"the profile's predictor is for {known[0]} features of an entry, and this model's "
            f"entries have {n_features[0]}; calibrate again"
        )


def fits_nodes(predictor: ScorePredictor, hook: _core.GraphHook) -> bool:
    """Tell whether a predictor is for the KV heads and features of a model's attention layers."""
    expected = [
        (node.shape.n_head_kv, _core.feature_count(node.shape, node.rope)) for node in hook.nodes
    ]
    return [of_layer.shape for of_layer in predictor.weights] == expected


class ScorePrediction:
    """Hold the predictor of a store, and of all stores that share its pool."""

    def __init__(self, store: _core.HeadwiseStore, layers: Sequence[_core.LayerShape]) -> None:
        """Serve a store of these attention layers."""
        self._store = store
        self._layers = range(len(layers))
        self._n_head_kv = [shape.n_head_kv for shape in layers]

    @property
    def n_features(self) -> list[int]:
        """Return how many features an entry of each layer has: _core.pyi says which."""
        return [self._store.predictor_features(layer) for layer in self._layers]

    def fits(self, predictor: ScorePredictor) -> bool:
        """Tell whether a predictor is for the KV heads and features of the store's entries."""
        expected = zip(self._n_head_kv, self.n_features, strict=True)
        return [of_layer.shape for of_layer in predictor.weights] == list(expected)

    def adopt(self, predictor: ScorePredictor) -> None:
        """Predict scores of new entries with a profile's predictor.

        Raises ProfileError if it belongs to entries with other features.
        """
        check_features(predictor, self.n_features)
        self.set_predictor(predictor.weights)

    def set_predictor(self, weights: Sequence[npt.NDArray[np.float32]]) -> None:
        """Predict scores of new entries, for a measure that uses predictions.

        `weights`: for every layer, (n_head_kv, n_features). Raises ValueError for another shape,
        for numbers that are not finite, and for RoPE that does not fit the keys.
        """
        for layer, of_layer in zip(self._layers, weights, strict=True):
            self._store.set_predictor(layer, of_layer)

    def collect_lessons(self, on: bool) -> None:
        """From the next micro-batch on, sum up how much attention echoes give to the entries of
        their text.

        All stores of a pool share the sums. Raises ValueError for measures without predictions.
        """
        self._store.collect_lessons(on)

    def teach_stored(self, begin: int, end: int, shift: int) -> None:
        """Add sums for text at positions `begin` to `end` that was read before an echo repeated it.

        `shift`: that of the store. Raises ValueError if lessons are not collected.
        """
        self._store.teach_stored(begin, end, shift)

    def predict_held(self, n_tokens: int, shift: int) -> None:
        """Predict the scores of all entries that are held, for a text of n_tokens.

        These are entries that were read before there was a predictor; larger scores of an echo are
        kept. `shift`: that of the store.
        """
        self._store.predict_stored(n_tokens, shift)

    def lessons(self) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
        """Yield for every layer the number of entries, and their sums of products.

        Layers are yielded one by one, because all layers of a large model take hundreds of MiB.
        Sums are (n_head_kv, n_features + 1, n_features + 1): see _core.pyi. Raises ValueError if
        none were collected.
        """
        return (self._store.lessons(layer) for layer in self._layers)

    def clear_lessons(self) -> None:
        """Reset the sums, and free their memory if they are no longer collected."""
        self._store.clear_lessons()
