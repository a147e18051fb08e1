"""`entropykv bench`: that it measures what it says, not how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entropykv import _core
from entropykv.cli.bench import attention_bandwidth
from entropykv.evaluation.bench import BenchRow, BenchSettings, bench, read_bandwidth
from tests.support.command import assert_refused, entropykv


def row(name: str, kv_bytes: int, decode_speed: float) -> BenchRow:
    return BenchRow(1024, name, 1.0, 1.0, decode_speed, 1.0, kv_bytes)


def test_every_budget_is_measured_beside_stock(tiny_llama: Path) -> None:
    settings = BenchSettings(
        lengths=[96, 160], budgets=[1.0, 0.25], kv_types=["q8_0"], n_threads=2, rounds=2
    )
    steps: list[tuple[int, int]] = []
    rows = list(bench(tiny_llama, settings, lambda done, total: steps.append((done, total))))
    assert [r.length for r in rows] == [96] * 4 + [160] * 4
    assert [r.name for r in rows[:4]] == [
        "stock",
        "stock, no flash attention",
        "q8_0 1",
        "q8_0 0.25",
    ]
    assert rows[0].prompt_ratio == rows[0].decode_ratio == 1.0
    for measured in rows:
        assert measured.decode_speed > 0
        assert measured.decode_ratio > 0
    assert rows[2].kv_bytes > 2 * rows[3].kv_bytes > 0
    assert rows[3].eviction_share > rows[2].eviction_share == 0.0
    assert steps[0] == (1, 16)
    assert steps[-1] == (16, 16)


def test_the_command_prints_a_table_and_writes_json(tiny_llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    result = entropykv(
        *("bench", "-m", tiny_llama, "--lengths", "64", "--rounds", "1", "-n", "16"),
        *("--budgets", "1.0,0.5", "--json", target),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("| 64 |") == 6
    content = json.loads(target.read_text(encoding="utf-8"))
    assert len(content["rows"]) == 6
    assert content["read_bandwidth"] > 1e8


def test_attention_bandwidth_is_the_slope_between_budgets() -> None:
    rows = [
        row("stock", 0, 50.0),
        row("f16 1", 3_000_000, 1 / 0.020),
        row("f16 0.5", 2_000_000, 1 / 0.015),
        row("f16 0.2", 1_000_000, 1 / 0.010),
    ]
    assert attention_bandwidth(rows) == {(1024, "f16"): pytest.approx(2_000_000 / 0.010)}
    assert attention_bandwidth(rows[:2]) == {}


def test_read_bandwidth_is_that_of_memory() -> None:
    assert 1e8 < read_bandwidth(1) < 1e13
    with pytest.raises(ValueError, match="bytes and threads"):
        _core.read_bandwidth(1 << 20, 0)


def test_bad_input_is_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    assert_refused(entropykv("bench", "-m", "no-such.gguf"), "no-such.gguf")
    assert_refused(entropykv("bench", "-m", tiny_llama, "--json", tmp_path), str(tmp_path))
    assert_refused(entropykv("bench", "-m", tiny_llama, "--kv-types", "q5_0"), "q5_0")
    for arguments in (("--budgets", "0"), ("--budgets", "1.5"), ("--lengths", "8")):
        result = entropykv("bench", "-m", tiny_llama, *arguments)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
