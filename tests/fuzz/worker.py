"""Execute runs in a process: it reads one name per line, and writes one answer per line.

It reports on standard error what it does next, so that this is known after a crash.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz.directed import SCENARIOS
from tests.fuzz.file_runs import run_files
from tests.fuzz.pool_runs import run_pool
from tests.fuzz.server_runs import run_live
from tests.fuzz.session_runs import run_seed

KINDS = {"": run_seed, "pool": run_pool, "file": run_files, "server": run_live}
"""The function for a seed, by the word before the dash in the name of a run."""


def answer(name: str, folder: Path) -> dict[str, object]:
    """Execute one run: a scenario by its name, or a seed such as `7` or `pool-7`."""
    start = time.monotonic()
    kind, _, seed = name.rpartition("-")
    try:
        summary = SCENARIOS[name](folder) if name in SCENARIOS else KINDS[kind](int(seed), folder)
    except Exception:
        return {"failure": traceback.format_exc()}
    return {"summary": summary, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    """Answer each line of standard input until it ends."""
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(answer(line.strip(), folder)), flush=True)


if __name__ == "__main__":
    main()
