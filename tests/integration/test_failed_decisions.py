"""A device store's decision that fails while the device computes is an error of the session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import python
from tests.support.tiny_models import write_llama

SOURCE = Path(__file__).parents[1] / "support" / "failing_threads.cpp"
N_HEADS = 64
"""KV heads of all layers; with 520 entries each, several threads share the decisions."""
N_PROMPT, BUDGET = 511, 520
PROGRAM = f"""
import ctypes, json, sys
from entropykv import EntropyKVError, Session
library = ctypes.CDLL(sys.argv[2])
with Session(sys.argv[1], n_ctx=1024, n_ubatch=64, n_gpu_layers=0, store="device", n_threads=2,
             policy="recency", kv_type="f16", kv_budget={BUDGET}) as session:
    def fill():
        session.decode([3 + i % 250 for i in range({N_PROMPT})])
        for _ in range({BUDGET - N_PROMPT}):
            session.decode([5])
    fill()
    library.start_no_threads(True)
    errors = []
    for _ in range(2):
        try:
            session.decode([7])
        except EntropyKVError as error:
            errors.append([type(error).__name__, str(error)])
    library.start_no_threads(False)
    session.reset()
    fill()
    whole = session.cache.entries(0, 0).tolist()
    session.decode([7])
    kept = [session.cache.entries(*head).tolist() for head in ((0, 0), (3, 15))]
print(json.dumps([library.threads_not_started(), errors, whole, kept]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are loaded first as Linux does")
def test_a_session_whose_decisions_fail_must_begin_anew(tmp_path: Path) -> None:
    built = tmp_path / "failing_threads.so"
    compiler = ("c++", "-std=c++17", "-O1", "-shared", "-fPIC")
    subprocess.run([*compiler, str(SOURCE), "-ldl", "-o", str(built)], check=True)
    model = tmp_path / "model.gguf"
    write_llama(model, n_layer=4, n_head=N_HEADS // 4, n_head_kv=N_HEADS // 4)
    output = python(PROGRAM, model, built, env={**os.environ, "LD_PRELOAD": str(built)}).stdout
    not_started, errors, whole, kept = json.loads(output.splitlines()[-1])
    assert not_started == 1
    (kind, failed), (_, broken) = errors
    assert kind == "StepError"
    assert "a step could not be computed: " in failed
    assert model.name not in failed
    assert "failed half-way; call reset() first" in broken
    assert whole == list(range(BUDGET))
    for positions in kept:
        assert len(positions) < BUDGET
        assert positions[:4] == [0, 1, 2, 3]
        assert positions[-100:] == list(range(BUDGET - 99, BUDGET + 1))
