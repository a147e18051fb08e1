"""Figures have whole numbers as ticks of counts, and lines that can be told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entropykv.evaluation.bench import BenchRow
from entropykv.evaluation.rows import EvalRow
from entropykv.profile.profile import EntropyProfile
from entropykv.report.figures import bench_figure, eval_figure, profile_figure, suite_figure

POLICIES = [f"policy {number}" for number in range(13)]


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
def test_policies_and_types_are_told_apart(field: str) -> None:
    figure = (eval_figure if field == "kl" else suite_figure)({"": rows(field)})
    (axes,) = figure.axes
    lines = {
        line.get_label(): style(line) for line in axes.lines if line.get_label() != "full cache"
    }
    assert list(lines) == [f"{policy}, {kind}" for policy in POLICIES for kind in ("f16", "q8_0")]
    assert len(set(lines.values())) == len(lines)
    for policy in POLICIES:
        f16, q8_0 = lines[f"{policy}, f16"], lines[f"{policy}, q8_0"]
        assert f16[:2] == q8_0[:2]  # Colour and marker depend only on the policy.
        assert f16[2] != q8_0[2]
    assert len({line[1] for line in lines.values()}) > 10
    full = [line for line in axes.lines if line.get_label() == "full cache"]
    assert [list(line.get_ydata()) for line in full] == ([] if field == "kl" else [[0.8, 0.8]])


def test_a_policy_has_one_colour_in_all_panels() -> None:
    measured = [
        EvalRow(**{**vars(row), "recall": None if row.policy in ("stock", *POLICIES[:3]) else 0.5})
        for row in rows("kl")
    ]
    figure = eval_figure({"": measured})
    distance, recall = (
        {line.get_label(): style(line) for line in axes.lines} for axes in figure.axes
    )
    assert 0 < len(recall) < len(distance)
    assert recall.items() <= distance.items()


def test_every_table_of_a_suite_has_a_panel() -> None:
    tables = [
        EvalRow(**{**vars(row), "length": length, "question": question})
        for row in rows("score")
        for length in (1024, 2048)
        for question in ("unknown", "known")
    ]
    figure = suite_figure({"": tables})
    titles = {axes.get_title() for axes in figure.axes}
    assert len(titles) == len(figure.axes) == 4
    assert "2,048 tokens, question known" in titles


def test_lines_of_bench_have_markers_of_their_own() -> None:
    names = ["stock", "f16 1", "f16 0.2", "q8_0 1", "q8_0 0.2"]
    bench = [
        BenchRow(**{**dict.fromkeys(BenchRow.__dataclass_fields__, 1.0), "name": name, "length": n})
        for name in names
        for n in (256, 257)
    ]
    figure = bench_figure({"": bench})
    for axes in figure.axes:
        assert len({line.get_marker() for line in axes.lines}) == len(names)
        assert whole(axes.get_xticks())


def whole(ticks: Any) -> bool:
    return bool(np.allclose(ticks, np.round(ticks)))


@pytest.mark.parametrize("n_layer", [1, 3])
def test_heads_and_layers_are_counted_in_whole_numbers(n_layer: int) -> None:
    entropies = np.linspace(0.5, 6.0, n_layer * 2).reshape(n_layer, 2)
    figure = profile_figure(EntropyProfile(n_layer, 2, 1, 512, entropies))
    counted = 0
    for axes in figure.axes:
        for label, ticks in (
            (axes.get_xlabel(), axes.get_xticks()),
            (axes.get_ylabel(), axes.get_yticks()),
        ):
            if label in ("layer", "query head", "KV head", "query heads"):
                counted += 1
                assert whole(ticks), label
    assert counted >= 6
