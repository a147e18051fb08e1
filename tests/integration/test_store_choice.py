"""Store `auto` chooses by the devices that hold a model's layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from entropykv import Pool, Session, _core
from entropykv.errors import UnsupportedModelError
from entropykv.session import model_runner
from tests.support.tiny_models import write_llama


@pytest.fixture
def layers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a llama.cpp without devices look like one whose device has all layers."""

    def refuse(*_: object) -> None:
        raise UnsupportedModelError("its attention is on a device")

    monkeypatch.setattr(model_runner, "offloaded_layers", lambda n: n)
    monkeypatch.setattr(model_runner, "HeadwiseStore", refuse)
    monkeypatch.setattr(_core.AttentionNode, "on_device", True)


def store_of(path: Path, store: str) -> tuple[str, str | None]:
    """Return the store that a session gets, and why it is another one than it asked for."""
    with Session(path, store=store, n_ctx=256, n_gpu_layers=99) as session:
        session.decode([1, 2, 3])
        return session.stats().store, session.fallback


@pytest.mark.usefixtures("layers_on")
@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        (["CUDA0"], "device"),
        (["Metal"], "device"),
        (["RPC0", "CPU"], "device"),
        (["Vulkan0"], "flat"),
        (["CUDA0", "Vulkan1"], "flat"),
        (["vulkan0"], "flat"),
    ],
)
def test_auto_takes_no_device_store_on_vulkan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], chosen: str
) -> None:
    write_llama(tmp_path / "model.gguf", head_dim=32)
    named = property(lambda _: [(name, 1 << 20) for name in devices])
    monkeypatch.setattr(_core.DeviceStore, "device_bytes", named)
    store, why = store_of(tmp_path / "model.gguf", "auto")
    assert store == chosen
    assert ("--store device" in str(why)) == (chosen == "flat")
    # A user who names the store gets it on every device.
    assert store_of(tmp_path / "model.gguf", "device") == ("device", None)


@pytest.mark.usefixtures("layers_on")
def test_a_pool_of_auto_says_how_to_get_the_device_store_on_vulkan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "model.gguf", head_dim=32)
    monkeypatch.setattr(_core.DeviceStore, "device_bytes", property(lambda _: [("Vulkan0", 1)]))
    with pytest.raises(UnsupportedModelError, match=r"Vulkan.*--store device"):
        Pool(tmp_path / "model.gguf", store="auto", n_sequences=2, n_ctx=256, n_gpu_layers=99)


@pytest.mark.parametrize("on_device", [True, False])
def test_auto_prefers_headwise_only_where_no_attention_is_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    write_llama(tmp_path / "model.gguf", head_dim=32)
    monkeypatch.setattr(model_runner, "offloaded_layers", lambda n: n)
    monkeypatch.setattr(_core.AttentionNode, "on_device", on_device)
    store, why = store_of(tmp_path / "model.gguf", "auto")
    assert store == ("device" if on_device else "headwise")
    assert (why is None) == (not on_device)
