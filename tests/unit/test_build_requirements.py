"""The build checks the machine, and finds the llama-cpp-python to build against."""

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
