"""Layers run on a device that llama.cpp treats as a GPU, with every store but the headwise one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from entropykv import EntropyLlama, Session, UnsupportedModelError
from entropykv.llamacpp.model import captured_log
from tests.support.logits import relative_error, tokens_for
from tests.support.second_device import second_device, use_second_device
from tests.support.tiny_models import write_gemma, write_llama
from tests.support.tiny_writer import TinyRope

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        second_device() is None, reason="needs llama.cpp with CUDA, RPC or Vulkan: make test-device"
    ),
]

FACTORS = tuple(float(f) for f in np.linspace(1.0, 8.0, 32))
MODELS: dict[str, Callable[[Path], None]] = {
    "llama": lambda path: write_llama(path, head_dim=64, n_ctx_train=256, weight_type="F32"),
    "quantised": lambda path: write_llama(path, head_dim=64, n_ctx_train=256, weight_type="Q4_0"),
    "factors": lambda path: write_llama(
        path, head_dim=64, n_ctx_train=256, weight_type="F32", rope=TinyRope(factors=FACTORS)
    ),
    "windows": write_gemma,
}


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    use_second_device()


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"{request.param}.gguf"
    MODELS[request.param](path)
    return path


@pytest.mark.parametrize("n_gpu_layers", [1, 2, 99])
@pytest.mark.parametrize("budget", [1.0, 0.25])
def test_store_auto_gives_the_logits_that_it_gives_without_a_device(
    model: Path, n_gpu_layers: int, budget: float
) -> None:
    tokens = tokens_for(200)
    rows = []
    for layers in (0, n_gpu_layers):
        options: dict[str, Any] = {"n_ctx": 240, "n_gpu_layers": layers, "n_ubatch": 32}
        with Session(model, kv_budget=budget, policy="uniform", **options) as session:
            # If only one layer is offloaded, llama.cpp offloads the output alone.
            assert session.cache.store == ("headwise" if layers < 2 else "device")
            assert bool(session.config.fallback) == (session.cache.store == "device")
            rows.append(session.decode(tokens, all_logits=True))
            assert session.stats().kv_bytes_peak <= session.stats().kv_bytes_budget
    # Entries with nearly equal scores may be evicted in either order.
    assert relative_error(rows[1], rows[0]) < (5e-2 if budget == 1.0 else 1e-1)


def test_the_headwise_store_is_refused_by_name_where_attention_is_on_a_device(model: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="the headwise store cannot serve this model"):
        Session(model, n_ctx=240, store="headwise", n_gpu_layers=99)


def test_layers_are_on_the_device(model: Path) -> None:
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 99
    with captured_log() as log:
        handle = llama_cpp.llama_model_load_from_file(os.fsencode(model), parameters)
    llama_cpp.llama_model_free(handle)
    lines = "".join(text for _, text in log)
    assert re.search(r"offloaded (\d+)/\1 layers", lines)
    assert re.search(rf"layer +0 assigned to device {second_device()}", lines)


def test_beyond_the_trained_context_store_auto_takes_the_device_store(tmp_path: Path) -> None:
    path = tmp_path / "llama.gguf"
    MODELS["llama"](path)
    options: dict[str, Any] = {"kv_budget": 96, "kv_type": "f16", "n_gpu_layers": 99}
    with Session(path, n_ctx=1024, n_ubatch=32, **options) as session:
        assert session.cache.store == "device"
        for first in range(0, 800, 100):
            session.decode(tokens_for(100, seed=first))


def test_the_flat_store_keeps_its_cache_on_the_device(model: Path) -> None:
    tokens = tokens_for(150)
    rows = []
    for layers in (0, 99):
        options: dict[str, Any] = {"store": "flat", "n_gpu_layers": layers, "n_ubatch": 32}
        with Session(model, n_ctx=240, kv_budget=64, **options) as session:
            rows.append(session.decode(tokens))
    assert relative_error(rows[1], rows[0]) < 5e-2


def test_an_application_gets_the_same_answer(smollm2: Path) -> None:
    answers = []
    for layers in (0, -1):
        llm = EntropyLlama(
            str(smollm2),
            n_ctx=512,
            kv_budget=0.5,
            kv_type="f16",
            n_gpu_layers=layers,
            verbose=False,
        )
        # Later words may differ by the rounding of some devices.
        reply = llm("The capital of France is", max_tokens=3, temperature=0.0)
        answers.append(reply["choices"][0]["text"])
        assert llm.kv_stats().store == ("headwise" if layers == 0 else "device")
        llm.close()
    assert answers[0] == answers[1]
