"""`make test-versions` ends with one clear sentence, whichever way a release fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import try_release
from entropykv._build_info import LLAMA_CPP_PYTHON_VERSION

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
