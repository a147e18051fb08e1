"""Fixtures: real models, tiny and not so tiny."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from entropykv import models
from entropykv.errors import ModelFileError
from tests.tiny_models import write_bitnet, write_llama

# A shell that starts pytest in the background has it ignore interrupts, and its children too.
signal.signal(signal.SIGINT, signal.default_int_handler)

TEXTS = Path(__file__).resolve().parents[1] / "benchmarks" / "texts"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with GQA, F32 weights."""
    path = tmp_path_factory.mktemp("models") / "llama.gguf"
    write_llama(path, n_layer=3, n_head=6, n_head_kv=2, head_dim=32, weight_type="F32")
    return path


@pytest.fixture(scope="session")
def tiny_bitnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random bitnet, F32 weights."""
    path = tmp_path_factory.mktemp("models") / "bitnet.gguf"
    write_bitnet(path, n_layer=2, n_head=4, n_head_kv=4, head_dim=32, weight_type="F32")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    try:
        return models.smollm2().path
    except ModelFileError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def prose() -> str:
    """A few thousand tokens of English."""
    return (TEXTS / "heldout_prose_01.txt").read_text(encoding="utf-8")
