"""Run the command line as users do, or a Python program, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Result = subprocess.CompletedProcess[str]


def entropykv(*arguments: object, stdin: str | None = None) -> Result:
    return subprocess.run(
        [sys.executable, "-m", "entropykv.cli", *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        input=stdin,
        timeout=120,
        check=False,
    )


def python(program: str, *arguments: object, code: int = 0, **options: Any) -> Result:
    """Run a Python program, which must end with the exit code `code`."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, **options
    )
    assert result.returncode == code, result.stderr
    return result


@contextmanager
def python_process(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a Python program with pipes as its input and output; kill it at the end."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def started(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command line; its output is piped as unbuffered text, or as options say."""
    usual: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, "PYTHONUNBUFFERED": "1"},
    }
    command = [sys.executable, "-m", "entropykv.cli", *map(str, arguments)]
    return subprocess.Popen(command, **usual | options)


def assert_refused(result: Result, *words: str) -> None:
    """Assert one clear sentence on stderr, exit code 2, no traceback, and nothing on stdout."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.strip() == ""
    assert result.stderr.startswith("entropykv: "), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
