"""`entropykv bench` measures what it claims to measure; the speed itself is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from entropykv import Session, _core
from entropykv.cli.bench import attention_bandwidth
from entropykv.evaluation.bench import BenchRow, BenchSettings, bench, read_bandwidth
from entropykv.model.geometry import read_geometry
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
    assert steps[0] == (1, 22)
    assert steps[-1] == (22, 22)


def test_weights_and_attention_are_told_apart(tiny_llama: Path) -> None:
    settings = BenchSettings(
        lengths=[512], budgets=[1.0, 0.25], kv_types=["f16"], n_threads=1, rounds=1
    )
    stock, no_flash, full, small = bench(tiny_llama, settings)
    assert no_flash.works == ()
    geometry = read_geometry(tiny_llama)
    for row in (stock, full, small):
        by_name = {(work.phase, work.work): work for work in row.works}
        assert {name for name, _ in by_name} == {"prompt", "decode"}
        for phase in ("prompt", "decode"):
            parts = [work for work in row.works if work.phase == phase]
            assert sum(work.share for work in parts) == pytest.approx(1)
        # Each of 16 steps uses every weight; the embedding does not count if the output head is
        # another matrix.
        weights = by_name["decode", "weights"]
        read = weights.bytes_per_second * weights.seconds / 16
        assert 0.3 * geometry.weights_bytes < read < 1.01 * geometry.weights_bytes
        assert by_name["prompt", "weights"].operations_per_second > 0
        assert by_name["decode", "attention"].bytes_per_second > 0
    attention = {
        row.name: next(w for w in row.works if (w.phase, w.work) == ("prompt", "attention"))
        for row in (stock, full, small)
    }
    for row in (stock, full):
        done = attention[row.name].operations_per_second * attention[row.name].seconds
        values = geometry.n_layer * geometry.n_head * 2 * geometry.head_dim_k
        assert done == pytest.approx(2 * values * 512 * 513 / 2)
    assert attention[small.name].operations_per_second == 0
    assert all(work.ratio == 1.0 for work in stock.works)


def test_timing_changes_no_logits(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=64, n_threads=2) as session:
        tokens = list(range(5, 45))
        logits = session.decode(tokens, all_logits=True)
        session.reset()
        session.hook.measure_work(True)
        assert np.array_equal(session.decode(tokens, all_logits=True), logits)
        assert session.hook.work["weights"][0] > 0
        session.hook.measure_work(False)
        assert set(map(tuple, session.hook.work.values())) == {(0.0, 0.0, 0.0)}


def test_the_command_prints_a_table_and_writes_json(tiny_llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    result = entropykv(
        *("bench", "-m", tiny_llama, "--lengths", "64", "--rounds", "1", "-n", "16"),
        *("--budgets", "1.0,0.5", "--json", target),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("tok/s |") == 2
    assert result.stdout.count("| stock |") == 1 + 6  # Both phases have three kinds of work.
    content = json.loads(target.read_text(encoding="utf-8"))
    assert len(content["rows"]) == 6
    assert content["read_bandwidth"] > 1e8


def test_drafts_are_measured_with_the_same_texts(pool_llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "drafts.json"
    result = entropykv(
        *("bench", "-m", pool_llama, "--spec", "--lengths", "64", "--rounds", "1", "-n", "24"),
        *("-md", pool_llama, "--draft-kv-budget", "1.0", "--json", target),
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(target.read_text(encoding="utf-8"))["rows"]
    assert [row["task"] for row in rows] == ["copy", "quote", "table", "prose"]
    assert all(row["same"] and row["ratio"] > 0 for row in rows)
    assert "not the same" not in result.stdout
    assert_refused(entropykv("bench", "-m", pool_llama, "--spec", "--spec-type", "none"), "none")
    assert_refused(entropykv("bench", "-m", pool_llama, "-md", pool_llama), "--spec")


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
