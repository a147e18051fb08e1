"""benchmarks/peers keeps results when interrupted, prints the right table, compares equal bytes."""

from __future__ import annotations

import json
from contextlib import closing
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
from benchmarks.peers.protocol import (
    AGREEMENT,
    FACTS,
    GREEDY,
    RULER,
    SPEED,
    Method,
    Passage,
    Question,
    Result,
    passage_of,
)
from benchmarks.peers.results import ResultFile, summarise, table
from entropykv import Session
from entropykv.llamacpp.model import Model
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


def test_the_fastest_row_is_the_first() -> None:
    methods = [replace(UNIFORM, measure=SPEED, name=name) for name in ("slow", "fast")]
    speeds = zip(methods, (10.0, 20.0), strict=True)
    results = [Result(method, "a", "p", {"prompt_speed": n}) for method, n in speeds]
    assert [row["name"] for row in summarise(results, ["a"], "p")] == ["fast", "slow"]


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
        session.cache.resize(entries)
        assert session.stats().kv_bytes_budget <= n_bytes
        session.cache.resize(entries + 1)
        assert session.stats().kv_bytes_budget > n_bytes


def test_bytes_per_token_are_those_of_f16(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=64, kv_type="q8_0", n_threads=1) as session:
        # Layers * heads * (K and V) * values * bytes per value.
        assert bytes_per_token(session, 5) == 3 * 2 * 2 * 32 * 2
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
    asked = {(m.name, m.kv_type) for m in ours.methods if m.measure == RULER}
    assert asked == names - {("uniform", "q8_0")}
    continuing = [method for method in ours.methods if method.measure in command.CONTINUING]
    figures = dict(ours.measure(passage, continuing))
    assert len(figures) == len(continuing) == 19
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
    speeds = [figures[method] for method in continuing if method.measure == SPEED]
    assert len(speeds) == 1 + 6
    assert all(min(each["prompt_speed"], each["decode_speed"]) > 0 for each in speeds)


def text_length(answer: str) -> float:
    return min(1.0, len(answer) / 1000)


def test_questions_are_asked_each_after_the_prompt_alone(tmp_path: Path) -> None:
    """Each question is asked after the prompt alone: stock llama.cpp and a full budget agree,
    whatever came before.
    """
    path = tmp_path / "model.gguf"
    write_llama(path, n_head_kv=2, head_dim=32)
    run = Run(str(path), n_ctx=192, n_threads=1, entropy_config=None)
    ours = Ours(run, StockReference(run), ["uniform"], ["f16"], [1.0, 0.5], 0)
    asked = [Question(tuple(range(n, n + 7)), 16, text_length) for n in (30, 60)]
    prompt = tuple(range(5, 133))
    methods = [method for method in ours.methods if method.measure == FACTS]
    assert [(m.name, m.keep) for m in methods] == [(STOCK, 1.0), ("uniform", 1.0), ("uniform", 0.5)]

    def scores(*questions: Question) -> list[float]:
        figures = dict(ours.measure(Passage("facts 128 0", prompt, (), questions), methods))
        assert [figures[method]["kept"] for method in methods] == [1.0, 1.0, 0.5]
        return [figures[method]["score"] for method in methods]

    first, second, both = scores(asked[0]), scores(asked[1]), scores(*asked)
    assert first[0] == first[1] != second[0]
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])


def test_tables_of_scores_have_a_column_for_every_task() -> None:
    def scored(name: str, text: str, score: float) -> Result:
        figures = {"score": score, "kept": 0.2, "bytes": 0.2}
        return Result(replace(SNAPKV, measure=RULER, name=name), text, "p", figures)

    results = [
        scored("worse", "vt 1024 0", 0.5),
        scored("worse", "vt 1024 1", 0.3),
        scored("worse", "cwe 1024 0", 0.1),
        scored("better", "cwe 1024 0", 1.0),
    ]
    rows = summarise(results, ["vt 1024 0", "vt 1024 1", "cwe 1024 0"], "p")
    assert [row["name"] for row in rows] == ["better", "worse"]
    assert rows[1]["tasks"] == pytest.approx({"vt 1024": 0.4, "cwe 1024": 0.1})
    # Each task has the same weight, however many texts it has.
    assert rows[1]["score"] == pytest.approx(0.25)
    head, _, better, worse = (
        [cell.strip() for cell in line.split("|")] for line in table(rows, RULER).splitlines()
    )
    column = head.index("vt 1024")
    assert (better[column], worse[column]) == ("", "0.400")


def test_presses_are_chosen_by_name_or_part() -> None:
    names = ["KVzip", "KVzip+", "SnapKV, window 64", "AdaKV(SnapKV 64)"]
    assert command.presses("kvzip", names) == ["KVzip"]
    assert command.presses("snap,KVzip+", names) == names[1:]
    assert command.presses("", names) == names


def test_what_is_measured_has_passages_of_its_own(tiny_llama: Path) -> None:
    given = "--measures facts,ruler --prompt 1800 --passkeys 3 --facts-per-text 2 --seed 7"
    tasks = "--tasks niah_single_1 --lengths 1500,1800 --samples 2 --texts heldout_prose_01"
    options = command.parser().parse_args(f"{given} {tasks}".split())
    with closing(Model(tiny_llama, n_gpu_layers=0, verbose=False)) as model:
        facts, ruler = command.rounds(options, model)
    assert (facts.measures, ruler.measures) == ((FACTS,), (RULER,))
    assert [len(passage.questions) for passage in facts.passages] == [2, 2, 2]
    assert max(len(passage.prompt) for passage in facts.passages) <= 1800
    needed = [command.context_of(passage, 64) for passage in ruler.passages]
    assert max(needed[:2]) <= 1500 < max(needed) <= 1800
    assert facts.protocol != ruler.protocol


def test_a_missing_framework_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.PEERS, "kvpress", "no_such_module")
    assert command.installed(["entropykv", "kvpress"]) == ["entropykv"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["kvpress is not installed: pip install '.[peers]'"]
