"""The flat store evicts positions and compacts llama.cpp's own cache; `auto` chooses a store by the
devices that hold a model's layers.
"""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from entropykv import (
    BudgetError,
    ContextError,
    Session,
    SettingsError,
    UnsupportedModelError,
    _core,
)
from entropykv.store import factory
from tests.support.logits import relative_error, stock_logits, tokens_for
from tests.support.tiny_models import write_llama


def test_ample_budget_gives_the_logits_of_stock(tiny_llama: Path) -> None:
    tokens = tokens_for(200)
    with Session(tiny_llama, n_ctx=512, store="flat", kv_type="f16", n_threads=2) as session:
        ours = [session.decode(tokens[:150], all_logits=True)]
        ours += [session.decode([token]) for token in tokens[150:]]
    assert relative_error(np.concatenate(ours), stock_logits(tiny_llama, tokens)) < 2e-3


@pytest.mark.parametrize("policy", ["streaming", "recency"])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_keeps_sinks_and_the_newest(tiny_llama: Path, policy: str, kv_type: str) -> None:
    with Session(
        tiny_llama, n_ctx=1024, kv_budget=100, store="flat", policy=policy, kv_type=kv_type
    ) as session:
        for step in (300, 1, 1, 1, 150):
            session.decode(tokens_for(step))
            kept = session.cache.entries(0, 0).tolist()
            assert len(kept) <= 100
            newest = range(session.position - (len(kept) - 4), session.position)
            assert kept == [0, 1, 2, 3, *newest]
        stats = session.stats()
    assert stats.kv_bytes_now <= stats.kv_bytes_peak <= stats.kv_bytes_budget
    assert stats.evictions == (453 - len(kept)) * 6
    assert stats.store == "flat"


def test_equals_stock_over_the_kept_positions(tiny_llama: Path) -> None:
    """The flat and the headwise store give nearly the same logits under `streaming`."""
    tokens = tokens_for(260)
    rows = []
    for store in ("flat", "headwise"):
        with Session(
            tiny_llama,
            n_ctx=512,
            kv_budget=64,
            store=store,
            policy="streaming",
            kv_type="f16",
            n_ubatch=32,
            n_threads=2,
        ) as session:
            session.decode(tokens[:200])
            rows.append(np.concatenate([session.decode([token]) for token in tokens[200:]]))
    assert relative_error(rows[0], rows[1]) < 2e-3


def test_compaction_changes_no_number_and_frees_width(tiny_llama: Path) -> None:
    tokens = tokens_for(700)
    with Session(
        tiny_llama, n_ctx=1024, store="flat", policy="streaming", kv_type="f16", n_threads=2
    ) as session:
        session.decode(tokens[:600])
        session.cache.resize(80)
        compacted = [session.decode([token]) for token in tokens[600:]]
        counters = session.stats()
    assert counters.entries_kept <= 80 * 6
    with Session(
        tiny_llama, n_ctx=1024, kv_budget=600, policy="streaming", kv_type="f16", n_threads=2
    ) as session:
        session.decode(tokens[:600])
        session.cache.resize(80)
        expected = [session.decode([token]) for token in tokens[600:]]
    assert relative_error(np.concatenate(compacted), np.concatenate(expected)) < 2e-3


def test_resize_grows_into_a_larger_context(tiny_llama: Path) -> None:
    tokens = tokens_for(900)
    with Session(tiny_llama, n_ctx=1024, kv_budget=64, store="flat", n_ubatch=64) as session:
        session.decode(tokens[:100])
        small = session.stats().kv_bytes_budget
        kept = session.cache.entries(0, 0).tolist()
        session.cache.resize(800)
        assert session.cache.entries(0, 0).tolist() == kept
        assert session.stats().kv_bytes_budget > small
        session.decode(tokens[100:800])
        assert len(session.cache.entries(0, 0)) == len(kept) + 700
        session.cache.resize(50)
        assert len(session.cache.entries(0, 0)) == 50
        session.decode(tokens[800:])


def test_truncate_and_reset(tiny_llama: Path) -> None:
    tokens = tokens_for(60)
    with Session(tiny_llama, n_ctx=256, store="flat", kv_type="f16") as session:
        first = session.decode(tokens, all_logits=True)
        session.text.truncate(40)
        again = session.decode(tokens[40:], all_logits=True)
        session.reset()
        assert session.cache.entries(0, 0).size == 0
        fresh = session.decode(tokens, all_logits=True)
    assert relative_error(again, first[40:]) < 1e-3
    assert relative_error(fresh, first) < 1e-3


def test_going_back_to_what_was_evicted_is_refused(tiny_llama: Path) -> None:
    tokens = tokens_for(200)
    with Session(tiny_llama, n_ctx=256, kv_budget=64, n_ubatch=32, store="flat") as session:
        session.decode(tokens)
        kept = session.cache.entries(0, 0)
        gone = next(p for p in range(199, 0, -1) if p - 1 not in kept)
        with pytest.raises(ContextError, match=f"position {gone}: the flat store has evicted"):
            session.text.truncate(gone)
        assert session.position == 200
        np.testing.assert_array_equal(session.cache.entries(0, 0), kept)
        session.text.truncate(gone + 1)
        session.decode(tokens[:5])


def test_refuses_policies_that_choose_per_head(tiny_llama: Path) -> None:
    with pytest.raises(SettingsError, match="--policy streaming or recency"):
        Session(tiny_llama, store="flat", policy="uniform")


def test_a_byte_budget_includes_the_micro_batch(tiny_llama: Path) -> None:
    with Session(
        tiny_llama, n_ctx=2048, kv_budget="1MiB", store="flat", n_ubatch=128, kv_type="f16"
    ) as session:
        session.decode(tokens_for(1500))
        stats = session.stats()
    assert stats.kv_bytes_peak <= stats.kv_bytes_budget <= 2**20
    with pytest.raises(BudgetError, match="smallest budget"):
        Session(tiny_llama, n_ctx=2048, kv_budget="1KiB", store="flat")


def test_auto_goes_on_with_flat_and_says_why(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_model_has_encoder", lambda _: True)
    with pytest.raises(UnsupportedModelError, match="it has an encoder; use --store flat"):
        Session(tiny_llama, n_ctx=64, store="headwise")
    with Session(tiny_llama, n_ctx=64) as session:
        assert session.cache.store == "flat"
        assert session.config.policy.name == "recency"
        assert session.config.fallback is not None
        assert "it has an encoder" in session.config.fallback
    with pytest.raises(SettingsError, match="cannot follow policy uniform"):
        Session(tiny_llama, n_ctx=64, policy="uniform")


def test_without_a_device_nothing_is_offloaded(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for supported in (False, True):
        monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda value=supported: value)
        with Session(tiny_llama, n_ctx=64, n_gpu_layers=99) as session:
            assert session.cache.store == "headwise"


def store_of(path: Path) -> tuple[str, str | None]:
    """Return the store that `auto` gives a session, and why it is not the headwise store."""
    with Session(path, store="auto", n_ctx=256, n_gpu_layers=99) as session:
        session.decode([1, 2, 3])
        return session.stats().store, session.config.fallback


@pytest.mark.parametrize("on_device", [True, False])
def test_auto_prefers_headwise_only_where_no_attention_is_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    write_llama(tmp_path / "model.gguf", head_dim=32)
    monkeypatch.setattr(factory, "offloaded_layers", lambda n: n)
    monkeypatch.setattr(_core.AttentionNode, "on_device", on_device)
    store, why = store_of(tmp_path / "model.gguf")
    assert store == ("device" if on_device else "headwise")
    assert (why is None) == (not on_device)
