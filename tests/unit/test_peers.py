"""benchmarks/peers: results that survive an interruption, the table, equal bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers.ours import (
    EQUAL_BYTES,
    STOCK,
    Ours,
    Run,
    StockReference,
    bytes_per_token,
    entries_in,
    equality,
)
from benchmarks.peers.protocol import AGREEMENT, GREEDY, SPEED, Method, Passage, Result, passage_of
from benchmarks.peers.results import ResultFile, summarise, table
from entropykv import Session
from tests.support.tiny_models import write_llama

SNAPKV = Method(AGREEMENT, "kvpress", "SnapKV", "f16", 0.2)
UNIFORM = Method(AGREEMENT, "entropykv", "uniform", "f16", 0.2)


def result(method: Method, text: str, kl: float, protocol: str = "p") -> Result:
    figures = {"kl": kl, "top1": 0.9, "perplexity_ratio": 1.0, "kept": 0.2, "bytes": 0.2}
    return Result(method, text, protocol, figures)


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    ResultFile(path).add(result(SNAPKV, "a", 0.1))
    again = ResultFile(path)
    assert again.results == [result(SNAPKV, "a", 0.1)]
    assert again.pending([SNAPKV, UNIFORM], "a", "p") == [UNIFORM]
    assert again.pending([SNAPKV, UNIFORM], "b", "p") == [SNAPKV, UNIFORM]
    assert again.pending([SNAPKV], "a", "another protocol") == [SNAPKV]
    assert again.pending([replace(SNAPKV, keep=0.1)], "a", "p")


@pytest.mark.parametrize("kept", [1, -1, -20])
def test_a_line_that_was_cut_short_is_measured_again(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "results.jsonl"
    first, second = result(SNAPKV, "a", 0.1), result(UNIFORM, "a", 0.2)
    ResultFile(path).add(first)
    path.write_text(path.read_text() + json.dumps(second.as_json())[:kept])
    file = ResultFile(path)
    assert file.results == [first]
    file.add(second)
    assert ResultFile(path).results == [first, second]


def test_rows_are_means_over_the_texts_of_this_run() -> None:
    results = [
        result(SNAPKV, "a", 0.1),
        result(SNAPKV, "b", 0.3),
        result(UNIFORM, "a", 0.05),
        result(replace(UNIFORM, keep=0.1), "a", 0.01),
        result(UNIFORM, "left out", 9.0),
        result(UNIFORM, "a", 9.0, protocol="another"),
    ]
    rows = summarise(results, ["a", "b"], "p")
    assert [(r["framework"], r["keep"]) for r in rows] == [
        ("entropykv", 0.2),
        ("kvpress", 0.2),
        ("entropykv", 0.1),
    ]
    assert rows[1]["kl"] == pytest.approx(0.2)
    assert rows[1]["kl_worst"] == 0.3
    assert [r["texts"] for r in rows] == [1, 2, 1]


def test_the_table_has_a_line_for_every_row_of_its_measure() -> None:
    greedy = Result(
        replace(UNIFORM, measure=GREEDY),
        "a",
        "p",
        {"equal": 0.5, "first_difference": 3.0, "kept": 0.2, "bytes": 0.11},
    )
    rows = summarise([result(SNAPKV, "a", 0.125), greedy], ["a"], "p")
    lines = table(rows, AGREEMENT).splitlines()
    assert len(lines) == 3
    assert len({line.count("|") for line in lines}) == 1
    assert "SnapKV" in lines[2]
    assert "0.1250" in lines[2]
    assert "11.0%" in table(rows, GREEDY).splitlines()[2]
    assert table(rows[:0], GREEDY) == ""


@pytest.mark.parametrize(
    ("tokens", "equal", "first"), [([1, 2, 3], 1.0, 3), ([1, 9, 3], 2 / 3, 1), ([9, 9, 9], 0, 0)]
)
def test_equality_counts_tokens(tokens: list[int], equal: float, first: int) -> None:
    figures = equality([1, 2, 3], tokens)
    assert figures == {"equal": pytest.approx(equal), "first_difference": first}


def test_a_passage_is_cut_where_the_prompt_ends() -> None:
    passage = passage_of("text", range(10), 6, 3)
    assert passage.prompt == (0, 1, 2, 3, 4, 5)
    assert passage.continuation == (6, 7, 8)
    with pytest.raises(ValueError, match="10 tokens are fewer"):
        passage_of("text", range(10), 6, 5)


@pytest.mark.parametrize("n_bytes", [100_000, 150_000, 200_000])
def test_equal_bytes_are_never_more_and_a_page_at_most_less(tiny_llama: Path, n_bytes: int) -> None:
    with Session(tiny_llama, n_ctx=512, kv_type="q8_0", store="headwise", n_threads=1) as session:
        entries = entries_in(session, n_bytes)
        session.resize(entries)
        assert session.stats().kv_bytes_budget <= n_bytes
        session.resize(entries + 1)
        assert session.stats().kv_bytes_budget > n_bytes


def test_bytes_per_token_are_those_of_f16(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=64, kv_type="q8_0", n_threads=1) as session:
        assert bytes_per_token(session, 5) == 3 * 2 * 2 * 32 * 2  # layers, heads, K and V, values
        assert session.position == 0


def test_our_rows_are_against_stock_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, n_head_kv=2, head_dim=32)
    run = Run(str(path), n_ctx=144, n_threads=1, entropy_config=None)
    ours = Ours(run, StockReference(run), ["uniform"], ["f16", "q8_0"], [1.0, 0.5], 4)
    names = {(m.name, m.kv_type) for m in ours.methods}
    assert names == {
        ("uniform", "f16"),
        ("uniform", "q8_0"),
        ("uniform" + EQUAL_BYTES, "q8_0"),
        (STOCK, "f16"),
    }
    passage = Passage("text", tuple(range(5, 133)), tuple(range(40, 56)))
    figures = dict(ours.measure(passage, ours.methods))
    assert len(figures) == len(ours.methods) == 19
    full = figures[Method(AGREEMENT, "entropykv", "uniform", "f16", 1.0)]
    less = figures[Method(AGREEMENT, "entropykv", "uniform", "f16", 0.5)]
    assert full["kl"] < 1e-3 < less["kl"]
    assert (full["kept"], less["kept"]) == (1.0, 0.5)
    q8 = figures[Method(AGREEMENT, "entropykv", "uniform", "q8_0", 0.5)]
    more = figures[Method(AGREEMENT, "entropykv", "uniform" + EQUAL_BYTES, "q8_0", 0.5)]
    assert q8["kept"] == less["kept"] < more["kept"]
    assert q8["bytes"] < more["bytes"] <= 0.5
    greedy = figures[Method(GREEDY, "entropykv", "uniform", "f16", 1.0)]
    assert (greedy["equal"], greedy["first_difference"]) == (1.0, 4.0)
    speeds = [figures[method] for method in ours.methods if method.measure == SPEED]
    assert len(speeds) == 1 + 6
    assert all(min(each["prompt_speed"], each["decode_speed"]) > 0 for each in speeds)


def test_a_missing_framework_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.PEERS, "kvpress", "no_such_module")
    assert command.installed(["entropykv", "kvpress"]) == ["entropykv"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["kvpress is not installed: pip install '.[peers]'"]
