"""Check what `make demo` printed: that every cache has its row, and that the rows show the
differences they should.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROW = re.compile(r"^\((\d)\) .*?(\d+) of (\d+) +([\d.]+) MiB.*tok/s +\d+ tok/s$", re.MULTILINE)


def problem(printed: str) -> str | None:
    """Return what is wrong with the output of `make demo`, or None."""
    rows = {int(row[1]): row for row in ROW.finditer(printed)}
    if sorted(rows) != [1, 2, 3, 4]:
        return f"it printed the rows {sorted(rows)}, not 1 to 4"
    right = {number: int(row[2]) for number, row in rows.items()}
    size = {number: float(row[4]) for number, row in rows.items()}
    if right[1] < 8:
        return f"the full cache knows {right[1]} facts: the questions are too hard for the model"
    if right[3] < right[1] - 2 or right[4] >= right[3]:
        return f"freezing knows {right[3]} facts, the full cache {right[1]}, recency {right[4]}"
    if any(2 * size[number] > size[1] for number in (2, 3, 4)):
        return f"the budgets hold {size} MiB, not less than half of the full cache"
    return None


if __name__ == "__main__":
    sys.exit(problem(Path(sys.argv[1]).read_text(encoding="utf-8")))
