"""Parts of `entropykv eval` work, such as divergences of logits, and logs that are read back."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv.errors import (
    BudgetError,
    ContextError,
    EntropyKVError,
    MissingExtraError,
    SettingsError,
)
from entropykv.evaluation import continuation
from entropykv.evaluation.combination import Combination, EngineSettings, combinations
from entropykv.evaluation.continuation import Protocol, References, prompt_length
from entropykv.evaluation.dataset import read_dataset, rouge_scorer
from entropykv.evaluation.metrics import Comparison, compare, equal_share
from entropykv.evaluation.reading import Item, Logits
from entropykv.evaluation.request import EvalRequest
from entropykv.evaluation.results import Record, ResultLog
from entropykv.evaluation.rows import summarize
from entropykv.evaluation.texts import Text, is_tuning, part_of, read_texts
from entropykv.files import read_standard_input
from entropykv.llamacpp.distributions import log_softmax, mean_divergence
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import Budget

RNG = np.random.default_rng(0)


def logits(rows: int, scale: float = 3.0) -> Logits:
    return (RNG.standard_normal((rows, 50)) * scale).astype(np.float32)


def test_identical_logits_agree() -> None:
    same = logits(7)
    agreement = compare(same, same + np.float32(2.0), [1, 2, 3, 4, 5, 6, 7])
    assert agreement.kl == pytest.approx(0.0, abs=1e-6)
    assert agreement.top1 == 1.0
    assert agreement.perplexity_ratio == pytest.approx(1.0, abs=1e-5)


def test_metrics_are_those_computed_by_hand() -> None:
    half = np.log(np.asarray([[0.5, 0.5], [0.5, 0.5]], dtype=np.float32))
    skew = np.log(np.asarray([[0.75, 0.25], [0.1, 0.9]], dtype=np.float32))
    agreement = compare(half, skew, [0, 1])
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    second = 0.5 * math.log(0.5 / 0.1) + 0.5 * math.log(0.5 / 0.9)
    assert agreement.kl == pytest.approx((first + second) / 2, rel=1e-5)
    assert agreement.top1 == 0.5  # Among equal logits, the first token is the choice.
    assert agreement.perplexity_ratio == pytest.approx(0.5 / 0.25, rel=1e-5)


def test_a_comparison_in_parts_is_that_of_the_whole() -> None:
    tokens = RNG.integers(0, 50, 90).tolist()
    reference, other = logits(90), logits(90)
    comparison = Comparison()
    for first, last in ((0, 40), (40, 41), (41, 90)):
        comparison.add(reference[first:last], other[first:last], tokens[first + 1 : last + 1])
    whole = compare(reference, other, tokens)
    assert comparison.result().kl == pytest.approx(whole.kl)
    assert comparison.result().top1 == whole.top1
    assert comparison.result().perplexity_ratio == pytest.approx(whole.perplexity_ratio)


def test_greedy_texts_are_equal_token_by_token() -> None:
    assert equal_share([1, 2, 3, 4], [1, 2, 3, 4]) == 1.0
    assert equal_share([1, 2, 3, 4], [1, 5, 3, 6]) == 0.5
    assert equal_share([1, 2, 3, 4], [1, 2]) == 0.5
    assert equal_share([], []) == 1.0


def test_the_split_is_by_content_and_for_ever() -> None:
    texts = [Text(f"{number}.txt", f"text {number}") for number in range(400)]
    tuning, held_out = (part_of(texts, part, 0.3) for part in ("tuning", "held-out"))
    assert {text.name for text in tuning} | {text.name for text in held_out} == {
        text.name for text in texts
    }
    assert not {text.name for text in tuning} & {text.name for text in held_out}
    assert 80 <= len(tuning) <= 160
    assert part_of(texts, "all", 0.3) == texts
    assert [text.name for text in texts[:12] if is_tuning(text, 0.3)] == [
        f"{number}.txt" for number in (0, 3, 6, 7, 9, 10)
    ]
    renamed = [Text("other", text.content) for text in texts]
    assert [is_tuning(text, 0.3) for text in renamed] == [is_tuning(text, 0.3) for text in texts]
    assert {text.name for text in tuning} < {text.name for text in part_of(texts, "tuning", 0.5)}


def test_a_part_without_texts_is_refused() -> None:
    with pytest.raises(ContextError, match="none of the 1 texts is in the part tuning"):
        part_of([Text("a", "a")], "tuning", 1e-9)


def test_texts_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    good, copy, empty, binary = (tmp_path / name for name in ("good", "copy", "empty", "binary"))
    good.write_text("a text", encoding="utf-8")
    copy.write_text("a text", encoding="utf-8")
    empty.write_text(" \n", encoding="utf-8")
    binary.write_bytes(b"GGUF\0\0\1")
    assert [text.name for text in read_texts([good])] == ["good"]
    for files, words in (
        ([good, copy], "copy: has the same content as good"),
        ([empty], "empty: is empty"),
        ([binary], "binary file"),
        ([tmp_path / "absent"], "absent: No such file"),
    ):
        with pytest.raises(ContextError, match=words):
            read_texts(files)


def test_a_text_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is too long is refused; one without an end, as /dev/zero, would fill memory."""
    monkeypatch.setattr("entropykv.files.MOST_CHARACTERS", 1000)
    text = tmp_path / "text"
    text.write_text("é" * 1000, encoding="utf-8")
    assert len(read_texts([text])[0].content) == 1000
    text.write_text("é" * 1001, encoding="utf-8")
    with pytest.raises(ContextError, match="text: is longer than 256 MiB; give a text file"):
        read_texts([text])
    monkeypatch.setattr("sys.stdin", io.StringIO("é" * 1001))
    with pytest.raises(ContextError, match="standard input: is longer than 256 MiB; give a short"):
        read_standard_input()


