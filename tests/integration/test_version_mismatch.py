"""The extension names a llama.cpp other than the one that it was built for, and refuses it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

import llama_cpp
import pytest

from entropykv import VersionError, _core, _version
from entropykv._build_info import GGML_COMMIT, GGML_VERSION, LLAMA_CPP_PYTHON_VERSION

OTHER_RELEASE = (
    "import importlib.metadata as m; real = m.version\n"
    "m.version = lambda name: '9.9.9' if 'llama' in name else real(name)\n"
)
COMMANDS = (
    "run",
    "chat",
    "plan",
    "bench",
    "eval",
    "models",
    "convert",
    "calibrate",
    "profile",
    "serve",
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def test_it_was_built_against_what_is_here() -> None:
    _version.check_llama_cpp()
    assert _core.differences() == []
    assert _core.ggml_version() == GGML_VERSION
    assert _core.ggml_commit() == GGML_COMMIT
    assert _core.SEQUENCE_STATE_VERSION == llama_cpp.LLAMA_STATE_SEQ_VERSION


@pytest.mark.needs("/proc/self/maps")
def test_only_one_libllama_is_loaded_in_any_order_of_imports() -> None:
    """Only one libllama is loaded: a second one would have its own log, threads and backends."""
    for first in ("entropykv", "llama_cpp"):
        result = python(
            f"import {first}\nfrom entropykv import _core\nprint(open('/proc/self/maps').read())"
        )
        assert result.returncode == 0
        loaded = {part for part in result.stdout.split() if "libllama.so" in part}
        assert len(loaded) == 1, loaded


@pytest.mark.parametrize("asked", ["from entropykv import Session", "from entropykv import _core"])
def test_another_release_is_refused_and_its_library_is_not_loaded(asked: str) -> None:
    result = python(f"{OTHER_RELEASE}{asked}")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "VersionError: " in last
    assert f"against llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}, but 9.9.9 is installed" in last
    assert "pip install --force-reinstall --no-deps ." in last
    assert ">=0.3.30" in last
    loaded = python(
        f"{OTHER_RELEASE}import sys\ntry: {asked}\nexcept ImportError: pass\n"
        "sys.exit('entropykv._core' in sys.modules or 'llama_cpp' in sys.modules)"
    )
    assert loaded.returncode == 0, loaded.stderr


def test_what_was_refused_stays_refused() -> None:
    code = (
        "import entropykv\nfrom entropykv import _build_info\n_build_info.GGML_COMMIT = '0123456'\n"
        "for _ in range(2):\n"
        "    try: from entropykv import _core\n"
        "    except entropykv.VersionError as error: print(error)\n"
    )
    result = python(code.replace("_build_info", "_version"))
    assert result.stdout.count("built against") == 2, result.stderr


@pytest.mark.parametrize("command", ["--help", "--version"])
def test_help_needs_no_release(command: str) -> None:
    result = python(
        f"{OTHER_RELEASE}import sys; from entropykv_command import main\n"
        f"sys.argv = ['entropykv', '{command}']; sys.exit(main())"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_it_in_one_sentence(command: str) -> None:
    result = python(
        f"{OTHER_RELEASE}import sys; from entropykv_command import main\n"
        f"sys.argv = ['entropykv', '{command}']; sys.exit(main())"
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("entropykv: entropykv ")
    assert "9.9.9 is installed" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_command_is_the_command_line() -> None:
    code = "import sys; from entropykv_command import main\nsys.argv = ['entropykv', {}]; main()"
    assert "--kv-budget" in python(code.format("'run', '--help'")).stdout


def test_no_release_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(
        VersionError, match=r"none is installed; run `pip install llama-cpp-python=="
    ):
        _version.check_llama_cpp()


def other_ggml(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(_core, "ggml_commit", lambda: "0123456")
    monkeypatch.setattr(_core, "differences", lambda: pytest.fail("beyond the library's table"))
    return rf"with ggml {GGML_VERSION} \({GGML_COMMIT}\), but runs with ggml .* \(0123456\)"


def other_number(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(_core, "differences", lambda: ["GGML_OP_GLU is called UNARY"])
    return "in the one that it runs with GGML_OP_GLU is called UNARY"


def other_structure(monkeypatch: pytest.MonkeyPatch) -> str:
    class Longer(llama_cpp.llama_context_params):
        _fields_ = (("more", ctypes.c_int64),)

    monkeypatch.setattr(llama_cpp, "llama_context_params", Longer)
    size = ctypes.sizeof(Longer)
    return rf"llama_context_params has {size} bytes with cb_eval at \d+ instead of {size - 8} with"


@pytest.mark.parametrize("change", [other_ggml, other_number, other_structure])
def test_the_same_release_built_of_something_else(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], str]
) -> None:
    words = change(monkeypatch)
    with pytest.raises(VersionError, match=words) as caught:
        _version.check_llama_cpp()
    assert "build it again" in str(caught.value)


def test_a_source_distribution_says_that_its_tree_was_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = GGML_COMMIT.removesuffix("-dirty")
    for commit in (plain, f"{plain}-dirty"):
        monkeypatch.setattr(_core, "ggml_commit", lambda of=commit: of)
        _version.check_llama_cpp()
