"""Store `auto` chooses by the devices that hold a model's layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from entropykv import Session, _core
from entropykv.store import factory
from tests.support.tiny_models import write_llama


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
