"""Layers run on a device that llama.cpp treats as a GPU; K, V and attention stay on the CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from entropykv import EntropyLlama, Session
from entropykv.llamacpp.model import captured_log
from tests.support.logits import relative_error, tokens_for
from tests.support.rpc_device import built_with_rpc, rpc_device
from tests.support.tiny_models import write_gemma, write_llama
from tests.support.tiny_writer import TinyRope

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not built_with_rpc(), reason="needs llama.cpp's RPC backend: make test-device"
    ),
]

FACTORS = tuple(float(f) for f in np.linspace(1.0, 8.0, 16))
MODELS: dict[str, Callable[[Path], None]] = {
    "llama": lambda path: write_llama(path, head_dim=32, n_ctx_train=256, weight_type="F32"),
    "quantised": lambda path: write_llama(path, n_ctx_train=256, weight_type="Q4_0"),
    "factors": lambda path: write_llama(
        path, head_dim=32, n_ctx_train=256, weight_type="F32", rope=TinyRope(factors=FACTORS)
    ),
    "windows": write_gemma,
}


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    """Provide a device; models that use it are closed before it is removed."""
    with rpc_device():
        yield


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"{request.param}.gguf"
    MODELS[request.param](path)
    return path


@pytest.mark.parametrize("n_gpu_layers", [1, 99])
@pytest.mark.parametrize("budget", [1.0, 0.25])
def test_the_headwise_store_gives_the_logits_that_it_gives_without(
    model: Path, n_gpu_layers: int, budget: float
) -> None:
    tokens = tokens_for(200)
    rows = []
    for layers in (0, n_gpu_layers):
        options: dict[str, Any] = {"n_ctx": 240, "n_gpu_layers": layers, "n_ubatch": 32}
        with Session(model, kv_budget=budget, **options) as session:
            assert session.store == "headwise"
            rows.append(session.decode(tokens, all_logits=True))
            assert session.stats().kv_bytes_peak <= session.stats().kv_bytes_budget
    assert relative_error(rows[1], rows[0]) < 5e-2


def test_layers_are_on_the_device(model: Path) -> None:
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 99
    with captured_log() as log:
        handle = llama_cpp.llama_model_load_from_file(os.fsencode(model), parameters)
    llama_cpp.llama_model_free(handle)
    assert re.search(r"offloaded (\d+)/\1 layers", "".join(text for _, text in log))


def test_a_text_beyond_the_trained_context(tmp_path: Path) -> None:
    """Keys are moved to other positions by the rotation that was seen on the device."""
    path = tmp_path / "factors.gguf"
    MODELS["factors"](path)
    rows = []
    for layers in (0, 99):
        with Session(path, n_ctx=1024, kv_budget=96, n_gpu_layers=layers, n_ubatch=32) as session:
            for first in range(0, 800, 100):
                row = session.decode(tokens_for(100, seed=first))
            rows.append(row)
    assert relative_error(rows[1], rows[0]) < 1e-3


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
            str(smollm2), n_ctx=512, kv_budget=0.5, n_gpu_layers=layers, verbose=False
        )
        reply = llm("The capital of France is", max_tokens=12, temperature=0.0)
        answers.append(reply["choices"][0]["text"])
        assert llm.kv_stats().store == "headwise"
        llm.close()
    assert answers[0] == answers[1]
