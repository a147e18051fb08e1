"""The tools of the build check what they need, and end with one clear sentence otherwise."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import amx_flags
import check_machine
import installed_llama_cpp
import parse_with_clang_cl
import try_release
from benchmarks.inputs import MODELS_FOLDER, REAL_MODELS
from entropykv._build_info import GGML_COMMIT, GGML_VERSION, LLAMA_CPP_PYTHON_VERSION
from tests.support.command import python
from try_wheel import named_paths

BACKEND = Path(installed_llama_cpp.__file__).parent


def test_a_machine_that_can_build_lacks_nothing() -> None:
    assert list(check_machine.missing()) == []


@pytest.mark.parametrize(
    ("version", "affected"),
    [
        ("10 5", True),
        ("11 4", True),
        ("11 5", False),
        ("12 2", True),
        ("12 4", False),
        ("13 2", True),
        ("13 3", False),
        ("14 1", False),
    ],
)
def test_compilers_that_lose_the_tile_configuration(version: str, affected: bool) -> None:
    major, minor = version.split()
    macros = f"#define __GNUC__ {major}\n#define __EMPTY\n#define __GNUC_MINOR__ {minor}\n"
    assert amx_flags.is_affected(macros) is affected
    assert not amx_flags.is_affected(f"{macros}#define __clang__ 1\n")
    assert not amx_flags.is_affected("")


def test_only_some_processors_have_amx() -> None:
    assert amx_flags.has_amx("flags\t\t: fpu avx512_vnni amx_bf16 amx_tile amx_int8\n")
    assert not amx_flags.has_amx("flags\t\t: fpu avx512_vnni\n")


def test_what_is_missing_is_one_sentence(tmp_path: Path) -> None:
    code = (
        "import runpy, sys, sysconfig; sys.version_info = (3, 9, 1, 'final', 0)\n"
        f"sysconfig.get_path = lambda name: {str(tmp_path)!r}\n"
        f"runpy.run_path({str(BACKEND / 'check_machine.py')!r}, run_name='__main__')"
    )
    result = python(code, code=1, env={"PATH": str(tmp_path), "CXX": "none"})
    assert result.stdout == ""
    (sentence,) = result.stderr.splitlines()
    assert "without Python 3.10 " in sentence
    assert f"Python's C headers ({tmp_path}/Python.h), a C++17 compiler; " in sentence
    assert "apt install python3-dev" in sentence


def test_the_users_llama_cpp_python_counts_and_not_the_builds(tmp_path: Path) -> None:
    """The llama-cpp-python that the user has is found, even if pip shows another one to the build
    by PYTHONPATH.
    """
    fake = tmp_path / "llama_cpp"
    (fake / "lib").mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "lib" / "libggml-base.so").touch()
    result = subprocess.run(
        [sys.executable, str(BACKEND / "installed_llama_cpp.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout)
    assert Path(found["folder"]).is_relative_to(sysconfig.get_path("platlib"))
    assert found["version"] == LLAMA_CPP_PYTHON_VERSION
    assert (found["ggml_version"], found["ggml_commit"]) == (GGML_VERSION, GGML_COMMIT)


def test_a_release_that_the_sources_do_not_serve_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert installed_llama_cpp.installed() is not None
    monkeypatch.setattr(
        installed_llama_cpp, "requirement", lambda: f"llama-cpp-python>{LLAMA_CPP_PYTHON_VERSION}"
    )
    assert installed_llama_cpp.installed() is None


def test_the_range_is_that_of_the_package() -> None:
    required = importlib.metadata.requires("entropykv") or []
    (served,) = (r for r in map(Requirement, required) if r.name == "llama-cpp-python")
    assert Requirement(installed_llama_cpp.requirement()) == served
    assert LLAMA_CPP_PYTHON_VERSION in served.specifier


def test_a_wheel_that_names_a_folder_of_this_machine(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("entropykv/_core.so", b"\0/usr/lib/x\0" + bytes(BACKEND / "y.c") + b"\0z")
    assert named_paths(wheel) == [f"entropykv/_core.so: {BACKEND / 'y.c'}"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("libggml-base.so", "libggml-base.so.0"), "libggml-base.so"),
        (("libggml-base.dylib", "libggml-base.0.dylib"), "libggml-base.dylib"),
        (("ggml-base.lib", "ggml-base.dll", "ggml.dll"), "ggml-base.dll"),
        (("llama.dll",), None),
    ],
)
def test_the_library_of_ggml_is_found_on_every_system(
    tmp_path: Path, names: tuple[str, ...], found: str | None
) -> None:
    for name in names:
        (tmp_path / name).touch()
    library = installed_llama_cpp.ggml_library(tmp_path)
    assert (library and library.name) == found


def test_flags_of_gcc_become_flags_of_clang_cl() -> None:
    command = (
        "/usr/bin/c++ -DENTROPYKV_X86 -I/src/cpp -isystem '/x y/include' -O3 -DNDEBUG -std=c++17 "
        "-Wa,-muse-unaligned-vector-move -Wconversion -Wno-maybe-uninitialized -mavx2 -o a.obj "
        "-c /src/cpp/a.cpp"
    )
    assert list(parse_with_clang_cl.own_arguments(command)) == [
        "/DENTROPYKV_X86",
        "/I/src/cpp",
        *("-imsvc", "/x y/include"),
        "/DNDEBUG",
        "/clang:-Wconversion",
        "/clang:-mavx2",
    ]


FAILED = "FAILED tests/integration/{} - AssertionError\n1 failed, 9 passed\n"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("ERROR: No matching distribution found for llama-cpp-python==0.3.99\n", "not on the pack"),
        ("  ERROR: Failed building wheel for llama-cpp-python\n", "does not build here"),
        ("cpp/llama/graph_hook.cpp:7: error: no GGML_OP_GLU\n", "the first error above names"),
    ],
)
def test_a_failed_build_says_whose_it_is(output: str, reason: str) -> None:
    assert reason in try_release.failure_of_build("0.3.99", output)


@pytest.mark.parametrize(
    ("code", "output", "reason"),
    [
        (4, "entropykv.errors.VersionError: x was built, but runs with ggml 1\n", "structures of"),
        (
            4,
            "VersionError: built, but in the one that it runs with GLU is UNARY\n",
            "structures of",
        ),
        (-6, "Fatal Python error: Aborted\n", "ends the process in a test"),
        (1, FAILED.format("test_architectures.py::test_a[x]"), "have other nodes"),
        (1, FAILED.format("test_flat.py::test_b"), "1 tests fail with 0.3.99"),
    ],
)
def test_failed_tests_say_what_differs(code: int, output: str, reason: str) -> None:
    assert reason in try_release.failure_of_tests("0.3.99", code, output)


@pytest.mark.parametrize(
    ("release", "served"),
    [("0.3.29", False), ("0.3.30", True), (LLAMA_CPP_PYTHON_VERSION, True), ("0.4.0", False)],
)
def test_releases_of_the_range_are_tried(release: str, served: bool) -> None:
    assert try_release.is_served(release) is served


def test_a_release_out_of_the_range_ends_with_one_sentence_and_builds_nothing() -> None:
    script = Path(try_release.__file__)
    result = subprocess.run(
        [sys.executable, str(script), "0.4.0"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("test-versions: 0.4.0 is not of llama-cpp-python>=0.3.30")
    assert result.stderr.count("\n") == 1


SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "real_models.py"
NAME = "gemma3-270m-q4_k_m"


def write_package(folder: Path, package: str, version: str) -> None:
    """Write a wheel that holds a part of a file, as the wheels of models do."""
    stem = package.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}/data/part", package)
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("n_there", [1, 4])
def test_what_is_gone_or_another_file_is_one_sentence(n_there: int, tmp_path: Path) -> None:
    model, index, models = REAL_MODELS[NAME], tmp_path / "index", tmp_path / "models"
    index.mkdir()
    for number in range(1, n_there + 1):
        write_package(index, model.packages.format(number), model.version)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), NAME],
        env={
            **os.environ,
            MODELS_FOLDER: str(models),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(index),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{NAME}: ")
    wrong = "hold another file than expected" if n_there == 4 else "part2==1.0.0 any more"
    assert wrong in done.stderr
    assert list(models.iterdir()) == []


def test_a_model_that_does_not_exist_is_named() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "gpt"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "gpt: no such model" in done.stderr
