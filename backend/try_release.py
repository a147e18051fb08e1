"""Build against another release of llama-cpp-python and run tests; say in one sentence what failed.

    python backend/try_release.py 0.3.37 tests/integration/test_headwise.py ...

The exit code is 0 only if all went well.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from installed_llama_cpp import requirement

ROOT = Path(__file__).resolve().parents[1]
ABORTED = {-6, 134}


def failure_of_build(release: str, output: str) -> str:
    """Return why `make install` failed, as a sentence, from what it printed."""
    if re.search(r"No matching distribution found for llama-cpp-python==", output):
        return f"{release} is not on the package index; give a release that is there (VERSIONS=X)"
    if "Failed building wheel for llama-cpp-python" in output or re.search(
        r"Failed to build.*llama[-_]cpp[-_]python", output
    ):
        return f"{release} does not build here: its own compiler's output is above"
    return f"entropykv does not build against {release}: the first error above names what changed"


def failure_of_tests(release: str, code: int, output: str) -> str:
    """Return why the tests failed, as a sentence, from the output and the exit code of pytest."""
    if re.search(r"VersionError: .*(but in the one that it|but) runs with", output):
        return f"the structures of {release} differ from its headers: see VersionError above"
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)))
    if code in ABORTED or "Fatal Python error" in output:
        return f"llama.cpp of {release} ends the process in a test: the traceback is above"
    nodes = [name for name in failed if re.search(r"test_(architecture|headwise|rebase)", name)]
    if nodes:
        return (
            f"graphs of {release} have other nodes than the hooks know: {len(nodes)} tests of "
            f"architectures fail, {nodes[0]} first"
        )
    return f"{len(failed)} tests fail with {release}; their names are above"


def run(command: Sequence[str]) -> tuple[int, str]:
    """Run a command in the project's folder, and show its output; return the exit code and the
    output.
    """
    lines = []
    with subprocess.Popen(  # noqa: S603
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
    return process.returncode, "".join(lines)


def is_served(release: str) -> bool:
    """Tell whether a release is in the range of pyproject.toml, `>=A,<=B`."""
    least, most = re.findall(r"[<>]=([0-9.]+)", requirement())
    return _numbers(least) <= _numbers(release) <= _numbers(most)


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def try_release(release: str, tests: Sequence[str]) -> str | None:
    """Build against a release and run tests; return what failed as a sentence, or None."""
    if not is_served(release):
        return (
            f"{release} is not of {requirement()}; widen the range in pyproject.toml, and read the "
            "headers of that release for what changed"
        )
    folder = f"build/versions/{release}"
    code, output = run(["make", f"VENV={folder}", f"LLAMA_CPP_PYTHON={release}", "install"])
    if code:
        return failure_of_build(release, output)
    code, output = run([f"{folder}/bin/python", "-m", "pytest", *tests])
    return failure_of_tests(release, code, output) if code else None


if __name__ == "__main__":
    failure = try_release(sys.argv[1], sys.argv[2:])
    if failure is not None:
        sys.exit(f"test-versions: {failure}.")
