"""A layer whose scores are predicted, or which collects what a predictor is fitted to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv import _core
from tests.support.reference import Rope, features, predicted

Array = npt.NDArray[np.float32]
N_SINKS = 3
ROPES = {
    "none": Rope(0),
    "neighbours": Rope(64),
    "halves": Rope(64, neox=True),
    "partial": Rope(24, offset=6, freq_base=500.0),
    "partial halves": Rope(22, offset=9, neox=True, freq_base=500.0),
    "yarn": Rope(64, n_ctx_orig=64, freq_scale=0.25, ext_factor=1.0),
}
LAYERS: dict[str, dict[str, Any]] = {
    "latent": {"dims": (72, 48), "latent": True},
    "odd": {"dims": (70, 33)},
    "window": {"window": 40},
    "readers": {"readers": 2},
    "large": {"dims": (256, 128)},
}


class PredictedLayer:
    """A store of one layer by measure predicted, or another one, and the rows that it read."""

    def __init__(
        self,
        kernel: str | None = None,
        kv_type: str = "f16",
        rope: Rope = ROPES["neighbours"],
        measure: str = "predicted",
        budget: int = 600,
        *,
        dims: tuple[int, int] = (64, 64),
        by_values: bool = False,
        **more: Any,
    ) -> None:
        shape = {name: more.pop(name) for name in ("window", "latent", "readers") if name in more}
        self.shape = _core.LayerShape(4, 2, *dims, **shape)
        self.kv_type, self.rope = kv_type, rope
        self.core = _core.HeadwiseStore(
            [self.shape],
            kv_type,
            _core.ImportanceSettings(
                getattr(_core.ScoreKind, measure), decay=0.9, by_values=by_values
            ),
            n_sinks=N_SINKS,
            recent_window=4,
            max_tokens=256,
            max_entries=600,
            n_threads=1,
            kernels=kernel,
            ropes=[_core.RopeParams(**rope._asdict())],
            **more,
        )
        self.core.set_budgets([budget] * 2, 2 * pages_of(self.shape, kv_type, budget), N_SINKS, 4)
        self.random = np.random.default_rng(11)
        self.k = np.zeros((0, 2, dims[0]), np.float32)
        self.v = np.zeros((0, 2, dims[1]), np.float32)

    def weights(self, bias: float = -6.0) -> Array:
        n = self.core.predictor_features(0)
        weights = self.random.standard_normal((2, n), np.float32) * np.float32(0.2)
        weights[:, -1] = bias
        return weights

    def read(self, n_text: int, n_echo: int = 0, size: float = 1.0) -> None:
        n, position = n_text + n_echo, len(self.k)
        q = self.random.standard_normal((n, 4, self.shape.k_dim), np.float32) * np.float32(2)
        k = self.random.standard_normal((n, 2, self.shape.k_dim), np.float32) * np.float32(size)
        v = self.random.standard_normal((n, 2, self.shape.v_dim), np.float32) * np.float32(size)
        value = None if self.shape.latent else v
        for reader in range(self.shape.readers):
            rows = (k, value) if reader == 0 else (None, None)
            self.core.attend(0, q, *rows, 0.125, position=position, reader=reader, n_echo=n_echo)
        self.k, self.v = np.concatenate([self.k, k[:n_text]]), np.concatenate([self.v, v[:n_text]])

    def told(self, k: npt.NDArray[Any], v: npt.NDArray[Any], positions: Any) -> Any:
        value = None if self.shape.latent else v
        return features(k, value, np.asarray(positions), self.rope)

    def expected(self, head: int, weights: Array) -> Any:
        positions = np.arange(len(self.k))
        return predicted(self.told(self.k[:, head], self.v[:, head], positions), weights[head])


def pages_of(shape: _core.LayerShape, kv_type: str, entries: int) -> int:
    _, (per_page,) = _core.page_geometry([shape], kv_type)
    return _core.pages_for(entries, per_page)