def test_prompts_are_as_long_as_texts_and_context_allow() -> None:
    lengths = {"long.txt": 5000, "short.txt": 1000}
    assert prompt_length(None, 256, 64, {"long.txt": 5000}, 8192) == 2048
    assert prompt_length(None, 256, 64, lengths, 8192) == 744
    assert prompt_length(None, 256, 300, lengths, 900) == 600
    assert prompt_length(700, 256, 64, lengths, 8192) == 700
    with pytest.raises(ContextError, match=r"short\.txt: has 1000 tokens, 56 fewer"):
        prompt_length(800, 256, 64, lengths, 8192)
    with pytest.raises(ContextError, match="short"):
        prompt_length(None, 256, 64, {"short": 300}, 8192)
    with pytest.raises(ContextError, match="trained for; use a --prompt of 700"):
        prompt_length(800, 300, 64, lengths, 1000)


def test_references_come_back_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [logits(3), logits(2)]
    with closing(References(50, 1, 5)) as references:
        references.write("text", iter(blocks), lambda: [7, 8])
        assert references.greedy("text") == [7, 8]
        assert np.array_equal(references.rows("text", 0, 5), np.concatenate(blocks))
        assert np.array_equal(references.rows("text", 2, 2), np.concatenate(blocks)[2:4])
        folder = references._folder
    assert not folder.exists()

    def interrupted() -> list[int]:
        raise KeyboardInterrupt

    with closing(References(50, 2, 5, tmp_path / "kept")) as references:
        references.write("text", iter(blocks), lambda: [7])
        with pytest.raises(KeyboardInterrupt):
            references.write("other", iter(blocks), interrupted)
    with closing(References(50, 2, 5, tmp_path / "kept")) as references:
        assert references.has("text")
        assert not references.has("other")
        assert np.array_equal(references.rows("text", 3, 2), blocks[1])
        references.write("cut", iter(blocks[:1]), lambda: [7])
        assert not references.has("cut")
    usage = type("Usage", (), {"free": 999})
    monkeypatch.setattr(continuation.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EntropyKVError, match="TMPDIR"):
        References(50, 1, 5)
    # Only the missing rest needs space, so that the small disk is enough.
    with closing(References(50, 2, 5, tmp_path / "kept")) as references:
        assert references.has("text")


def test_combinations_are_all_of_them_once() -> None:
    made = combinations(["a:1+b", None], ["f16", "q8_0"], ["0.2", "64MiB", "0.20"])
    assert len(made) == 8
    assert made[0] == Combination("a:1+b", "f16", Budget("fraction", 0.2))
    assert len({combination.key for combination in made}) == 8
    with pytest.raises(BudgetError):
        combinations([None], ["f16"], ["1.5"])
    with pytest.raises(SettingsError, match="q5"):
        combinations([None], ["q5"], ["0.5"])
    with pytest.raises(SettingsError, match="no name"):
        combinations(["uniform", ""], ["f16"], ["0.5"])


