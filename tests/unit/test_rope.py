"""RoPE of stored keys is right: angles, rotation, and new positions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv import ContextError, _core
from entropykv.llamacpp.positions import RopeRange, check_sinks, largest_micro_batch
from tests.support import reference

Floats = npt.NDArray[np.float32]


@st.composite
def ropes(draw: st.DrawFn, k_dim: int) -> reference.Rope:
    """Draw any kind of RoPE that a plain model has, or none."""
    n_dims = 2 * draw(st.integers(0, k_dim // 2))
    pairs = n_dims // 2
    yarn = n_dims > 0 and draw(st.booleans())
    with_factors = n_dims > 0 and draw(st.booleans())
    factor = st.floats(0.5, 32.0, width=32)
    return reference.Rope(
        n_dims=n_dims,
        offset=draw(st.integers(0, (k_dim - n_dims) // 2)) * 2,
        neox=draw(st.booleans()),
        n_ctx_orig=draw(st.sampled_from([64, 2048, 8192])),
        freq_base=draw(st.sampled_from([100.0, 10000.0, 1e6])),
        freq_scale=draw(st.sampled_from([1.0, 0.25])),
        ext_factor=1.0 if yarn else 0.0,
        freq_factors=tuple(draw(st.tuples(*[factor] * pairs))) if with_factors else (),
    )


def core_rope(rope: reference.Rope) -> _core.RopeParams:
    return _core.RopeParams(**rope._asdict())


class Filled:
    """Hold a store of one layer with two KV heads, which fill() fills with random entries."""

    def __init__(self, kv_type: str, k_dim: int, n: int, kernels: str | None = None) -> None:
        self.kv_type = kv_type
        self.random = np.random.default_rng(n * 1000 + k_dim)
        self.store = _core.HeadwiseStore(
            layers=[_core.LayerShape(2, 2, k_dim, 8)],
            kv_type=kv_type,
            importance=_core.ImportanceSettings(_core.ScoreKind.mass),
            n_sinks=1,
            recent_window=1,
            max_tokens=max(n, 2),
            max_entries=n,
            n_threads=1,
            kernels=kernels,
        )
        page_bytes, (per_page,) = _core.page_geometry([_core.LayerShape(2, 2, k_dim, 8)], kv_type)
        assert page_bytes > 0
        self.store.set_budgets([n, n], 2 * _core.pages_for(n, per_page), 1, 1)
        self.keys = self.random.normal(0.0, 2.0, (n, 2, k_dim)).astype(np.float32)

    def fill(self, position: int) -> None:
        n = len(self.keys)
        q = self.random.normal(size=self.keys.shape).astype(np.float32)
        v = self.random.normal(size=(n, 2, 8)).astype(np.float32)
        self.store.begin(n, position, position)
        self.store.attend_alone(0, q, self.keys, v, scale=0.1, position=position)

    def rows(self, head: int) -> tuple[npt.NDArray[np.int32], Floats, Floats, Floats]:
        return self.store.rows(0, head)


def tolerance(keys: npt.NDArray[np.float64], kv_type: str) -> npt.NDArray[np.float64]:
    """Return one rounding step of the type for each value, because f32 and f64 may round a half
    differently.
    """
    if kv_type == "f16":
        return np.abs(keys) * 2.0**-10 + 1e-5
    return np.abs(keys).max(axis=1, keepdims=True) / 127.0 * 1.01 + np.zeros_like(keys)


@settings(max_examples=60)
@given(data=st.data(), kv_type=st.sampled_from(["f16", "q8_0"]), k_dim=st.sampled_from([8, 24, 64]))
def test_a_rebase_is_the_oracles_rotation(data: st.DataObject, kv_type: str, k_dim: int) -> None:
    rope = data.draw(ropes(k_dim))
    n = data.draw(st.integers(1, 40))
    first = data.draw(st.integers(0, 500))
    n_sinks = data.draw(st.integers(0, 8))
    old, new = data.draw(st.integers(0, 400)), data.draw(st.integers(0, 400))
    kernels = data.draw(st.sampled_from(_core.available_kernels()))
    filled = Filled(kv_type, k_dim, n, kernels)
    filled.fill(first)
    before = [filled.rows(head) for head in (0, 1)]
    filled.store.rebase([core_rope(rope)], n_sinks, old, new)
    for head in (0, 1):
        positions, importance, keys, values = before[head]
        after = filled.rows(head)
        by = reference.rope_positions(positions, n_sinks, new) - reference.rope_positions(
            positions, n_sinks, old
        )
        turned = reference.rotated(keys, by, rope)
        expected = reference.stored(turned.astype(np.float32), kv_type)
        assert (np.abs(after[2] - expected) <= tolerance(turned, kv_type)).all()
        still = by == 0
        np.testing.assert_array_equal(after[2][still], keys[still])
        np.testing.assert_array_equal(after[0], positions)
        np.testing.assert_array_equal(after[1], importance)
        np.testing.assert_array_equal(after[3], values)


@settings(max_examples=100)
@given(data=st.data())
def test_frequencies_are_ggmls(data: st.DataObject) -> None:
    rope = data.draw(ropes(128))
    np.testing.assert_allclose(
        core_rope(rope).frequencies, reference.rope_frequencies(rope), rtol=1e-5
    )


@given(position=st.integers(0, 10**7), n_sinks=st.integers(0, 100), shift=st.integers(0, 10**7))
def test_positions_keep_their_order_and_sinks_their_place(
    position: int, n_sinks: int, shift: int
) -> None:
    here = _core.rope_position(position, n_sinks, shift)
    assert here == reference.rope_positions(np.array([position]), n_sinks, shift)[0]
    assert here <= _core.rope_position(position + 1, n_sinks, shift) <= here + 1
    assert here <= position
    assert here >= min(position, n_sinks)


def test_layers_turn_each_by_their_own_parameters() -> None:
    shapes = [
        _core.LayerShape(1, 1, 16, 8),
        _core.LayerShape(1, 1, 8, 8),
        _core.LayerShape(1, 1, 16, 8),
    ]
    chain = [reference.Rope(16, freq_base=100.0), reference.Rope(0), reference.Rope(8, neox=True)]
    importance = _core.ImportanceSettings(_core.ScoreKind.mass)
    store = _core.HeadwiseStore(shapes, "f16", importance, 1, 1, 20, 20, n_threads=1)
    _, per_page = _core.page_geometry(shapes, "f16")
    store.set_budgets([20] * 3, sum(_core.pages_for(20, n) for n in per_page), 1, 1)
    random = np.random.default_rng(1)
    store.begin(20, 30, 30)
    before = []
    for layer, shape in enumerate(shapes):
        rows = [
            random.normal(size=(20, 1, d)).astype(np.float32) for d in (shape.k_dim,) * 2 + (8,)
        ]
        store.attend_alone(layer, rows[0], rows[1], rows[2], scale=0.1, position=30)
        before.append(store.rows(layer, 0)[2])
    store.rebase([core_rope(rope) for rope in chain], 4, 0, 10)
    for layer, rope in enumerate(chain):
        expected = reference.rotated(before[layer], np.full(20, -10), rope)
        np.testing.assert_allclose(store.rows(layer, 0)[2], expected, atol=4e-3)
    assert not np.allclose(before[0], store.rows(0, 0)[2], atol=0.1)


@pytest.mark.parametrize(
    "params",
    [
        [],
        [_core.RopeParams(10)],
        [_core.RopeParams(8, offset=2)],
        [_core.RopeParams(3)],
        [_core.RopeParams(8, freq_factors=[1.0, 2.0])],
        [_core.RopeParams(8)] * 2,
    ],
)
def test_parameters_that_do_not_fit_are_refused(params: list[_core.RopeParams]) -> None:
    filled = Filled("f16", 8, 4)
    filled.fill(0)
    with pytest.raises(ValueError, match="RoPE parameters"):
        filled.store.rebase(params, 0, 0, 1)


@given(
    data=st.data(),
    limit=st.integers(16, 300),
    steps=st.lists(st.tuples(st.integers(1, 80), st.booleans()), min_size=1, max_size=60),
)
def test_the_newest_half_always_keeps_its_distances_below_the_limit(
    data: st.DataObject, limit: int, steps: list[tuple[int, bool]]
) -> None:
    rope = RopeRange(limit, n_sinks=limit // 4)
    position = shift = 0
    for wanted, goes_back in steps:
        if goes_back:
            position = data.draw(st.integers(0, position))
        n_tokens = min(wanted, rope.step)
        shift = rope.shift_for(shift, position, n_tokens)
        assert shift % rope.step == 0
        assert position + n_tokens - shift <= limit
        assert shift == 0 or position - shift >= limit // 2
        assert shift <= position
        position += n_tokens


def test_a_session_within_the_limit_never_moves() -> None:
    rope = RopeRange(100, n_sinks=4)
    assert all(rope.shift_for(0, position, 10) == 0 for position in range(91))


def test_the_shift_grows_in_steps_and_stays_between_them() -> None:
    rope = RopeRange(100, n_sinks=4)
    shifts = [0]
    for position in range(1000):
        shifts.append(rope.shift_for(shifts[-1], position, 1))
    assert sorted(set(shifts)) == list(range(0, 901, 25))
    assert shifts == sorted(shifts)


def test_going_back_makes_distances_exact_again_but_a_little_does_not_move_a_key() -> None:
    rope = RopeRange(100, n_sinks=4)
    assert rope.shift_for(900, 995, 1) == 900
    assert rope.shift_for(900, 950, 1) == 900
    assert rope.shift_for(900, 949, 1) == 850
    assert rope.shift_for(900, 60, 1) == 0


def test_micro_batches_fit_into_a_step() -> None:
    assert largest_micro_batch(512, 4096, 8192) == 512
    assert largest_micro_batch(512, 100, 8192) == 100
    assert largest_micro_batch(512, 4096, 1024) == 256
    assert largest_micro_batch(512, 1024, 1024) == 512


def test_too_many_sinks_are_refused_only_beyond_the_trained_context() -> None:
    check_sinks(64, 1024, 256)
    check_sinks(200, 256, 256)
    with pytest.raises(ContextError, match="use at most 64"):
        check_sinks(65, 257, 256)


@pytest.mark.parametrize(
    "rope",
    [_core.RopeParams(8, freq_factors=[1.0, 2.0]), _core.RopeParams(7), _core.RopeParams(-2)],
)
def test_frequencies_of_an_impossible_rope_are_refused(rope: _core.RopeParams) -> None:
    with pytest.raises(ValueError, match="not of one RoPE"):
        _ = rope.frequencies
