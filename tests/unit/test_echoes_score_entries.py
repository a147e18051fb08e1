"""Echoes, which repeat a chunk of text, score its entries but are not kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from entropykv import _core
from entropykv.session.second_readings import LEAST_CHUNK, LEAST_ECHO, OVERLAP, Echo
from tests.support.reference import (
    SCORING_INTERVAL,
    Floats,
    Options,
    attend_kv_head,
    stored,
    stored_values,
)

KERNELS = _core.available_kernels()
N_HEAD_KV, GROUP, DIM = 2, 3, 32
MAX_TOKENS, MAX_ENTRIES = 300, 900
SCALE = DIM**-0.5

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_type = pytest.mark.parametrize("kv_type", ["f16", "q8_0"])


class Text:
    """Hold a random text in a store of one layer, and its rows for the oracle."""

    def __init__(self, kernel: str, kv_type: str, budget: int = MAX_ENTRIES, **shape: Any) -> None:
        layer = _core.LayerShape(N_HEAD_KV * GROUP, N_HEAD_KV, DIM, DIM, **shape)
        self.readers = layer.readers
        self.store = _core.HeadwiseStore(
            [layer],
            kv_type,
            _core.ImportanceSettings(_core.ScoreKind.reconstruct, decay=1.0),
            n_sinks=4,
            recent_window=4,
            max_tokens=MAX_TOKENS,
            max_entries=MAX_ENTRIES,
            n_threads=1,
            kernels=kernel,
        )
        _, (per_page,) = _core.page_geometry([layer], kv_type)
        pages = N_HEAD_KV * _core.pages_for(budget, per_page)
        self.store.set_budgets([budget] * N_HEAD_KV, pages, 4, 4)
        self.store.track_entropy(True)
        self.kv_type = kv_type
        self.window = shape.get("window", 0)
        self.random = np.random.default_rng(5)
        self.k = np.zeros((0, N_HEAD_KV, DIM))
        self.v = np.zeros((0, N_HEAD_KV, DIM))
        self.importance = np.zeros((N_HEAD_KV, 0))

    def rows(self, n: int, heads: int) -> npt.NDArray[np.float32]:
        return self.random.standard_normal((n, heads, DIM), dtype=np.float32) * np.float32(1.5)

    def read(self, n_text: int, n_echo: int, **options: Any) -> tuple[Floats, Floats]:
        """Read a chunk and random rows as its echo; return the outputs of the store and of the
        oracle, [reader][token][query head][value].
        """
        n, position = n_text + n_echo, len(self.k)
        queries = [self.rows(n, N_HEAD_KV * GROUP) for _ in range(self.readers)]
        k, v = self.rows(n, N_HEAD_KV), self.rows(n, N_HEAD_KV)
        arguments = Options(SCALE, **options).arguments
        outputs = [
            self.store.attend_alone(
                0,
                q,
                *((k, v) if reader == 0 else (None, None)),
                position=position,
                reader=reader,
                n_echo=n_echo,
                **arguments,
            )
            for reader, q in enumerate(queries)
        ]
        all_k = np.concatenate([self.k, stored(k, self.kv_type)])
        all_v = np.concatenate([self.v, stored_values(v, self.kv_type)])
        expected = []
        given = np.zeros((N_HEAD_KV, len(all_k)))
        for q in queries:
            parts = []
            for head in range(N_HEAD_KV):
                heads = slice(head * GROUP, (head + 1) * GROUP)
                for_head = Options(SCALE, window=self.window, **options).of_heads(heads)
                # The oracle sums over query heads, but here the largest counts, so it gets one head
                # at a time.
                alone = [
                    attend_kv_head(
                        q[:, heads][:, g : g + 1],
                        all_k[:, head],
                        all_v[:, head],
                        np.arange(len(all_k)),
                        position,
                        for_head.of_heads(slice(g, g + 1)),
                        "attention",
                    )
                    for g in range(GROUP)
                ]
                parts += [part.outputs for part in alone]
                observed = np.stack([part.observed for part in alone])
                counted = observed[:, n_text:] if n_echo else observed
                if n > 1 or position % SCORING_INTERVAL == 0:
                    given[head] = np.maximum(given[head], counted.max(axis=(0, 1)))
            expected.append(np.concatenate(parts, axis=1))
        self.k, self.v = all_k[: position + n_text], all_v[: position + n_text]
        kept = np.concatenate([self.importance, np.zeros((N_HEAD_KV, n_text))], axis=1)
        self.importance = np.maximum(kept, given[:, : position + n_text])
        return np.stack(outputs), np.stack(expected)


@each_kernel
@each_type
@pytest.mark.parametrize(
    "layer", [{}, {"window": 60}, {"readers": 2}], ids=["", "window", "readers"]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_importance_is_the_largest_attention_of_the_echo(
    kernel: str, kv_type: str, layer: dict[str, Any], sinks: bool
) -> None:
    text = Text(kernel, kv_type, **layer)
    tolerance = {"f16": 2e-5, "q8_0": 2e-3}[kv_type]
    logits = text.rows(1, N_HEAD_KV * GROUP)[0, :, 0] if sinks else None
    for n_text, n_echo in [(70, 90), (130, 140), (1, 60), (40, 0), (17, 33), (1, 0), (100, 128)]:
        outputs, expected = text.read(n_text, n_echo, sinks=logits)
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=tolerance)
        if n_text == 1 and n_echo == 0:
            continue  # By the interval of scoring, not every single token is scored.
        for head in range(N_HEAD_KV):
            np.testing.assert_array_equal(text.store.positions(0, head), np.arange(len(text.k)))
            importance = text.store.importance(0, head)
            np.testing.assert_allclose(importance, text.importance[head], rtol=0, atol=1e-4)
    assert (text.importance > 0.0).any()


def test_entropies_are_those_of_the_text_alone() -> None:
    both = [Text(KERNELS[-1], "f16") for _ in range(2)]
    for text, n_echo in zip(both, (0, 90), strict=True):
        text.random = np.random.default_rng(1)
        k = text.rows(160, N_HEAD_KV)
        q = text.rows(160, N_HEAD_KV * GROUP)
        n = 70 + n_echo
        text.store.attend_alone(0, q[:n], k[:n], k[:n], SCALE, n_echo=n_echo)
    plain, echoed = (text.store for text in both)
    np.testing.assert_allclose(echoed.entropies(0), plain.entropies(0), rtol=1e-5)
    assert echoed.row_entropies(0).shape == (70, N_HEAD_KV * GROUP)


def test_the_budget_holds_what_the_echo_looked_for() -> None:
    budget, sought = 24, [30, 41, 57, 58]
    text = Text(KERNELS[-1], "f16", budget=budget)
    k = np.zeros((120, N_HEAD_KV, DIM), np.float32)
    q = np.zeros((120, N_HEAD_KV * GROUP, DIM), np.float32)
    for number, position in enumerate(sought):
        k[position, :, number] = 20.0
        q[100 + number, :, number] = 20.0  # Each of these is a query of the echo.
    q[60:70, :, 8], k[12:20, :, 8] = 20.0, 20.0  # These queries are of the text, and do not count.
    text.store.attend_alone(0, q, k, k, SCALE, n_echo=40)
    for head in range(N_HEAD_KV):
        kept = text.store.positions(0, head)
        assert len(kept) == budget
        assert set(sought) <= set(kept)
        assert kept.max() == 79
        assert {0, 1, 2, 3, 76, 77, 78, 79} <= set(kept)


@each_kernel
@each_type
def test_an_echo_alone_scores_text_that_was_read_before(kernel: str, kv_type: str) -> None:
    text = Text(kernel, kv_type)
    text.read(150, 0)
    for n_echo in (80, 33):
        text.read(0, n_echo)
    for head in range(N_HEAD_KV):
        np.testing.assert_array_equal(text.store.positions(0, head), np.arange(150))
        importance = text.store.importance(0, head)
        np.testing.assert_allclose(importance, text.importance[head], rtol=0, atol=1e-4)
    assert text.store.evicted == 0


@pytest.mark.parametrize(("n_echo", "n_tokens"), [(-1, 40), (41, 40)])
def test_an_echo_is_a_part_of_the_tokens(n_echo: int, n_tokens: int) -> None:
    text = Text(KERNELS[0], "f16")
    rows = text.rows(n_tokens, N_HEAD_KV)
    with pytest.raises(ValueError, match="echo"):
        text.store.attend_alone(
            0, text.rows(n_tokens, N_HEAD_KV * GROUP), rows, rows, SCALE, n_echo=n_echo
        )


def test_an_echo_counts_among_the_tokens_of_a_micro_batch() -> None:
    text = Text(KERNELS[0], "f16")
    with pytest.raises(ValueError, match="max_tokens"):
        text.store.begin(MAX_TOKENS, 0, 0, n_echo=1)


def test_a_stretch_and_its_echo_fit_into_the_micro_batch() -> None:
    for n_ubatch in (128, 129, 512, 2048):
        echo = Echo(lambda text: list(text.encode())[:12], n_ubatch)
        assert n_ubatch - 1 <= echo.n_ubatch <= n_ubatch
        chunk = list(range(1000, 1000 + echo.chunk))
        assert echo.chunk + len(echo.of(list(range(500)), chunk)) == echo.n_ubatch


def test_an_echo_begins_before_its_stretch() -> None:
    echo = Echo(lambda _: [7, 8], 512)
    chunk = list(range(100, 100 + LEAST_ECHO))
    assert echo.of([], chunk) == [7, 8, *chunk]
    assert echo.of([1, 2], chunk) == [7, 8, 1, 2, *chunk]
    assert echo.of(list(range(50)), chunk) == [7, 8, *range(50 - OVERLAP, 50), *chunk]


def test_single_tokens_wait_for_an_echo_of_many() -> None:
    echo = Echo(lambda _: [7], 512)
    assert echo.least_pending(LEAST_ECHO, recent_window=100) == LEAST_ECHO
    assert echo.least_pending(1, recent_window=3) == LEAST_ECHO
    assert echo.least_pending(1, recent_window=100) == 100
    assert echo.least_pending(1, recent_window=1000) == echo.chunk


def test_micro_batches_too_small_for_a_stretch_are_larger() -> None:
    echo = Echo(lambda _: [7] * 40, 16)
    assert echo.chunk == LEAST_CHUNK
    assert echo.n_ubatch == 40 + OVERLAP + 2 * LEAST_CHUNK


def test_losses_of_an_echo_alone_are_relative_to_its_outputs() -> None:
    """Losses of an echo alone are relative to its outputs: tenfold values do not change them."""
    random = np.random.default_rng(8)
    q, k, v = (
        random.standard_normal((160, heads, DIM), np.float32)
        for heads in (N_HEAD_KV * GROUP, N_HEAD_KV, N_HEAD_KV)
    )
    losses = []
    for size in (1.0, 10.0):
        importance = _core.ImportanceSettings(_core.ScoreKind.mass, decay=1.0, by_values=True)
        store = _core.HeadwiseStore(
            [_core.LayerShape(N_HEAD_KV * GROUP, N_HEAD_KV, DIM, DIM)],
            "f16",
            importance,
            n_sinks=4,
            recent_window=4,
            max_tokens=MAX_TOKENS,
            max_entries=MAX_ENTRIES,
            n_threads=1,
        )
        store.set_budgets([MAX_ENTRIES] * N_HEAD_KV, 1000, 4, 4)
        sized = v * np.float32(size)
        store.attend_alone(0, q[:70], k[:70], sized[:70], SCALE)
        store.measure_losses([0, 8, 30])
        store.attend_alone(0, q[70:], k[70:], sized[70:], SCALE, position=70, n_echo=90)
        losses.append(store.losses())
    assert losses[0].min() > 0.0
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)
