"""The log of an evaluation is read back, and its records become the right rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entropykv.errors import SettingsError
from entropykv.evaluation.reading import Item
from entropykv.evaluation.results import Record, ResultLog
from entropykv.evaluation.rows import summarize

MODEL = {"name": "tiny", "header_sha256": "12"}
SETTINGS = {"prompt": 100, "recent_window": None}


def item(name: str) -> Item:
    return Item(name, f"digest of {name}", (1, 2), 2)


def log_of(path: Path, model: dict[str, Any] = MODEL, settings: dict[str, Any] = SETTINGS) -> Any:
    return ResultLog(str(path), model, settings)


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    log = log_of(path)
    log.begin()
    log.add("stock", "passkeys", item("a"), {"right": [True]})
    log.add("uniform", "passkeys", item("a"), {"right": [False]})
    return path


def test_a_log_knows_what_was_measured(log_file: Path) -> None:
    log = log_of(log_file)
    assert log.get("stock", "passkeys", item("a")).values == {"right": [True]}
    assert log.get("uniform", "passkeys", item("a")).values == {"right": [False]}
    assert log.get("uniform", "dataset", item("a")) is None
    assert log.get("uniform", "passkeys", item("b")) is None
    log.begin()
    log.add("uniform", "passkeys", item("b"), {"right": []})
    assert log_of(log_file).get("uniform", "passkeys", item("b")).values == {"right": []}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_was_cut_off_is_measured_again(log_file: Path, cut: int) -> None:
    log_file.write_bytes(log_file.read_bytes()[:-cut])
    log = log_of(log_file)
    assert log.get("stock", "passkeys", item("a")) is not None
    assert log.get("uniform", "passkeys", item("a")) is None
    log.begin()
    log.add("uniform", "passkeys", item("a"), {"right": [True]})
    assert log_of(log_file).get("uniform", "passkeys", item("a")).values == {"right": [True]}


def test_a_log_that_ends_in_its_first_line_begins_again(log_file: Path) -> None:
    log_file.write_bytes(log_file.read_bytes()[:30])
    log = log_of(log_file)
    log.begin()
    assert len(log_file.read_bytes().splitlines()) == 1
    assert log_of(log_file).get("stock", "passkeys", item("a")) is None


def test_logs_of_something_else_are_refused(log_file: Path, tmp_path: Path) -> None:
    before = log_file.read_bytes()
    with pytest.raises(SettingsError, match="another model"):
        log_of(log_file, model=MODEL | {"header_sha256": "34"})
    with pytest.raises(SettingsError, match="prompt was 100, now it is 200"):
        log_of(log_file, settings=SETTINGS | {"prompt": 200})
    assert log_file.read_bytes() == before
    for content in ("a letter\n", "a letter", '{"format": "other"}\n', "[1]\n"):
        other = tmp_path / "other.txt"
        other.write_text(content, encoding="utf-8")
        with pytest.raises(SettingsError, match="not a log of"):
            log_of(other)
        assert other.read_text(encoding="utf-8") == content
    for line in (b"nonsense\n", b'{"contestant": "stock"}\n', b'{"values": 1}\n'):
        log_file.write_bytes(before + line)
        with pytest.raises(SettingsError, match="line 4 is damaged"):
            log_of(log_file)
    with pytest.raises(SettingsError, match="Is a directory"):
        log_of(tmp_path)


def record(part: str, **values: Any) -> Record:
    return Record("uniform", part, "a", "a", values)


def test_rows_are_means_over_items_but_the_worst_divergence() -> None:
    text = {"entries_full": 100, "kv_bytes_budget": 50, "kv_bytes_full": 200, "prompt_tokens": 10}
    row = summarize(
        "uniform",
        "f16",
        "0.2",
        [
            record(
                "continuations",
                kl=0.1,
                entries_kept=20,
                prompt_seconds=1.0,
                greedy_equal=1.0,
                **text,
            ),
            record(
                "continuations",
                kl=0.3,
                entries_kept=40,
                prompt_seconds=4.0,
                greedy_equal=0.5,
                **text,
            ),
            record("passkeys", right=[True, False]),
            record("passkeys", right=[True, True]),
            record("dataset", rouge1=0.5, rouge2=0.25, rougeL=0.125),
        ],
    )
    assert row.kl == pytest.approx(0.2)
    assert row.kl_worst == 0.3
    assert row.kept == pytest.approx(0.3)
    assert row.prompt_speed == 4.0
    assert row.greedy_equal == 0.75
    assert row.greedy_identical == 1
    assert row.recall == 0.75
    assert (row.rouge1, row.rouge2, row.rouge_l) == (0.5, 0.25, 0.125)
    assert (row.texts, row.questions, row.answers) == (2, 4, 1)
    nothing = summarize("uniform", "f16", "0.2", [])
    assert nothing.kl is None
    assert nothing.recall is None
