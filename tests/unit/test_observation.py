"""Calibration gets the entropies, queries and entries of a store."""

from __future__ import annotations

import numpy as np
import pytest

from entropykv import _core
from tests.support.reference import Options, attend_layer, stored, stored_values

SHAPE = _core.LayerShape(6, 2, 40, 24)


def store_of(kv_type: str, n_threads: int = 1) -> _core.HeadwiseStore:
    store = _core.HeadwiseStore(
        layers=[SHAPE],
        kv_type=kv_type,
        importance=_core.ImportanceSettings(_core.ScoreKind.mass),
        n_sinks=4,
        recent_window=8,
        max_tokens=256,
        max_entries=600,
        n_threads=n_threads,
    )
    store.set_budgets([600, 600], 200, 4, 8)
    return store


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q8_0/iq4_nl"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_of_the_last_micro_batch(kv_type: str, with_sinks: bool) -> None:
    rng = np.random.default_rng(1)
    store = store_of(kv_type)
    store.track_entropy(True)
    store.capture_queries(True)
    sinks = rng.standard_normal(6).astype(np.float32) if with_sinks else None
    options = Options(0.2, 0.0, 0, sinks)
    done, all_k, all_v = 0, np.zeros((0, 2, 40)), np.zeros((0, 2, 24))
    for n in (200, 1, 30, 256):
        q, k, v = (
            rng.standard_normal((n, heads, dim)).astype(np.float32) * 2
            for heads, dim in ((6, 40), (2, 40), (2, 24))
        )
        all_k = np.concatenate([all_k, stored(k, kv_type)])
        all_v = np.concatenate([all_v, stored_values(v, kv_type)])
        expected = attend_layer(q, all_k, all_v, done, options)
        store.attend(0, q, k, v, scale=0.2, sinks=sinks, position=done)
        done += n
        rows = store.row_entropies(0)
        assert rows.shape == (n, 6)
        atol = 5e-5 if kv_type == "f16" else 2e-3  # These are the tolerances of test_attention.py.
        np.testing.assert_allclose(rows, expected.entropies, atol=atol)
        queries, seen_sinks, softcap, window, chunked, slopes = store.queries(0)
        np.testing.assert_allclose(queries, q * np.float32(0.2), rtol=1e-6)
        assert (softcap, window, chunked) == (0.0, 0, False)
        np.testing.assert_array_equal(slopes, np.zeros(6, np.float32))
        expected_sinks = np.full(6, np.float32(-1e30)) if sinks is None else sinks
        np.testing.assert_array_equal(seen_sinks, expected_sinks)
    for head in (0, 1):
        positions, importance, k, v = store.rows(0, head)
        np.testing.assert_array_equal(positions, np.arange(done))
        np.testing.assert_array_equal(importance, store.importance(0, head))
        np.testing.assert_array_equal(k, all_k[:, head].astype(np.float32))
        np.testing.assert_array_equal(v, all_v[:, head].astype(np.float32))


def test_what_was_not_observed_is_refused() -> None:
    store = store_of("f16")
    zeros = np.zeros((3, 6, 40), np.float32)
    store.attend(0, zeros, zeros[:, :2], np.zeros((3, 2, 24), np.float32), scale=1.0)
    with pytest.raises(ValueError, match="not tracked"):
        store.row_entropies(0)
    with pytest.raises(ValueError, match="not captured"):
        store.queries(0)
    with pytest.raises(ValueError, match="KV head 2 of a layer of 2"):
        store.rows(0, 2)
