"""On a machine without free memory, calls raise MemoryError, and nothing is lost."""

from __future__ import annotations

import sys

import pytest

from tests.support.command import python

CHILD = """
import resource
import numpy as np
from entropykv import _core

LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
ENTRIES, DIM, STEP = 16_000, 128, 500
shape = _core.LayerShape(1, 1, DIM, DIM)
_, (per_page,) = _core.page_geometry([shape], "f16")
PAGES = _core.pages_for(ENTRIES, per_page)
importance = _core.ImportanceSettings(_core.ScoreKind.mass)

def of_this_process(name):
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

def read(store, begin, end):
    random = np.random.default_rng(begin)
    for position in range(begin, end, STEP):
        rows = random.standard_normal((STEP, 1, DIM), np.float32)
        store.attend_alone(0, rows, rows, rows, DIM**-0.5, position=position)

pool = _core.SequencePool([shape], "f16", STEP, 2)
pool.set_pages(PAGES)
store = _core.HeadwiseStore(
    [shape], "f16", importance, 4, 8, STEP, ENTRIES, 1, pool=pool)
store.set_budgets([ENTRIES], PAGES, 4, 8)
read(store, 0, ENTRIES)
kept = store.checkpoint()
before = store.positions(0, 0).tolist()

pool.set_pages(3 * PAGES)

# To evict, pages that the checkpoint owns, too, must be copied: 12 MB that are not there.
resource.setrlimit(LIMITS[0], (of_this_process("VmSize") + 2**20, resource.RLIM_INFINITY))
resource.setrlimit(LIMITS[1], (of_this_process("VmData") + 2**20, resource.RLIM_INFINITY))
try:
    store.set_budgets([ENTRIES // 2], 2 * PAGES, 4, 8)
    print("there was room")
except MemoryError:
    print("MemoryError")
assert store.positions(0, 0).tolist() == before
for limit in LIMITS:
    resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.set_budgets([ENTRIES // 2], 2 * PAGES, 4, 8)
assert store.entries == ENTRIES // 2
assert store.fork_from(kept, ends=True) and store.entries == ENTRIES // 2
print("went on")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_evicting_from_shared_pages_on_a_full_machine() -> None:
    assert python(CHILD).stdout.split("\n") == ["MemoryError", "went on", ""]
