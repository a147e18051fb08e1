"""`entropykv eval --ray` gives the figures of one machine, also if a node of the cluster dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import started
from tests.support.eval_command import SHORT, Command, words
from tests.support.ray_cluster import ThreeNodes
from tests.support.waiting import wait_for

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.replicas

N_TEXTS = 8
TIMES = ("prompt_speed", "decode_speed", "disagreement")
"""Figures of a row that depend on time."""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Return the options of an evaluation of short texts."""
    texts = [tmp_path / f"{number}.txt" for number in range(N_TEXTS)]
    for number, text in enumerate(texts):
        text.write_text(words(number, 400), encoding="utf-8")
    what = ("--text", *texts, *SHORT, "--kv-budget", "0.5", "--kv-type", "f16")
    return [*map(str, what), "--policy", "uniform,adaptive:mass+values"]


def begin(model: Path, *options: object) -> subprocess.Popen[str]:
    return started("eval", "-m", model, "-t", "1", *options)


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in TIMES} for row in rows]


def wait_for_records(log: Path, n: int) -> None:
    """Wait until the log has at least n records after its header."""
    wait_for(lambda: log.exists() and len(log.read_bytes().splitlines()) > n)


def test_figures_are_those_of_one_machine_when_a_node_dies(
    tiny_llama: Path, options: list[str], cluster: ThreeNodes, tmp_path: Path
) -> None:
    alone = Command(tiny_llama, tmp_path).rows(*options)
    log, result = tmp_path / "log.jsonl", tmp_path / "cluster.json"
    ray = ("--ray", cluster.address, "--resume", log)
    process = begin(tiny_llama, *options, *ray, "--json", result)
    wait_for_records(log, 1)
    cluster.kill_a_node()
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert without_times(json.loads(result.read_text(encoding="utf-8"))["rows"]) == (
        without_times(alone)
    )
    # Stock and two policies measured every text exactly once.
    assert len(log.read_bytes().splitlines()) == 1 + 3 * N_TEXTS


def test_an_interrupted_evaluation_goes_on_with_what_is_missing(
    tiny_llama: Path, options: list[str], cluster: ThreeNodes, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    ray = ("--ray", cluster.address, "--resume", log)
    process = begin(tiny_llama, *options, *ray)
    wait_for_records(log, 1)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    measured = log.read_bytes()
    process = begin(tiny_llama, *options, *ray)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert log.read_bytes().startswith(measured)
    assert len(log.read_bytes().splitlines()) == 1 + 3 * N_TEXTS


def test_a_policy_that_learns_from_earlier_texts_is_refused_in_a_sentence(
    tiny_llama: Path, options: list[str]
) -> None:
    process = begin(tiny_llama, *options, "--policy", "auto", "--ray", "local")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "figures depend on their order" in errors
    assert "Traceback" not in errors


def test_a_cluster_that_does_not_answer_is_refused_in_a_sentence(
    tiny_llama: Path, options: list[str]
) -> None:
    process = begin(tiny_llama, *options, "--ray", "no address")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "--ray no address: no cluster answers" in errors
    assert "Traceback" not in errors
