"""Predict scores of a headwise store's entries, and collect what a predictor is fitted to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import ProfileError
from entropykv.profile.predictor import ScorePredictor


class ScorePrediction:
    """Hold the predictor of a store: of all stores that share its pool of pages, too."""

    def __init__(self, store: _core.HeadwiseStore, n_layers: int) -> None:
        """Serve a store of `n_layers` attention layers."""
        self._store = store
        self._layers = range(n_layers)

    @property
    def n_features(self) -> list[int]:
        """Return how many features an entry of each layer has: _core.pyi says which."""
        return [self._store.predictor_features(layer) for layer in self._layers]

    def adopt(self, predictor: ScorePredictor) -> None:
        """Score entries that are read from now on by a profile's predictor.

        Raises ProfileError for one of a model whose entries have other features.
        """
        n_features = [of_layer.shape[1] for of_layer in predictor.weights]
        if n_features != self.n_features:
            raise ProfileError(
                f"the profile's predictor is for {n_features[0]} features of an entry, and this "
                f"model's entries have {self.n_features[0]}; calibrate again"
            )
        self.set_predictor(predictor.weights)

    def set_predictor(self, weights: Sequence[npt.NDArray[np.float32]]) -> None:
        """Score entries that are read from now on, for a measure that predicts.

        `weights`: of every layer, (n_head_kv, n_features). Raises ValueError for another shape, for
        what is no finite number, and for RoPE that does not fit the keys.
        """
        for layer, of_layer in zip(self._layers, weights, strict=True):
            self._store.set_predictor(layer, of_layer)

    def collect_lessons(self, on: bool) -> None:
        """Add up what echoes show of the entries of their text, from the next micro-batch on.

        One sum for all stores of a pool. Raises ValueError for measures that predict nothing.
        """
        self._store.collect_lessons(on)

    def teach_stored(self, begin: int, end: int, shift: int) -> None:
        """Add lessons of text that was read before an echo repeated it, positions `begin` to `end`.

        `shift`: that of the store. Raises ValueError where lessons are not collected.
        """
        self._store.teach_stored(begin, end, shift)

    def lessons(self) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
        """Yield for every layer how many entries were added up, and their sums of products.

        One layer after the other: those of all layers of a large model take hundreds of MiB. Sums
        are (n_head_kv, n_features + 1, n_features + 1): _core.pyi says what of. Raises ValueError
        where none were collected.
        """
        return (self._store.lessons(layer) for layer in self._layers)

    def clear_lessons(self) -> None:
        """Begin lessons anew; give their memory back where they are not collected any more."""
        self._store.clear_lessons()
