"""Run one layer of attention over pages, and compare it with the numpy oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv import _core
from tests.support.reference import (
    Floats,
    Options,
    attend_layer,
    stored_keys,
    stored_values,
    updated_importance,
)

Array = npt.NDArray[np.float32]
KERNELS = _core.available_kernels()
KV_TYPES = ("f16", "q8_0", "q8_0/iq4_nl")
MAX_TOKENS = 256
MAX_ENTRIES = 1536


# The oracle reads the same rounded K and V. What remains is float32 arithmetic, and for q8_0 the
# rounding of queries and weights to 16-bit integers (rounding V to q8_0 alone would give up to
# 1e-2).
OUTPUT_TOLERANCE = {"f16": 2e-5, "q8_0": 2e-3, "q8_0/iq4_nl": 2e-3}
ENTROPY_TOLERANCE = {"f16": 1.5e-5, "q8_0": 2e-3, "q8_0/iq4_nl": 2e-3}
IMPORTANCE_TOLERANCE = 1e-4


def assert_near(found: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    """Assert what assert_allclose does, which is slow, so that it only shows differences."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape == expected.shape:
        with np.errstate(invalid="ignore"):
            if (np.abs(found - expected) <= atol + rtol * np.abs(expected)).all():
                return
    np.testing.assert_allclose(found, expected, rtol, atol)


def assert_same(found: Any, expected: Any) -> None:
    """Assert what assert_array_equal does, which is slow, so that it only shows differences."""
    if not np.array_equal(found, expected):
        np.testing.assert_array_equal(found, expected)


@dataclass
class Layer:
    """Hold one layer in the store and the oracle; both read every micro-batch and are compared."""

    kernel: str
    kv_type: str
    n_head_kv: int = 2
    group: int = 2
    k_dim: int = 64
    v_dim: int = 64
    decay: float = 0.0
    observation_window: int = MAX_TOKENS
    measure: str = "mass"
    query_size: float = 2.0
    window: int = 0
    chunked: bool = False
    latent: bool = False
    readers: int = 1
    slack: float = 1.0
    """A factor of the tolerances of entropies and importance."""
    importance_rtol: float = 1e-5
    seed: int = 0
    key_bias: Array | None = None
    """A bias that is added to all keys, [KV head][k_dim]."""
    key_centres: Array | None = None
    """The centre and unit with which keys are stored, [KV head][2][k_dim]; None: keys are stored as
    they are.
    """
    store: _core.HeadwiseStore = field(init=False)
    k: Floats = field(init=False)
    v: Floats = field(init=False)
    importance: Floats = field(init=False)

    def __post_init__(self) -> None:
        """Start with an empty store whose budget holds everything."""
        shape = _core.LayerShape(
            self.n_head_kv * self.group,
            self.n_head_kv,
            self.k_dim,
            self.v_dim,
            self.window,
            self.chunked,
            self.latent,
            self.readers,
        )
        self.store = _core.HeadwiseStore(
            [shape],
            self.kv_type,
            _core.ImportanceSettings(
                getattr(_core.ScoreKind, self.measure),
                decay=self.decay,
                observation_window=self.observation_window,
            ),
            n_sinks=4,
            recent_window=4,
            max_tokens=MAX_TOKENS,
            max_entries=MAX_ENTRIES,
            n_threads=1,
            kernels=self.kernel,
            key_centres=() if self.key_centres is None else [self.key_centres],
        )
        _, (per_page,) = _core.page_geometry([shape], self.kv_type)
        pages = self.n_head_kv * _core.pages_for(MAX_ENTRIES, per_page)
        self.store.set_budgets([MAX_ENTRIES] * self.n_head_kv, pages, 4, 4)
        self.random = np.random.default_rng(self.seed)
        self.k = np.zeros((0, self.n_head_kv, self.k_dim))
        self.v = np.zeros((0, self.n_head_kv, self.v_dim))
        self.importance = np.zeros((self.n_head_kv, 0))

    def normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape, dtype=np.float32)

    def read(
        self, n_tokens: int, k_size: float = 1.0, options: Options | None = None
    ) -> tuple[Array, Floats]:
        """Read a random micro-batch; returns the outputs of store and oracle, by reader."""
        options = options or Options(self.k_dim**-0.5)
        options = replace(options, window=self.window, chunked=self.chunked)
        queries = [
            self.normal(n_tokens, self.n_head_kv * self.group, self.k_dim) * self.query_size
            for _ in range(self.readers)
        ]
        k = self.normal(n_tokens, self.n_head_kv, self.k_dim) * np.float32(k_size)
        v = self.normal(n_tokens, self.n_head_kv, self.v_dim)
        position = len(self.k)
        if self.key_bias is not None:
            k += self.key_bias
        self.k = np.concatenate([self.k, stored_keys(k, self.kv_type, self.key_centres)])
        of_keys = self.k[position:, :, : self.v_dim]
        stored_v = of_keys if self.latent else stored_values(v, self.kv_type)
        self.v = np.concatenate([self.v, stored_v])
        expected = [
            attend_layer(q, self.k, self.v, position, options, self.measure) for q in queries
        ]
        self.store.track_entropy(True)
        rows: list[Any] = [(k, None if self.latent else v), *[(None, None)] * (self.readers - 1)]
        output = [
            self.store.attend_alone(
                0, q, *rows[i], position=position, reader=i, **options.arguments
            )
            for i, q in enumerate(queries)
        ]
        self.importance = np.stack(
            [
                updated_importance(
                    np.append(old, np.zeros(n_tokens)),
                    observed,
                    self.decay,
                    self.observation_window,
                    position,
                )
                for old, observed in zip(
                    self.importance, sum(part.observed for part in expected), strict=True
                )
            ]
        )
        self.check_statistics(np.concatenate([part.entropies for part in expected]))
        return np.concatenate(output), np.concatenate([part.outputs for part in expected])

    def check_statistics(self, entropies: Floats) -> None:
        """Compare the entropies of the last micro-batch, and the importance of all entries."""
        actual = self.store.entropies(0)
        atol = self.slack * ENTROPY_TOLERANCE[self.kv_type]
        assert_near(actual, entropies.mean(axis=0), rtol=0, atol=atol)
        atol = self.slack * IMPORTANCE_TOLERANCE
        for head, expected in enumerate(self.importance):
            importance = self.store.importance(0, head)
            assert_near(importance, expected, self.importance_rtol, atol)

    def check(self, batches: Sequence[int], **options: Any) -> None:
        """Read several random micro-batches, and compare the output of each with the reference."""
        for n_tokens in batches:
            layer_options = Options(self.k_dim**-0.5, **options)
            output, expected = self.read(n_tokens, options=layer_options)
            atol = OUTPUT_TOLERANCE[self.kv_type]
            assert_near(output, expected, rtol=0, atol=atol)
