"""A calibration that was interrupted, or runs on a cluster, writes the profile of a plain one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.command import assert_refused, entropykv, started
from tests.support.eval_command import words
from tests.support.ray_cluster import ThreeNodes
from tests.support.waiting import wait_for

SETTINGS = ("--n-sequences", 4, "--max-length", 64, "--curve-texts", 3, "--curve-length", 256)


@pytest.fixture
def options(tiny_llama: Path, tmp_path: Path) -> list[str]:
    texts = [tmp_path / f"{number}.txt" for number in range(4)]
    for number, text in enumerate(texts):
        text.write_text(words(number, 600), encoding="utf-8")
    return [*map(str, ("-m", tiny_llama, "-t", 1, *SETTINGS, "--text", *texts))]


def test_an_interrupted_calibration_continues_and_writes_the_same_bytes(
    options: list[str], tmp_path: Path
) -> None:
    whole, continued, kept = tmp_path / "whole.json", tmp_path / "continued.json", tmp_path / "kept"
    assert entropykv("calibrate", *options, "-o", whole).returncode == 0
    process = started("calibrate", *options, "-o", continued, "--resume", kept)
    wait_for(lambda: len(list(kept.glob("*.npz"))) >= 2)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "continues from" in errors
    assert "Traceback" not in errors
    assert not continued.exists()
    measured = {file: file.stat().st_mtime_ns for file in kept.glob("*.npz")}
    next(iter(measured)).write_bytes(b"damaged")
    result = entropykv("calibrate", *options, "-o", continued, "--resume", kept)
    assert result.returncode == 0, result.stderr
    assert continued.read_bytes() == whole.read_bytes()
    same = [file for file, time_ns in measured.items() if file.stat().st_mtime_ns == time_ns]
    assert len(same) == len(measured) - 1


def test_options_of_a_model_are_refused_without_one(tmp_path: Path) -> None:
    command = ("calibrate", "--from-results", tmp_path / "x.json", "-o", tmp_path / "y.json")
    assert_refused(entropykv(*command, "--resume", tmp_path), "--ray and --resume", "give -m")


@pytest.mark.replicas
def test_a_cluster_writes_the_same_bytes_when_a_node_dies(
    options: list[str], cluster: ThreeNodes, tmp_path: Path
) -> None:
    alone, spread, kept = tmp_path / "alone.json", tmp_path / "spread.json", tmp_path / "kept"
    assert entropykv("calibrate", *options, "-o", alone).returncode == 0
    process = started(
        "calibrate", *options, "-o", spread, "--ray", cluster.address, "--resume", kept
    )
    wait_for(lambda: any(kept.glob("*.npz")))
    cluster.kill_a_node()
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert spread.read_bytes() == alone.read_bytes()
