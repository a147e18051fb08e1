"""A device store whose decisions fail, beside the device's work, goes on from what it held."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_llama

SOURCE = Path(__file__).parents[1] / "support" / "failing_threads.cpp"
N_HEADS = 64
"""KV heads of all layers: so many that 520 entries of each are decided about by several threads."""
N_PROMPT, BUDGET = 511, 520
PROGRAM = f"""
import ctypes, json, sys
from entropykv import Session
library = ctypes.CDLL(sys.argv[2])
with Session(sys.argv[1], n_ctx=1024, n_ubatch=64, n_gpu_layers=0, store="device", n_threads=2,
             policy="recency", kv_type="f16", kv_budget={BUDGET}) as session:
    def kept():
        return [session.cache.entries(0, 0).tolist(), session.cache.entries(3, 15).tolist()]
    session.decode([3 + i % 250 for i in range({N_PROMPT})])
    for _ in range({BUDGET - N_PROMPT}):
        session.decode([5])
    before = kept()
    library.start_no_threads(True)
    try:
        session.decode([7])
        error = None
    except RuntimeError as problem:
        error = str(problem)
    library.start_no_threads(False)
    after_failure, position = kept(), session.position
    session.decode([7])
    print(json.dumps(dict(error=error, failed=library.threads_not_started(), before=before,
                          after_failure=after_failure, position=position, kept=kept())))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are loaded first as Linux does")
def test_a_step_whose_decisions_fail_is_not_read_and_can_be_read_again(tmp_path: Path) -> None:
    built = tmp_path / "failing_threads.so"
    compiler = ("c++", "-std=c++17", "-O1", "-shared", "-fPIC")
    subprocess.run([*compiler, str(SOURCE), "-ldl", "-o", str(built)], check=True)
    model = tmp_path / "model.gguf"
    write_llama(model, n_layer=4, n_head=N_HEADS // 4, n_head_kv=N_HEADS // 4)
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(built)],
        env={**os.environ, "LD_PRELOAD": str(built)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    seen = json.loads(output.splitlines()[-1])
    assert seen["failed"] == 1
    assert seen["error"]
    assert seen["position"] == BUDGET
    assert seen["after_failure"] == seen["before"] == [list(range(BUDGET))] * 2
    newest, oldest = list(range(BUDGET - 100, BUDGET + 1)), list(range(4))
    for positions in seen["kept"]:
        assert len(positions) < BUDGET
        assert positions[:4] == oldest
        assert positions[-len(newest) :] == newest
