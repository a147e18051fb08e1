"""`entropykv eval --suite ruler` works with real files: sizes, reading, tables, refusals."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from entropykv import Session
from entropykv.cli import main
from entropykv.evaluation.ruler.scores import QUESTIONS, RulerPart, Suite, own_texts, ruler_parts
from entropykv.evaluation.stock import StockSession
from entropykv.llamacpp.model import Model
from tests.support.eval_command import Command

EASY = ("--suite", "ruler", "--kv-type", "f16", "--policy", "uniform")


def parts_of(model_file: Path, suite: Suite, *, inside: bool = False) -> list[RulerPart]:
    with closing(Model(model_file, n_gpu_layers=0, verbose=False)) as model:
        return ruler_parts(suite, model, own_texts(), seed=3, inside=inside)


def test_prompts_fit_by_the_models_tokenizer(smollm2: Path) -> None:
    parts = parts_of(smollm2, Suite([1024], n_samples=2, questions=QUESTIONS))
    assert len(parts) == 2
    for part in parts:
        assert 0.95 * 1024 < part.n_ctx <= 1024
        assert len(part.items) == 2 * 11
        for item in part.items:
            n_answer = {"vt": 30, "cwe": 120, "fwe": 50}.get(item.task, 128)
            assert len(item.tokens) + len(item.question) + n_answer == item.n_steps <= 1024
    (again,) = parts_of(smollm2, Suite([1024], n_samples=1, tasks=["vt", "niah_single_2"]))
    assert [vars(item) for item in again.items] == [vars(parts[0].items[i]) for i in (2, 16)]
    with closing(Model(smollm2, n_gpu_layers=0, verbose=False)) as model:
        text = model.detokenize(parts[0].items[0].tokens, special=True)
        question = model.detokenize(parts[0].items[0].question, special=True)
        whole = model.detokenize(parts[1].items[0].tokens, special=True)
    assert text.startswith("<|im_start|>system")
    assert text.endswith("There and back again.\n")
    assert question.startswith("What is the special magic number for ")
    assert "text?<|im_end|>\n<|im_start|>assistant\n The special magic number for" in question
    assert question.endswith(" mentioned in the provided text is")
    assert whole == text + question
    assert parts[1].items[0].question == ()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_budget_is_that_of_the_context(tiny_llama: Path, question: str, inside: bool) -> None:
    suite = Suite([700], ["fwe"], 1, [question])
    (part,) = parts_of(tiny_llama, suite, inside=inside)
    (item,) = part.items
    options: dict[str, Any] = {"n_ctx": part.n_ctx, "kv_type": "f16", "policy": "uniform"}
    options |= {"kv_budget": 200, "n_ubatch": 64, "n_threads": 1}
    with Session(tiny_llama, **options) as session:
        values = part.measure(session, item, lambda _: None)
        assert 0.9 * 200 * 3 * 2 < values["entries_kept"] <= 200 * 3 * 2
        session.reset()
        session.cache.resize(200)
        session.decode(item.tokens)
        if not inside:
            session.cache.resize(200 + len(item.question) + item.n_generated)
        answer = list(session.generate(item.question, item.n_generated))
        assert values["answer"] == session.detokenize(answer)
        assert session.stats().entries_kept <= (session.cache.budgets()[0][0]) * 3 * 2
    with closing(StockSession(tiny_llama, n_ctx=part.n_ctx, n_threads=1)) as stock:
        theirs = part.reference(stock, item, lambda _: None)
    assert theirs["answer"] != values["answer"]


def test_a_real_model_finds_a_needle_in_noise(smollm2: Path, tmp_path: Path) -> None:
    options = (*EASY, "--tasks", "niah_single_1", "--lengths", 400, "--samples", 1)
    options += ("--policy", "streaming", "--kv-budget", "1.0,0.1")
    rows = Command(smollm2, tmp_path).rows(*options)
    stock, full, small = rows
    assert stock["score"] == full["score"] == 1.0
    assert full["score_relative"] == 1.0
    assert small["score"] == small["score_relative"] < 1.0
    assert small["scores"] == {"niah_single_1": small["score"]}


def test_every_length_and_question_has_a_table(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, log, plot = tmp_path / "prose.txt", tmp_path / "log.jsonl", tmp_path / "plot.svg"
    text.write_text("The end of it. Then another one. " * 30, encoding="utf-8")
    options = (*EASY, "--text", text, "--tasks", "fwe,niah_single_2", "--resume", log)
    options += ("--question", "both", "--kv-budget", "0.5")
    rows = command.rows(*options, "--lengths", "600,500", "--samples", 1, "--plot", plot)
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert tables[::2] == [
        f"RULER, {length} tokens, question {question} while the context is read; essays replaced "
        "by prose.txt"
        for length in (500, 600)
        for question in QUESTIONS
    ]
    for table in tables[1::2]:
        lines = table.splitlines()
        assert len(lines) == 4
        assert lines[0].endswith("| niah_single_2 | fwe | mean | of full cache |")
        assert len({line.count("|") for line in lines}) == 1
    assert [(row["policy"], row["length"], row["question"]) for row in rows] == [
        (policy, length, question)
        for length in (500, 600)
        for question in QUESTIONS
        for policy in ("stock", "uniform")
    ]
    drawn = plot.read_text(encoding="utf-8")
    assert "600 tokens, question known" in drawn
    content = log.read_bytes()
    assert len(content.splitlines()) == 1 + 2 * 2 * 2 * 2
    again = command.rows(*options, "--lengths", "500", "--samples", 2)
    assert log.read_bytes().startswith(content)
    assert len(log.read_bytes().splitlines()) == 1 + 16 + 8
    assert [row["answers"] for row in again] == [4] * 4
    assert command.result()["settings"]["ruler_haystacks"] == ["prose.txt"]
    names = {item["item"] for item in command.result()["items"]}
    assert "niah_single_2 500 1" in names
    text.write_text("Something else. " * 60, encoding="utf-8")
    assert [row["answers"] for row in command.rows(*options, "--lengths", "500")][:1] == [20]


def test_impossible_suites_are_refused_in_one_sentence(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"context": "a", "input": "b", "answers": ["c"]}', encoding="utf-8")
    for options, expected in (
        (("--suite", "ruler", "--tasks", "qa_1"), "RULER has no task 'qa_1'"),
        (("--suite", "ruler", "--lengths", "4096"), "longer than the 2048"),
        (("--suite", "ruler", "--lengths", "100"), "100 tokens are too few for prompts of niah"),
        (("--suite", "ruler", "--lengths", "1k"), "'1k' is not an integer"),
        (("--suite", "ruler", "--samples", "0"), "'0' is not an integer"),
        (("--suite", "helmet"), "helmet"),
        (("--suite", "ruler", "--question", "no"), "invalid choice"),
        (("--suite", "ruler", "--passkeys", "2"), "a suite is measured alone"),
        (("--suite", "ruler", "--dataset", data), "a suite is measured alone"),
        (("--suite", "ruler", "--lengths", "2000", "--kv-budget", "0.0001"), "smallest budget"),
    ):
        assert command.code(*options) == 2, options
        out, err = capsys.readouterr()
        assert out == "", options
        assert expected in err, err
        assert err.startswith("entropykv: "), err
        assert len(err.strip().splitlines()) == 1, err


def test_without_wonderwords_the_extra_is_named(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wonderwords", None)
    from entropykv.evaluation.ruler import prompts  # noqa: PLC0415

    prompts.load_vocabulary.cache_clear()
    assert main(["eval", "-m", str(tiny_llama), "--suite", "ruler", "--lengths", "2000"]) == 2
    assert "pip install 'entropykv[eval]'" in capsys.readouterr().err
