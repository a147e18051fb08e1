"""Fixtures: real models, tiny and not so tiny; and no test leaves a file outside its folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from entropykv.errors import ModelFileError
from entropykv.model import shipped
from entropykv.session import sequence_slot
from tests.support.tiny_models import write_bitnet, write_llama

# A shell that starts pytest in the background has it ignore interrupts, and its children too.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT / "benchmarks" / "texts"


OWN_FOLDERS = {".git", ".venv", "build", "dist", "__pycache__", "node_modules"}
"""What tools write while tests run, besides hidden folders for their caches."""


def files_of_the_tree() -> set[str]:
    """Return the files of the repository and of the working directory, by path.

    Only names are read, and none of folders that belong to tools: a few milliseconds.
    """
    found = {str(path) for path in Path.cwd().iterdir()}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in OWN_FOLDERS and not name.endswith((".egg-info", "_cache", ".hypothesis"))
        ]
        found.update(os.path.join(folder, name) for name in files)
    return found


@pytest.fixture(autouse=True, scope="module")
def no_files_left_behind() -> Iterator[None]:
    """Fail where the tests of a module leave a file outside of their temporary folders."""
    before = files_of_the_tree()
    yield
    left = sorted(files_of_the_tree() - before)
    assert not left, f"tests left files outside of their temporary folders: {', '.join(left)}"


@pytest.fixture(scope="session")
def uneven_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama whose KV heads and layers differ by more than a page of entries."""
    path = tmp_path_factory.mktemp("models") / "uneven.gguf"
    write_llama(path, n_layer=3, n_head=6, n_head_kv=2, head_dim=32, weight_type="F32", uneven=True)
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with GQA, F32 weights."""
    path = tmp_path_factory.mktemp("models") / "llama.gguf"
    write_llama(path, n_layer=3, n_head=6, n_head_kv=2, head_dim=32, weight_type="F32")
    return path


@pytest.fixture(scope="session")
def pool_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with Q8_0 weights, whose products do not depend on company."""
    path = tmp_path_factory.mktemp("models") / "pool.gguf"
    write_llama(path, weight_type="Q8_0", n_layer=3, n_head=4, n_head_kv=2, head_dim=32, n_ff=64)
    return path


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, nobody who only waits for the processor is taken to be idle."""
    monkeypatch.setattr(sequence_slot, "IDLE_SECONDS", 60.0)


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
        return shipped.smollm2().path
    except ModelFileError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def prose() -> str:
    """A few thousand tokens of English."""
    return (TEXTS / "heldout_prose_01.txt").read_text(encoding="utf-8")
