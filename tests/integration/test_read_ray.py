"""`entropykv read --each` gives the documents of one machine, also if a node of a cluster dies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.command import assert_refused, entropykv, started
from tests.support.eval_command import words
from tests.support.ray_cluster import ThreeNodes
from tests.support.waiting import wait_for

N_TEXTS = 8
SETTINGS = ("-c", 8192, "--kv-budget", 96, "-t", 1, "--policy", "uniform")


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"{number}.txt" for number in range(N_TEXTS)]
    for number, file in enumerate(files):
        file.write_text(words(number, 1500), encoding="utf-8")
    return files


def begin(model: Path, texts: Sequence[Path], *options: object) -> subprocess.Popen[str]:
    return started("read", *texts, "-m", model, *SETTINGS, *options)


def documents_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_each_file_becomes_the_document_that_it_would_be_alone(
    tiny_llama: Path, texts: list[Path], tmp_path: Path
) -> None:
    result = entropykv("read", *texts[:2], "-m", tiny_llama, *SETTINGS, "--each")
    assert result.returncode == 0, result.stderr
    for text in texts[:2]:
        alone = tmp_path / "alone"
        entropykv("read", text, "-m", tiny_llama, *SETTINGS, "-o", alone)
        assert text.with_suffix(".kv").read_bytes() == alone.read_bytes()


def test_complete_documents_are_not_read_again_and_others_are(
    tiny_llama: Path, texts: list[Path], tmp_path: Path
) -> None:
    command = ("read", *texts[:2], "-m", tiny_llama, *SETTINGS, "--out", tmp_path / "new")
    entropykv(*command)
    before = documents_in(tmp_path / "new")
    texts[1].write_text("something else. " * 50, encoding="utf-8")
    lines = entropykv(*command).stdout.splitlines()
    assert "has been read before" in lines[0]
    assert "read in" in lines[1]
    after = documents_in(tmp_path / "new")
    assert after["0.kv"] == before["0.kv"]
    assert after["1.kv"] != before["1.kv"]


def test_options_that_do_not_go_together_are_refused(
    tiny_llama: Path, texts: list[Path], tmp_path: Path
) -> None:
    command = ("read", *texts[:2], "-m", tiny_llama, *SETTINGS)
    assert_refused(entropykv(*command, "--each", "-o", tmp_path / "x"), "-o is of one document")
    refused = entropykv(*command, "--ray", "local", "--learn")
    assert_refused(refused, "--learn on would let a document depend on those")
    twin = tmp_path / "twin" / "0.txt"
    twin.parent.mkdir()
    twin.write_text("a text")
    twins = ("read", texts[0], twin, "-m", tiny_llama, "--out", tmp_path)
    assert_refused(entropykv(*twins), "would both become")
    assert_refused(entropykv("read", "-", "-m", tiny_llama, "--each"), "standard input")


@pytest.mark.replicas
def test_a_node_that_dies_loses_no_document(
    tiny_llama: Path, texts: list[Path], cluster: ThreeNodes, tmp_path: Path
) -> None:
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    begin(tiny_llama, texts, "--out", alone).communicate(timeout=240)
    process = begin(tiny_llama, texts, "--out", spread, "--ray", cluster.address)
    wait_for(lambda: any(spread.glob("*.kv")))
    cluster.kill_a_node()
    printed, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert len(printed.splitlines()) == N_TEXTS
    assert documents_in(spread) == documents_in(alone)


@pytest.mark.replicas
def test_ctrl_c_stops_the_cluster_s_tasks_and_the_same_command_continues(
    tiny_llama: Path, texts: list[Path], cluster: ThreeNodes, tmp_path: Path
) -> None:
    texts = texts[:4]
    spread = tmp_path / "spread"
    options = ("--out", spread, "--ray", cluster.address)
    process = begin(tiny_llama, texts, *options)
    wait_for(lambda: any(spread.glob("*.kv")))
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted after" in errors
    assert "Traceback" not in errors
    process = begin(tiny_llama, texts, *options)
    printed, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert "has been read before" in printed
    assert {file.name for file in spread.iterdir()} == {f"{n}.kv" for n in range(4)}
