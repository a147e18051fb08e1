"""Figures have whole-number ticks for counts, and lines that can be told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv.cli import plots
from entropykv.evaluation.bench import BenchRow
from entropykv.evaluation.rows import EvalRow
from entropykv.profile.profile import EntropyProfile

POLICIES = [f"policy {number}" for number in range(13)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that collects figures instead of writing files."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, _: figures.append(figure))
    return figures


def rows(field: str) -> list[EvalRow]:
    made = [EvalRow("stock", "f16", "full", kv_bytes=2e7, length=1024, question="known")]
    made[0] = EvalRow(**{**vars(made[0]), "score": 0.8})
    for number, policy in enumerate(POLICIES):
        for kv_type in ("f16", "q8_0"):
            for budget in (0.5, 0.2):
                values: dict[str, Any] = {field: budget + number / 100}
                row = EvalRow(policy, kv_type, str(budget), kv_bytes=budget * 2e7, **values)
                made.append(EvalRow(**{**vars(row), "length": 1024, "question": "known"}))
    return made


def style(line: Any) -> tuple[Any, ...]:
    return line.get_color(), line.get_marker(), line.get_linestyle(), line.get_fillstyle()


@pytest.mark.parametrize("field", ["kl", "score"])
def test_policies_and_types_are_told_apart(drawn: list[Any], tmp_path: Path, field: str) -> None:
    draw = plots.draw_eval if field == "kl" else plots.draw_suite
    draw(rows(field), tmp_path / "plot.svg")
    (axes,) = drawn[0].axes
    lines = {
        line.get_label(): style(line) for line in axes.lines if line.get_label() != "full cache"
    }
    assert list(lines) == [f"{policy}, {kind}" for policy in POLICIES for kind in ("f16", "q8_0")]
    assert len(set(lines.values())) == len(lines)
    for policy in POLICIES:
        f16, q8_0 = lines[f"{policy}, f16"], lines[f"{policy}, q8_0"]
        assert f16[:2] == q8_0[:2]  # Colour and marker belong to the policy.
        assert f16[2] != q8_0[2]
    assert len({line[1] for line in lines.values()}) > 10
    full = [line for line in axes.lines if line.get_label() == "full cache"]
    assert [list(line.get_ydata()) for line in full] == ([] if field == "kl" else [[0.8, 0.8]])


def test_a_policy_has_one_colour_in_all_panels(drawn: list[Any], tmp_path: Path) -> None:
    """Also where the first policies were not measured in one of them."""
    measured = [
        EvalRow(**{**vars(row), "recall": None if row.policy in ("stock", *POLICIES[:3]) else 0.5})
        for row in rows("kl")
    ]
    plots.draw_eval(measured, tmp_path / "plot.svg")
    distance, recall = (
        {line.get_label(): style(line) for line in axes.lines} for axes in drawn[0].axes
    )
    assert 0 < len(recall) < len(distance)
    assert recall.items() <= distance.items()


def test_every_table_of_a_suite_has_a_panel(drawn: list[Any], tmp_path: Path) -> None:
    tables = [
        EvalRow(**{**vars(row), "length": length, "question": question})
        for row in rows("score")
        for length in (1024, 2048)
        for question in ("unknown", "known")
    ]
    plots.draw_suite(tables, tmp_path / "plot.svg")
    titles = {axes.get_title() for axes in drawn[0].axes}
    assert len(titles) == len(drawn[0].axes) == 4
    assert "2,048 tokens, question known" in titles


def test_lines_of_bench_have_markers_of_their_own(drawn: list[Any], tmp_path: Path) -> None:
    names = ["stock", "f16 1", "f16 0.2", "q8_0 1", "q8_0 0.2"]
    bench = [
        BenchRow(**{**dict.fromkeys(BenchRow.__dataclass_fields__, 1.0), "name": name, "length": n})
        for name in names
        for n in (256, 257)
    ]
    plots.draw_bench(bench, tmp_path / "plot.svg")
    for axes in drawn[0].axes:
        assert len({line.get_marker() for line in axes.lines}) == len(names)
        assert whole(axes.get_xticks())


def whole(ticks: Any) -> bool:
    return bool(np.allclose(ticks, np.round(ticks)))


@pytest.mark.parametrize("n_layer", [1, 3])
def test_heads_and_layers_are_counted_in_whole_numbers(
    drawn: list[Any], tmp_path: Path, n_layer: int
) -> None:
    entropies = np.linspace(0.5, 6.0, n_layer * 2).reshape(n_layer, 2)
    plots.draw(EntropyProfile(n_layer, 2, 1, 512, entropies), tmp_path / "plot.svg")
    counted = 0
    for axes in drawn[0].axes:
        for label, ticks in (
            (axes.get_xlabel(), axes.get_xticks()),
            (axes.get_ylabel(), axes.get_yticks()),
        ):
            if label in ("layer", "query head", "KV head", "query heads"):
                counted += 1
                assert whole(ticks), label
    assert counted >= 6
