"""Wrong drafts in a store leave nothing behind, and right ones have results of single tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entropykv import _core

KERNELS = _core.available_kernels()
N_HEAD_KV, GROUP, DIM = 3, 2, 32
MOST_DRAFTS = 19  # An eviction makes room for fewer tokens than this.
MAX_TOKENS, MAX_ENTRIES = 512, 900
SCALE = DIM**-0.5
MEASURES = ["mass", "products", "attention", "largest", "recency"]


def importance(measure: str, **settings: Any) -> _core.ImportanceSettings:
    kinds = {"largest": "max"}
    kind = getattr(_core.ScoreKind, kinds.get(measure, measure), _core.ScoreKind.mass)
    return _core.ImportanceSettings(kind, decay=0.998, **settings)


class Text:
    """Hold a random text in a store of one layer, whose KV heads have different budgets."""

    def __init__(
        self, kernel: str, kv_type: str, budgets: list[int], seed: int, measure: str, **shape: Any
    ) -> None:
        layer = _core.LayerShape(N_HEAD_KV * GROUP, N_HEAD_KV, DIM, DIM, **shape)
        self.store = _core.HeadwiseStore(
            [layer],
            kv_type,
            importance(measure),
            n_sinks=2,
            recent_window=3,
            max_tokens=MAX_TOKENS,
            max_entries=MAX_ENTRIES,
            n_threads=1,
            kernels=kernel,
            counts_dropped=True,
        )
        _, (per_page,) = _core.page_geometry([layer], kv_type)
        pages = sum(_core.pages_for(budget, per_page) for budget in budgets)
        self.store.set_budgets(budgets, pages, 2, 3)
        random = np.random.default_rng(seed)
        shape_of = (MAX_ENTRIES, N_HEAD_KV, DIM)
        self.k = random.standard_normal(shape_of, dtype=np.float32) * 2
        self.v = random.standard_normal(shape_of, dtype=np.float32)
        self.q = random.standard_normal((MAX_ENTRIES, N_HEAD_KV * GROUP, DIM), dtype=np.float32) * 2
        self.wrong = random.standard_normal((MOST_DRAFTS, N_HEAD_KV, DIM), dtype=np.float32) * 3
        self.position = 0

    def read(self, n: int, n_wrong: int = 0, *, drafts: bool = False) -> Any:
        """Read n tokens, whose outputs are returned, and n_wrong others; with `drafts`, all but the
        first are drafts, and the wrong ones are undone.
        """
        rows = slice(self.position, self.position + n)
        k, v, q = self.k[rows], self.v[rows], self.q[rows]
        if n_wrong:
            wrong = self.wrong[:n_wrong]
            k, v = np.concatenate([k, wrong]), np.concatenate([v, wrong])
            q = np.concatenate([q, np.repeat(wrong, GROUP, axis=1)])
        n_drafts = len(k) - 1 if drafts else 0
        output = self.store.attend_alone(
            0, q, k, v, SCALE, position=self.position, n_drafts=n_drafts
        )
        if n_drafts:
            self.store.settle_drafts(n - 1)
        self.position += n
        return output[:n]

    def held(self) -> list[Any]:
        """Return everything on which the next token depends, and the counters."""
        heads = range(N_HEAD_KV)
        return [
            *(self.store.positions(0, head).tolist() for head in heads),
            *(self.store.importance(0, head).tolist() for head in heads),
            *(self.store.save_head(0, head) for head in heads),
            (self.store.evicted, self.store.windows_whole_from),
        ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("measure", MEASURES)
def test_right_drafts_are_as_tokens_that_were_read_alone(
    kernel: str, kv_type: str, measure: str
) -> None:
    """Right drafts give outputs, entries, importance and counters of single tokens, to the bit."""
    chance = np.random.default_rng([KERNELS.index(kernel), MEASURES.index(measure)])
    for seed in range(3):
        budgets = [int(n) for n in chance.integers(6, 90, N_HEAD_KV)]
        one, other = (Text(kernel, kv_type, budgets, seed, measure) for _ in range(2))
        np.testing.assert_array_equal(one.read(70), other.read(70))
        undone = 0
        while one.position < 400:
            n = int(chance.integers(1, MOST_DRAFTS + 1))
            n_wrong = int(chance.integers(0, MOST_DRAFTS + 1 - n + 1))
            undone += n_wrong
            drafted = other.read(n, n_wrong, drafts=True)
            alone = np.concatenate([one.read(1) for _ in range(n)])
            np.testing.assert_array_equal(alone, drafted)
            assert one.held() == other.held()
            assert other.store.used_bytes <= other.store.budget_bytes
        assert undone > 100
        assert one.store.evicted > 100


def test_drafts_are_appended_to_pages_whose_other_owners_have_left() -> None:
    """Drafts are appended correctly to a page whose other owners have left it, which happens when
    the first token evicts.
    """
    one, other = (Text(KERNELS[-1], "f16", [60, 75, 80], 1, "mass") for _ in "12")
    np.testing.assert_array_equal(one.read(200), other.read(200))
    while one.position < 400:
        for text in (one, other):
            text.store.checkpoint().drop()
        drafted = other.read(4, 2, drafts=True)
        alone = np.concatenate([one.read(1) for _ in range(4)])
        np.testing.assert_array_equal(alone, drafted)
        assert one.held() == other.held()


@pytest.mark.parametrize("window", [8, 40])
def test_a_window_evicts_nothing_while_drafts_are_read(window: int) -> None:
    """A window drops nothing while drafts are read, because a dropped entry could not come back;
    fewer drafts are read instead.
    """
    chance = np.random.default_rng(window)
    one, other = (Text(KERNELS[-1], "f16", [60, 45, 50], 1, "mass", window=window) for _ in "12")
    np.testing.assert_array_equal(one.read(40), other.read(40))
    fewest = MOST_DRAFTS
    while one.position < 400:
        n_drafts = other.store.most_drafts(int(chance.integers(0, MOST_DRAFTS + 1)))
        fewest = min(fewest, n_drafts)
        n = int(chance.integers(0, n_drafts + 1)) + 1
        drafted = other.read(n, n_drafts + 1 - n, drafts=n_drafts > 0)
        alone = np.concatenate([one.read(1) for _ in range(n)])
        np.testing.assert_array_equal(alone, drafted)
        assert one.held() == other.held()
    assert fewest == 0
    assert one.store.windows_whole_from > 0


def test_where_nothing_can_be_undone_there_are_no_drafts() -> None:
    text = Text(KERNELS[-1], "f16", [60] * 3, 1, "mass")
    text.read(20)
    assert text.store.most_drafts(7) == 7
    text.store.measure_losses([0, 4])
    assert text.store.most_drafts(7) == 0
    with pytest.raises(ValueError, match="cannot be undone"):
        text.read(3, drafts=True)
    text.store.measure_losses([])
    text.store.track_entropy(True)
    assert text.store.most_drafts(7) == 0
    text.store.track_entropy(False)
    text.store.capture_queries(True)
    assert text.store.most_drafts(7) == 0


def test_the_log_of_what_drafts_change_is_counted() -> None:
    text = Text(KERNELS[-1], "f16", [60] * 3, 1, "mass")
    text.read(20)
    before = text.store.scratch_bytes
    text.read(MOST_DRAFTS, drafts=True)
    log = MOST_DRAFTS // 4 * 4 * 60 * N_HEAD_KV  # The log holds snapshots of the importance.
    assert text.store.scratch_bytes - before > log
