"""A process that does runs: a name a line comes in, an answer a line goes out.

It tells on its standard error what it does next, so that somebody knows after a crash.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz.directed import SCENARIOS
from tests.fuzz.files import run_files
from tests.fuzz.live import run_live
from tests.fuzz.pools import run_pool
from tests.fuzz.run import run_seed

KINDS = {"": run_seed, "pool": run_pool, "file": run_files, "server": run_live}
"""What is done with a seed, by what stands before it and a dash in the name of a run."""


def answer(name: str, folder: Path) -> dict[str, object]:
    """Do one run: a scenario by its name, or a seed such as `7` or `pool-7`."""
    start = time.monotonic()
    kind, _, seed = name.rpartition("-")
    try:
        summary = SCENARIOS[name](folder) if name in SCENARIOS else KINDS[kind](int(seed), folder)
    except Exception:
        return {"failure": traceback.format_exc()}
    return {"summary": summary, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    """Until the input ends."""
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(answer(line.strip(), folder)), flush=True)


if __name__ == "__main__":
    main()