def test_budgets_are_shares_of_entries_or_of_bytes(tiny_llama: Path) -> None:
    entries = EngineSettings(str(tiny_llama), CacheOptions())
    in_bytes = EngineSettings(str(tiny_llama), CacheOptions(), equal_bytes=True)
    assert entries.full_bytes_per_token == 2 * 3 * 2 * (32 + 32)
    fifth = Budget.parse(0.2)
    assert entries.budget_for(fifth, 2048) == Budget("tokens", 409)
    assert entries.budget_for(Budget.parse(0.29), 100) == Budget("tokens", 29)
    assert in_bytes.budget_for(fifth, 1000) == Budget("bytes", 200 * 768)
    for budget in (Budget.parse("64MiB"), Budget.parse(300)):
        assert entries.budget_for(budget, 2048) == budget
        assert in_bytes.budget_for(budget, 2048) == budget


def test_a_data_set_is_read_whatever_else_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    line = {"context": "c\u2028", "input": "i", "answers": ["a", "b"], "length": 3, "dataset": None}
    text = json.dumps(line, ensure_ascii=False)
    file.write_text(f"{text}\n\n{text}\n", encoding="utf-8")
    questions = read_dataset(file)
    assert [question.name for question in questions] == ["line 1", "line 3"]
    assert questions[0].answers == ("a", "b")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("no json", "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        ('{"input": "i", "answers": ["a"]}', "'context'"),
        ('{"context": 1, "input": "i", "answers": ["a"]}', "'context'"),
        ('{"context": "c", "answers": ["a"]}', "'input'"),
        ('{"context": "c", "input": "i"}', "'answers'"),
        ('{"context": "c", "input": "i", "answers": []}', "'answers'"),
        ('{"context": "c", "input": "i", "answers": [1]}', "'answers'"),
        ("[" * 100_000, "is not a JSON object"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "data.jsonl"
    good = '{"context": "c", "input": "i", "answers": ["a"]}'
    file.write_text(f"{good}\n{line}\n", encoding="utf-8")
    with pytest.raises(ContextError, match=rf"data\.jsonl: line 2 .*{words}"):
        read_dataset(file)


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ContextError, match="is empty"):
        read_dataset(tmp_path / "data.jsonl")


def test_rouge_is_the_best_over_the_answers() -> None:
    score = rouge_scorer()
    figures = score(["nothing of it", "the red old house"], "the red house")
    precision, recall = 1.0, 3 / 4
    f1 = 2 * precision * recall / (precision + recall)
    assert figures["rouge1"] == pytest.approx(f1)
    assert figures["rougeL"] == pytest.approx(f1)
    assert figures["rouge2"] == pytest.approx(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))
    assert score(["something"], "")["rouge1"] == 0.0


def test_without_rouge_score_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(MissingExtraError, match=r"entropykv\[eval\]"):
        rouge_scorer()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "nothing to evaluate"),
        ({"continuation": 0, "texts": [Text("a", "a")]}, "nothing to evaluate"),
        ({"continuation": 1, "texts": [Text("a", "a")]}, "2 or more, or 0"),
        ({"passkeys": 2}, "--text"),
        ({"prompt_template": "{input}"}, r"no \{context\}"),
    ],
)
def test_requests_of_nothing_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        EvalRequest(**fields)


def test_a_session_is_as_long_as_what_follows_the_prompt() -> None:
    assert Protocol(100, continuation=20, greedy=30).n_ctx == 130


def test_log_softmax_of_large_logits() -> None:
    logits = np.array([[1000.0, 1000.0 + np.log(3.0)], [-np.inf, 5.0]], np.float32)
    assert np.exp(log_softmax(logits)) == pytest.approx(
        np.array([[0.25, 0.75], [0.0, 1.0]]), abs=1e-4
    )


def test_divergence_is_that_of_the_definition() -> None:
    whole = np.log(np.array([[0.5, 0.25, 0.25], [0.9, 0.1, 1e-30]], np.float32))
    rows = np.log(np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]], np.float32))
    whole[1, 2] = -np.inf
    expected = (0.25 * np.log(2.0) + 0.9 * np.log(0.9 / 0.8)) / 2
    assert mean_divergence(whole, rows) == pytest.approx(expected, rel=1e-5)
    assert mean_divergence(whole, whole) == 0.0


def test_more_rows_than_are_compared_at_a_time() -> None:
    logits = np.random.default_rng(1).normal(size=(2, 101, 7)).astype(np.float32)
    p, q = (log_softmax(each) for each in logits)
    assert mean_divergence(*logits) == pytest.approx((np.exp(p) * (p - q)).sum() / 101)


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


@pytest.mark.needs("os.mkfifo")
def test_a_log_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A log must be a regular file: a pipe would wait for a writer, and a device may not end."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match="pipe: is not a regular file; give a file for"):
        log_of(tmp_path / "pipe")


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
    with pytest.raises(SettingsError, match="is a directory"):
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
