"""Run llama.cpp's server tests against `entropykv serve`, and print a table file by file.

python -m tests.peers SOURCES [FILES...]

SOURCES: the folder of llama-cpp-python's sources, which have these tests in vendor/llama.cpp.
FILES: such as test_basic; all that concern entropykv unless any are given. The tests stay as they
are; the program, the models and what they expect of texts are replaced: see llama_server.py,
peer_models.py and plugin.py. Ends with 1 if a test fails without a reason in judgement.py, or
passes in spite of one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.peers.judgement import DIFFERENCES, FILES, NOT_RUN
from tests.peers.peer_models import write_talkative

ROOT = Path(__file__).resolve().parents[2]
_STAND_IN = """#!/bin/sh
PYTHONPATH={root}:$PYTHONPATH exec {python} -m tests.peers.llama_server "$@"
"""
_REPOSITORIES = (
    *("ggml-org/test-model-stories260K", "ggml-org/test-model-stories260K-infill"),
    *("ggml-org/stories15M_MOE/stories15M_MOE-F16.gguf", "stories15M-q4_0.gguf"),
)


def report_of(sources: Path, files: list[str]) -> dict[str, dict[str, str]]:
    """Run the files; return the report of plugin.py: "outcomes", and "reasons" of failures."""
    work = sources.parent.resolve()
    model = work / "models" / "talkative.gguf"
    model.parent.mkdir(exist_ok=True)
    write_talkative(model)
    program = work / "llama-server"
    program.write_text(_STAND_IN.format(root=ROOT, python=sys.executable), encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    report = work / "report.json"
    report.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(program),
        "PEER_MODELS": json.dumps(dict.fromkeys(_REPOSITORIES, str(model))),
        "PEER_REPORT": str(report),
        "PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    tests = sources / "vendor/llama.cpp/tools/server/tests"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "tests.peers.plugin"]
    command += ["-m", "not slow", *(f"unit/{name}.py" for name in files)]
    with (work / "log.txt").open("wb") as log:
        subprocess.run(command, cwd=tests, env=environment, stdout=log, stderr=log, check=False)
    found: dict[str, dict[str, str]] = json.loads(report.read_text(encoding="utf-8"))
    return found


def reason_of(name: str) -> str | None:
    """Return why a test may fail, by the first pattern of DIFFERENCES that matches its name; None
    if it must pass.
    """
    short = name.removeprefix("unit/")
    return next((why for pattern, why in DIFFERENCES if re.fullmatch(pattern, short)), None)


def judged(report: dict[str, dict[str, str]]) -> tuple[dict[str, Counter[str]], list[str]]:
    """Return the number of tests by file and outcome, and a line for each unexpected outcome."""
    counts: dict[str, Counter[str]] = {}
    wrong = []
    for name, outcome in report["outcomes"].items():
        file = Path(name.partition("::")[0]).stem
        why = reason_of(name)
        kind = outcome
        if outcome == "failed" and why is not None:
            kind = "documented"
        elif outcome == "failed":
            wrong.append(f"{name} failed: {report['reasons'].get(name, '')}")
        elif outcome == "passed" and why is not None:
            wrong.append(f"{name} passes; take its row out of judgement.py")
        counts.setdefault(file, Counter())[kind] += 1
    return counts, wrong


def main() -> int:
    """Print a table of the outcomes; return 1 if any is unexpected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    options = parser.parse_args()
    report = report_of(options.sources, list(options.files))
    counts, wrong = judged(report)
    print(f"{'file':28}{'passed':>8}{'documented':>12}{'failed':>8}{'skipped':>9}")
    for file, each in sorted(counts.items()):
        print(
            f"{file:28}{each['passed']:8}{each['documented']:12}{each['failed']:8}"
            f"{each['skipped']:9}"
        )
    for file, why in NOT_RUN.items():
        print(f"{file:28}not run: {why}")
    reasons = {name: reason_of(name) for name, how in report["outcomes"].items() if how == "failed"}
    print("\nDocumented differences:")
    for name, why in reasons.items():
        if why is not None:
            print(f"  {name.removeprefix('unit/')}: {why}")
    print("\n" + "\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
