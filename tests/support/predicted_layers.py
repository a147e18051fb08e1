"""Run a layer whose scores are predicted, or which collects sums to fit a predictor to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from entropykv import _core
from tests.support.reference import (
    SHARE_ROUNDING,
    Floats,
    Options,
    Rope,
    attend_kv_head,
    features,
    predicted,
    stored,
    updated_importance,
)

Array = npt.NDArray[np.float32]
N_SINKS = 3
SCALE = 0.125
GROUP = 2
SHARE_RTOL = SHARE_ROUNDING + 1e-3
"""The tolerance between a predicted share of the store, which is rounded, and the oracle's."""
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


class Batch(NamedTuple):
    """Hold the rows of a micro-batch; those of its echo are at the end."""

    position: int
    n_text: int
    q: list[Array]
    """The queries of every reader, (n, 4, k_dim)."""
    k: Array
    v: Array


class PredictedLayer:
    """Hold a store of one layer whose measure predicts scores, and all rows that it has read."""

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
        decay: float = 0.9,
        expected_lookups: float = 0.0,
        **more: Any,
    ) -> None:
        shape = {name: more.pop(name) for name in ("window", "latent", "readers") if name in more}
        self.shape = _core.LayerShape(4, 2, *dims, **shape)
        self.kv_type, self.rope = kv_type, rope
        self.measure, self.decay, self.expected_lookups = measure, decay, expected_lookups
        self.core = _core.HeadwiseStore(
            [self.shape],
            kv_type,
            _core.ImportanceSettings(
                getattr(_core.ScoreKind, measure),
                decay=decay,
                by_values=by_values,
                expected_lookups=expected_lookups,
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
        self.batches: list[Batch] = []
        self.k = np.zeros((0, 2, dims[0]), np.float32)
        self.v = np.zeros((0, 2, dims[1]), np.float32)

    def weights(self, bias: float = -6.0) -> Array:
        n = self.core.predictor_features(0)
        weights = self.random.standard_normal((2, n), np.float32) * np.float32(0.2)
        weights[:, -1] = bias
        return weights

    def read(self, n_text: int, n_echo: int = 0, size: float = 1.0) -> None:
        n, position = n_text + n_echo, len(self.k)
        q = [
            self.random.standard_normal((n, 4, self.shape.k_dim), np.float32) * np.float32(2)
            for _ in range(self.shape.readers)
        ]
        k = self.random.standard_normal((n, 2, self.shape.k_dim), np.float32) * np.float32(size)
        v = self.random.standard_normal((n, 2, self.shape.v_dim), np.float32) * np.float32(size)
        value = None if self.shape.latent else v
        for reader in range(self.shape.readers):
            keys, values = (k, value) if reader == 0 else (None, None)
            self.core.attend_alone(
                0, q[reader], keys, values, SCALE, position=position, reader=reader, n_echo=n_echo
            )
        self.batches.append(Batch(position, n_text, q, k, v))
        self.k, self.v = np.concatenate([self.k, k[:n_text]]), np.concatenate([self.v, v[:n_text]])

    def told(self, k: npt.NDArray[Any], v: npt.NDArray[Any], positions: Any) -> Any:
        value = None if self.shape.latent else v
        return features(k, value, np.asarray(positions), self.rope)

    def expected(self, head: int, weights: Array) -> Any:
        positions = np.arange(len(self.k))
        return predicted(self.told(self.k[:, head], self.v[:, head], positions), weights[head])

    def shares(self, head: int) -> Array:
        return self.core.predicted_shares(0, head)

    def given(self, head: int) -> Floats:
        """Return the part of the scores that comes from queries, without the predicted part."""
        power = 2 if self.measure == "mass" else 1
        shares = self.shares(head).astype(np.float64)
        return self.core.importance(0, head) - self.expected_lookups * shares**power

    def told_by_queries(self, head: int) -> tuple[Floats, Floats]:
        """Return what entries received from queries, computed in numpy; all entries are kept.

        The first array is the sum over the text's queries, decayed; the second is the largest share
        of attention from any query of an echo.
        """
        given, looked_up = np.zeros(0), np.zeros(0)
        k, v = np.zeros((0, self.shape.k_dim)), np.zeros((0, self.shape.v_dim))
        for batch in self.batches:
            all_k = np.concatenate([k, stored(batch.k[:, head], self.kv_type)])
            all_v = np.concatenate([v, stored(batch.v[:, head], self.kv_type)])
            end = batch.position + batch.n_text
            shares = self._shares_of_queries(batch, head, all_k, all_v)[..., :end]
            given = np.append(given, np.zeros(batch.n_text))
            looked_up = np.append(looked_up, np.zeros(batch.n_text))
            of_text = shares[:, : batch.n_text] ** (2 if self.measure == "mass" else 1)
            if len(batch.k) == 1:
                observed = of_text.sum(axis=0)
                given = updated_importance(given, observed, self.decay, 512, batch.position)
            elif batch.n_text > 0:
                given = given * self.decay**batch.n_text + of_text.sum(axis=(0, 1))
            if len(batch.k) > batch.n_text:
                of_echo = shares[:, batch.n_text :].max(axis=(0, 1))
                looked_up = np.maximum(looked_up, of_echo)
            k, v = all_k[:end], all_v[:end]
        return given, looked_up

    def _shares_of_queries(self, batch: Batch, head: int, k: Floats, v: Floats) -> Floats:
        """Return shares of attention, [reader * query head of the group][query][entry]."""
        options = Options(SCALE, window=self.shape.window)
        rows = (k, v, np.arange(len(k)), batch.position, options, "attention")
        return np.stack(
            [
                attend_kv_head(q[:, number : number + 1], *rows).observed
                for q in batch.q
                for number in range(head * GROUP, (head + 1) * GROUP)
            ]
        )


def pages_of(shape: _core.LayerShape, kv_type: str, entries: int) -> int:
    _, (per_page,) = _core.page_geometry([shape], kv_type)
    return _core.pages_for(entries, per_page)
