"""Provide fixtures, skip what this system cannot run, and check that tests leave no files."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from entropykv.errors import ModelFileError
from entropykv.model import shipped
from entropykv.session import shared_pool
from tests.support.learnt import need_texts, own_cache
from tests.support.ray_cluster import ThreeNodes, three_nodes
from tests.support.systems import absent_imports, is_there, left_out
from tests.support.tiny_models import write_bitnet, write_llama

if TYPE_CHECKING:
    import openai
    from llama_cpp import Llama

    from entropykv import EntropyLlama
    from entropykv.profile.profile import EntropyProfile
    from tests.support.chats import Chat
    from tests.support.eval_command import Command
    from tests.support.running_server import Server

# A shell that starts pytest in the background lets it and its children ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time that an example takes depends on how busy the machine is, so there is no deadline; and
# examples may share a folder.
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("any machine")

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT / "benchmarks" / "texts"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out test modules that import what this system lacks; the report's header names them."""
    return True if absent_imports(collection_path) else None


def pytest_report_header() -> list[str]:
    """Name the test modules that are left out."""
    return [*left_out(ROOT / "tests")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests with the marker `needs` if this system lacks one of the needs."""
    for item in items:
        needs = [need for mark in item.iter_markers("needs") for need in mark.args]
        lacking = [need for need in needs if not is_there(need)]
        if lacking:
            reason = f"needs {', '.join(lacking)}, which this system or user does not have"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own, for at most two minutes."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    talk = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(talk, 120))
    return True


OWN_FOLDERS = {".git", ".venv", "build", "dist", "__pycache__", "node_modules"}
"""Folders that tools write while tests run; hidden folders are ignored, too."""


def files_of_the_tree() -> set[str]:
    """Return the paths of the files in the repository and in the working directory.

    Only names are read, and not those in folders of tools, which takes a few milliseconds.
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
    """Fail if the tests of a module leave a file outside their temporary folders."""
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
    """A random llama with grouped-query attention and F32 weights."""
    path = tmp_path_factory.mktemp("models") / "llama.gguf"
    write_llama(path, n_layer=3, n_head=6, n_head_kv=2, head_dim=32, weight_type="F32")
    return path


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """Make a client of OpenAI for the server of the test's module."""
    with server.client() as made:
        yield made


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, store: str) -> Iterator[tuple[EntropyLlama, Llama]]:
    """Open an EntropyLlama with a full budget, and a stock Llama, once for each store."""
    from tests.support.llamas import both  # noqa: PLC0415  # few tests need llama_cpp.Llama

    yield from both(tiny_llama, store)


@pytest.fixture(scope="module", params=["headwise", "flat"])
def store(request: pytest.FixtureRequest) -> str:
    """Return the name of a store; a test runs once with every store of EntropyLlama."""
    return str(request.param)


@pytest.fixture
def llm(tiny_llama: Path, store: str) -> Iterator[EntropyLlama]:
    """Open an EntropyLlama that keeps 64 of 512 tokens, in micro-batches of 32."""
    from tests.support.llamas import small  # noqa: PLC0415

    yield from small(tiny_llama, store)


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Return a function that runs a piped conversation to its end; it returns stdout and stderr."""
    from tests.support.chats import piped  # noqa: PLC0415

    return piped(monkeypatch, capsys)


@pytest.fixture
def command(tiny_llama: Path, tmp_path: Path) -> Command:
    """Return an object that runs `entropykv eval` on tiny_llama."""
    from tests.support.eval_command import Command  # noqa: PLC0415

    return Command(tiny_llama, tmp_path)


@pytest.fixture(scope="session")
def profile(tiny_llama: Path) -> EntropyProfile:
    """A profile of tiny_llama, by a short calibration."""
    from entropykv.calibration.measure import calibrate  # noqa: PLC0415
    from tests.support.calibration_texts import QUICK, some_texts  # noqa: PLC0415

    return calibrate(tiny_llama, some_texts(), QUICK)


@pytest.fixture
def own_llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """Return a copy of tiny_llama, which the test may change, and which has taught nothing."""
    return Path(shutil.copy(tiny_llama, tmp_path / "model.gguf"))


@pytest.fixture
def one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a predictor be complete after the first text that teaches enough."""
    need_texts(monkeypatch, 1)


@pytest.fixture
def learnt_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a cache directory of the test's own; returns where learnt predictors are kept."""
    return own_cache(monkeypatch, tmp_path / "cache")


@pytest.fixture(scope="session")
def pool_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama in Q8_0, whose products do not depend on other sequences in the batch."""
    path = tmp_path_factory.mktemp("models") / "pool.gguf"
    write_llama(path, weight_type="Q8_0", n_layer=3, n_head=4, n_head_kv=2, head_dim=32, n_ff=64)
    return path


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pool take a session for idle only after a minute, however busy the machine is."""
    monkeypatch.setattr(shared_pool, "IDLE_SECONDS", 60.0)


@pytest.fixture
def cluster() -> Iterator[ThreeNodes]:
    """A Ray cluster of three nodes, one of which can be killed."""
    pytest.importorskip("ray", reason="needs the extra ray")
    with three_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="session")
def tiny_bitnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random bitnet with F32 weights."""
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
    """A text of a few thousand tokens of English."""
    return (TEXTS / "heldout_prose_01.txt").read_text(encoding="utf-8")
