"""Run scenarios, fixed seeds, and then new seeds until the time is over: `python -m tests.fuzz`.

Runs are executed in separate processes: a crash is reported like any other defect, and the next
runs continue in a new process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.directed import SCENARIOS

FIXED_SEEDS = range(1, 13)
FIXED_OF_KINDS = ("pool-1", "pool-2", "pool-3", "pool-4", "file-1", "file-2", "file-3", "server-1")
NEW_KINDS = (*("", "", "pool-", "file-") * 12, "server-")
"""The kinds of new runs, in turn; a run with a server takes as long as many others."""
RUNS_OF_A_PROCESS = 60
SECONDS_OF_A_RUN = 300
_LINES_SHOWN = 70


class Worker:
    """Hold a process that executes runs one by one."""

    def __init__(self, folder: Path) -> None:
        """Start the process; its standard error goes to a file, which is shown after a crash."""
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  (for as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.n_runs = 0

    def do(self, name: str) -> dict[str, Any]:
        """Execute a run; returns its summary or its failure."""
        assert self._process.stdin
        assert self._process.stdout
        self.n_runs += 1
        begins = os.fstat(self._log.fileno()).st_size
        alarm = threading.Timer(SECONDS_OF_A_RUN, self._process.kill)
        alarm.start()
        try:
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            alarm.cancel()
        answer: dict[str, Any] = json.loads(line) if line else self._end()
        if "failure" in answer:
            answer["failure"] = f"{self._said(begins)}\n{answer['failure']}"
        return answer

    def _end(self) -> dict[str, Any]:
        code = self._process.wait()
        self.n_runs = RUNS_OF_A_PROCESS
        return {"failure": f"the process ended with code {code} (-9: after {SECONDS_OF_A_RUN} s)"}

    def _said(self, begins: int) -> str:
        self._log.flush()
        self._log.seek(begins)
        lines = self._log.read().decode(errors="replace").splitlines()
        self._log.seek(0, os.SEEK_END)
        if len(lines) > 2 * _LINES_SHOWN:
            lines = [*lines[:_LINES_SHOWN], "  ...", *lines[-_LINES_SHOWN:]]
        return "\n".join(lines)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


class Fuzzer:
    """Let several workers share a list of runs."""

    def __init__(self, names: Iterator[str], seconds: float) -> None:
        """Take the names of runs; `seconds` from now, no run but the first gets a new seed."""
        self._names = names
        self._ends = time.monotonic() + seconds
        self._lock = threading.Lock()
        self.failures: list[str] = []
        self.n_runs = 0

    def _next(self) -> str | None:
        """Return the next run; None if there is none, or when the time is over, for a new seed."""
        with self._lock:
            name = next(self._names, None)
            if name is None or (_is_new(name) and self.n_runs and time.monotonic() > self._ends):
                return None
            self.n_runs += 1
            return name

    def work(self, folder: Path) -> None:
        """Execute runs until there are none left."""
        worker = Worker(folder)
        while (name := self._next()) is not None:
            if worker.n_runs >= RUNS_OF_A_PROCESS:
                worker.close()
                worker = Worker(folder)
            self._report(name, worker.do(name))
        worker.close()

    def _report(self, name: str, answer: dict[str, Any]) -> None:
        with self._lock:
            if "summary" in answer:
                print(f"{name}: {answer['summary']}, {answer['seconds']} s", flush=True)
                return
            self.failures.append(name)
            print(f"{name} FAILED; again: make fuzz SEED={name}\n{answer['failure']}", flush=True)


def _is_new(name: str) -> bool:
    seed = name.rpartition("-")[2]
    return seed.isdigit() and int(seed) not in FIXED_SEEDS


def _all_runs(base: int) -> Iterator[str]:
    yield from SCENARIOS
    yield from map(str, FIXED_SEEDS)
    yield from FIXED_OF_KINDS
    for seed, kind in zip(itertools.count(base), itertools.cycle(NEW_KINDS), strict=False):
        yield f"{kind}{seed}"


def main() -> int:
    """Parse the arguments, execute the runs, and count failures."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument(
        "--seed", help="of one run, such as 7, pool-7, file-7, server-7, or the name of a scenario"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no run begins")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options = parser.parse_args()
    base = secrets.randbelow(2**40) + 1000
    names = iter([options.seed]) if options.seed else _all_runs(base)
    if not options.seed:
        print(f"new seeds from {base} on", flush=True)
    fuzzer = Fuzzer(names, options.seconds)
    with tempfile.TemporaryDirectory(prefix="entropykv-fuzz-") as folder:
        threads = [
            threading.Thread(target=fuzzer.work, args=(Path(folder),)) for _ in range(options.jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"{fuzzer.n_runs} runs, {len(fuzzer.failures)} failed: {' '.join(fuzzer.failures)}")
    return 1 if fuzzer.failures else 0


if __name__ == "__main__":
    sys.exit(main())
