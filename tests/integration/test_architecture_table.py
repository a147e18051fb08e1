"""The table of `entropykv models --architectures` agrees with the code."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from entropykv import Session, UnsupportedModelError
from entropykv._build_info import LLAMA_CPP_PYTHON_VERSION
from entropykv.cli.models import format_architectures
from entropykv.model.architectures import (
    ArchitectureCheck,
    ArchitectureTable,
    checked_architectures,
)
from tests.architectures import MODELS, Architecture, write_architecture
from tests.architectures.checks import GREEDY_TOKENS, Served, check
from tests.architectures.table import JSON, main, merged
from tests.support.command import assert_refused, entropykv

TABLE = checked_architectures()
ROW_OF = {name: row for row in TABLE.rows for name in row.models}
FAILED = {name for row in TABLE.rows if row.failures for name in row.models}


def test_it_names_the_models_of_the_tests_and_no_others() -> None:
    counts = Counter((row.architecture, name) for row in TABLE.rows for name in row.models)
    assert counts == Counter((model.architecture, model.name) for model in MODELS.values())


def test_it_was_written_for_this_llama_cpp() -> None:
    assert TABLE.llama_cpp_python == LLAMA_CPP_PYTHON_VERSION
    assert TABLE.greedy_tokens == GREEDY_TOKENS


def test_no_check_failed() -> None:
    assert [failure for row in TABLE.rows for failure in row.failures] == []


def test_every_figure_is_inside_its_limit() -> None:
    for row in TABLE.rows:
        for served in filter(None, (row.headwise, row.flat)):
            assert 0 <= served.one_by_one < row.limit
            assert 0 <= served.micro_batches < row.limit
            assert 0.9 * GREEDY_TOKENS < served.greedy_equal <= GREEDY_TOKENS


@pytest.mark.parametrize(
    "model",
    [model for model in MODELS.values() if model.name not in FAILED],
    ids=lambda model: model.name,
)
def test_auto_takes_the_store_that_the_table_says(model: Architecture, tmp_path: Path) -> None:
    path = tmp_path / f"{model.name}.gguf"
    write_architecture(path, model)
    row = ROW_OF[model.name]
    try:
        with Session(path, n_ctx=256, kv_type="f16", n_threads=1) as session:
            store, why = session.stats().store, session.config.fallback
    except UnsupportedModelError as refusal:
        store, why = "none", str(refusal)
    assert store == row.store
    if store == "headwise":
        assert why is None
    else:
        assert why is not None
        assert why.removeprefix(f"{model.name}: ") in row.notes


def test_the_command_prints_all_and_the_notes() -> None:
    result = entropykv("models", "--architectures")
    assert result.returncode == 0, result.stderr
    assert result.stdout == format_architectures(TABLE) + "\n"
    for row in TABLE.rows:
        assert f"| {row.architecture} " in result.stdout
        assert all(f". {note}\n" in result.stdout for note in row.notes)


def test_the_command_prints_those_that_are_named() -> None:
    result = entropykv("models", "--architectures", "llama", "mamba", "--json")
    rows = json.loads(result.stdout)
    assert {row["architecture"] for row in rows} == {"llama", "mamba"}
    assert ArchitectureTable.from_json(TABLE.to_json()) == TABLE
    text = entropykv("models", "--architectures", "mamba").stdout
    assert "| mamba " in text
    assert "| llama " not in text
    assert "\n1. the headwise store cannot serve this model" in text
    assert_refused(entropykv("models", "--architectures", "llama", "lama"), "'lama'", "lists")


def found(name: str, architecture: str, error: float, note: str = "") -> ArchitectureCheck:
    figures = Served(error, 2 * error, greedy_equal=int(64 - 1e4 * error), half_budget=error < 2e-4)
    notes = (note,) if note else ()
    return ArchitectureCheck(architecture, "flat", (name,), 2e-3, None, figures, notes)


def test_models_of_one_architecture_share_a_row_where_they_are_served_alike() -> None:
    rows = merged(
        [
            found("b", "x", 1e-4),
            found("d", "x", 1e-4, "a window"),
            found("a", "x", 2e-4),
            found("c", "w", 3e-4),
        ]
    )
    assert [row.models for row in rows] == [("c",), ("b", "a"), ("d",)]
    assert rows[1].flat == Served(2e-4, 4e-4, greedy_equal=62, half_budget=False)
    assert rows[1].headwise is None
    text = format_architectures(ArchitectureTable("0", 64, rows))
    names = [line.split("|")[1].strip() for line in text.splitlines() if " | flat " in line]
    assert names == ["w", "x (b, a)", "x (d)"]


def check_or_end(model: Architecture) -> ArchitectureCheck:
    """Check a model, except two: end the process for one, raise an error for the other.

    A worker process finds this function by its name.
    """
    if model.name == "mamba":
        os._exit(3)
    if model.name == "bloom":
        raise ValueError("no such bloom")
    return check(model)


def test_writing_it_goes_on_after_a_failure_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [model for model in MODELS.values() if model.name in ("bloom", "mamba", "xverse")]
    assert main(models, check_or_end, tmp_path) == 1
    errors = capsys.readouterr().err
    assert "mamba: the process ended" in errors
    assert "bloom: ValueError: no such bloom" in errors
    table = ArchitectureTable.from_json((tmp_path / JSON).read_text(encoding="utf-8"))
    rows = {row.architecture: row for row in table.rows}
    assert (rows["xverse"].store, rows["xverse"].failures) == ("headwise", ())
    assert rows["mamba"].failures == ("mamba: the process ended",)
    assert "mamba: the process ended" in format_architectures(table)


@pytest.mark.parametrize("change", [1.0, 1.1])
def test_a_store_that_differs_fails_its_check(
    change: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Session.decode
    monkeypatch.setattr(
        Session, "decode", lambda self, *args, **kw: decode(self, *args, **kw) * np.float32(change)
    )
    row = check(MODELS["xverse"])
    if change == 1.0:
        assert (row.store, row.failures) == ("headwise", ())
    else:
        assert row.store == "none"
        assert "xverse, headwise store" in row.failures[0]
        assert "xverse, flat store" in row.failures[1]
