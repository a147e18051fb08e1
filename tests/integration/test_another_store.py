"""A session works with a store from outside the package: llama.cpp's own cache with all tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from entropykv.errors import PoolError
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.positions import RopeRange
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.session.session import Session
from entropykv.settings.options import Budget
from entropykv.store.flat import FlatContext
from entropykv.store.protocol import (
    DamagedState,
    Reach,
    SavedState,
    Store,
    StoreFacts,
    StoreState,
    TokensToRead,
)
from tests.support.logits import relative_error, stock_logits, tokens_for


class FullStore(Store):
    """Keep every token in llama.cpp's own cache, which has cells for the whole context."""

    name = "full"
    shift = 0
    evicted = 0

    def __init__(
        self, model: Model, config: ResolvedConfig, context: FlatContext, _: Budget
    ) -> None:
        geometry = model.geometry
        self.context, self._n_ctx, self._position = context, config.n_ctx, 0
        self._heads = geometry.kv_heads_per_layer
        context.replace(context.new_handle(config.n_ctx))
        self.facts = StoreFacts(
            n_kv_heads=sum(self._heads),
            bytes_full_per_token=2 * geometry.cached_values,
            rope=RopeRange(config.n_ctx, 0),
            saves_cells=True,
        )

    def before(self, reading: TokensToRead) -> None:
        self._position = reading.position
        self.context.hook.begin_step()

    def after(self, n_tokens: int) -> None:
        self._position += n_tokens

    def resize(self, budget: Budget) -> None:
        pass

    def reach(self) -> Reach:
        return Reach(self._n_ctx, self._n_ctx, self._n_ctx)

    def truncate(self, position: int) -> None:
        memory = llama_cpp.llama_get_memory(self.context.handle)
        llama_cpp.llama_memory_seq_rm(memory, self.sequence, position, -1)
        self._position = position

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:  # noqa: ARG002
        return np.arange(self._position, dtype=np.int32)

    def budgets(self) -> list[tuple[int, ...]]:
        return [(self._n_ctx,) * heads for heads in self._heads]

    def counters(self) -> dict[str, Any]:
        kept = self._position * self.facts.n_kv_heads
        n_bytes = self._position * self.facts.bytes_full_per_token
        budget = self._n_ctx * self.facts.bytes_full_per_token
        return {
            "kv_type": "f16",
            "kv_bytes_budget": budget,
            "kv_bytes_peak": n_bytes,
            "kv_bytes_now": n_bytes,
            "kv_bytes_staging": 0,
            "kv_bytes_scratch": 0,
            "products": self.context.hook.products,
            "products_bytes_scratch": self.context.hook.products_scratch_bytes,
            "entries_kept": kept,
            "evictions": 0,
            "eviction_seconds": 0.0,
            "rebases": 0,
        }

    def state(self) -> StoreState:
        n = llama_cpp.llama_state_seq_get_size(self.context.handle, self.sequence)
        data = (ctypes.c_uint8 * n)()
        llama_cpp.llama_state_seq_get_data(self.context.handle, data, n, self.sequence)
        entries = [[self._position] * heads for heads in self._heads]
        return StoreState(entries, 0, [n], iter((bytes(data),)))

    def check_state(self, state: SavedState) -> None:
        if len(state.sections) != 1:
            raise DamagedState("other sections than those of the full store")

    def load_state(self, state: SavedState) -> None:
        section = state.sections[0]
        data = (ctypes.c_uint8 * len(section)).from_buffer_copy(section)
        llama_cpp.llama_state_seq_set_data(self.context.handle, data, len(section), self.sequence)
        self._position = state.position

    def close(self) -> None:
        pass


@pytest.fixture
def session(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setattr("entropykv.store.factory.FlatStore", FullStore)
    with Session(tiny_llama, store="flat", kv_budget=60, n_ctx=512, n_threads=1) as session:
        assert session.cache.store == "full"
        yield session


def test_it_reads_and_goes_back(session: Session, tiny_llama: Path) -> None:
    tokens = tokens_for(300)
    rows = session.decode(tokens, all_logits=True)
    assert relative_error(rows, stock_logits(tiny_llama, tokens)) < 2e-2
    assert session.stats().entries_kept == 300 * session._slot.store.facts.n_kv_heads
    session.text.truncate(200)
    np.testing.assert_allclose(session.decode(tokens[200:])[-1], rows[-1], atol=0.1)
    assert len(list(session.generate([], max_tokens=8, temperature=0.0))) == 8


def test_its_sessions_are_saved(session: Session) -> None:
    tokens = tokens_for(300)
    session.decode(tokens[:250])
    state = session.files.save_state()
    expected = session.decode(tokens[250:])
    session.reset()
    session.files.load_state(state)
    assert session.position == 250
    np.testing.assert_array_equal(session.decode(tokens[250:]), expected)
    assert session.cache.entries(0, 0).tolist() == list(range(300))


def test_what_it_has_no_capability_for_is_refused_or_not_done(session: Session) -> None:
    session.decode(tokens_for(40))
    assert session.cache.thaw() == 0
    assert session.cache.importance() is None
    assert (
        session.reader.read_drafts(5, [6, 7], lambda _: pytest.fail("it cannot undo drafts")) == 0
    )
    assert session.position == 41
    with pytest.raises(PoolError):
        session.fork()
