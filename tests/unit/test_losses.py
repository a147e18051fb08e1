"""Stores measure the losses of heads with fewer entries, and give calibration their entropies,
queries and entries.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv import _core
from tests.support import reference
from tests.support.online_layers import Layers
from tests.support.reference import Options, Rules, attend_layer, stored, stored_values
from tests.support.stores import HEADS, MAX_TOKENS, N_SINKS, RECENT

KNOTS = (0, 1, 5, 20, 70, 300)
finite = st.floats(0.0, 100.0, width=32)


@given(
    st.lists(finite, max_size=50),
    st.sets(st.integers(0, 60), min_size=1).map(sorted),
    st.lists(finite, max_size=50),
    st.sampled_from([1.0, 0.25, 3.0]),
)
def test_losses_are_those_of_the_oracle(
    scores: list[float], knots: list[int], dropped: list[float], unit: float
) -> None:
    counted = reference.DroppedScores()
    counted.add(np.array([score for score in dropped if score > 1e-12]))
    expected = reference.losses_at(np.append(scores, unit * counted.scores()), knots)
    actual = _core.losses_at(scores, knots, dropped, unit)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-9)


def test_losses_by_hand() -> None:
    assert _core.losses_at([3.0, 1.0, 4.0, 2.0], [0, 1, 3, 4, 9]).tolist() == [10, 6, 1, 0, 0]
    assert _core.losses_at([], [0, 2]).tolist() == [0, 0]
    # The scores 2, 3.5 and 3.5 of one octave count as their mean, 3, each, which ranks below 4 and
    # above 1.
    assert _core.losses_at([4.0, 1.0], [0, 1, 2, 3], [2.0, 3.5, 3.5, 0.5, 0.0]).tolist() == (
        [14.5, 10.5, 7.5, 4.5]
    )
    assert _core.losses_at([4.0, 1.0], [0, 1], [2.0, 3.5], unit=2.0).tolist() == [16, 10.5]


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("measure", ["mass", "attention", "products"])
@pytest.mark.parametrize("by_values", [False, True])
@pytest.mark.parametrize("own_windows", [False, True])
def test_measured_losses_are_those_of_the_oracle(
    kv_type: str, measure: str, by_values: bool, own_windows: bool
) -> None:
    rules = Rules(measure, kv_type, N_SINKS, RECENT, decay=0.99, by_values=by_values)
    rules.own_windows, rules.observation_window = own_windows, 128
    if own_windows:  # Half of the smallest budget has no room for so many.
        rules.recent_window = 20
    layers = Layers(rules, [60, 30, 90], knots=KNOTS)
    assert not layers.store.losses().any()
    for n_tokens in (MAX_TOKENS, 40, 1, 7, MAX_TOKENS):
        layers.attend(n_tokens)
        actual = layers.store.losses().reshape(len(HEADS), len(KNOTS))
        assert (np.diff(actual, axis=1) <= 0.0).all()
        expected = np.array(layers.losses)
        np.testing.assert_allclose(actual, expected, rtol=5e-3, atol=1e-5 * expected.max())
    layers.store.measure_losses([])
    layers.attend(40)
    # The second call measured nothing new.
    assert (layers.store.losses().reshape(len(HEADS), -1) == actual).all()
    assert not np.allclose(layers.losses, expected, rtol=1e-3)


def same_losses(layers: Layers) -> bool:
    pairs = (
        (layers.store.losses(), np.ravel(layers.losses)),
        (layers.store.losses(of_held=True), np.ravel(layers.losses_of_held)),
    )
    return all(np.allclose(a, b, rtol=5e-3, atol=1e-5 * b.max()) for a, b in pairs)


@pytest.mark.parametrize("measure", ["mass", "attention"])
@pytest.mark.parametrize("decay", [0.9, 0.99, 1.0])
def test_losses_count_what_was_dropped(measure: str, decay: float) -> None:
    """Losses count entries that were dropped by any eviction and in saved sessions, but not those
    of another text.
    """
    rules = Rules(measure, "f16", N_SINKS, RECENT, decay=decay, by_values=True)
    layers = Layers(rules, [60, 30, 90], knots=KNOTS)
    layers.attend(MAX_TOKENS)
    layers.set_budgets([20, 25, 30])
    layers.attend(1)
    layers.reload()
    layers.set_budgets([50, 60, 40])
    layers.attend(30)
    assert same_losses(layers)
    assert not np.allclose(layers.losses, layers.losses_of_held, rtol=0.01)
    assert all(head.dropped.scores().size for head in layers.heads.values())
    layers.truncate(100)
    layers.attend(8)
    assert same_losses(layers)
    layers.truncate(0)
    layers.attend(20)
    assert same_losses(layers)
    assert not any(head.dropped.scores().size for head in layers.heads.values())


def test_measuring_changes_nothing_of_what_is_kept() -> None:
    rules = Rules("mass", "q8_0", N_SINKS, RECENT, decay=0.998, by_values=True)
    stores = []
    for knots in ((), KNOTS):
        layers = Layers(rules, [40, 30, 50], knots=knots)
        for n_tokens in (MAX_TOKENS, 1, 1, 50, MAX_TOKENS):
            layers.attend(n_tokens)
        stores.append([bytes(layers.store.save_head(*key)) for key in HEADS])
        assert layers.store.losses().size == len(HEADS) * len(knots)
    assert stores[0] == stores[1]


@pytest.mark.parametrize("knots", [[-1, 3], [0, 0], [4, 2]])
def test_knots_without_sense_are_refused(knots: list[int]) -> None:
    layers = Layers(Rules("mass"), [40, 30, 50])
    with pytest.raises(ValueError, match="knots must ascend"):
        layers.store.measure_losses(knots)


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
        store.attend_alone(0, q, k, v, scale=0.2, sinks=sinks, position=done)
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
    store.attend_alone(0, zeros, zeros[:, :2], np.zeros((3, 2, 24), np.float32), scale=1.0)
    with pytest.raises(ValueError, match="not tracked"):
        store.row_entropies(0)
    with pytest.raises(ValueError, match="not captured"):
        store.queries(0)
    with pytest.raises(ValueError, match="KV head 2 of a layer of 2"):
        store.rows(0, 2)
