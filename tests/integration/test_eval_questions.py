"""`entropykv eval` measures planted facts and data sets."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from entropykv import Session
from entropykv.evaluation.dataset import Question, dataset_items
from entropykv.evaluation.passkeys import RecallPart, recall_items
from entropykv.evaluation.texts import Text
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.stock import StockSession
from tests.support.eval_command import Command, words, write_texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_texts(tmp_path_factory.mktemp("texts"))


def test_every_question_is_asked_from_the_same_state(tiny_llama: Path, texts: list[Path]) -> None:
    with closing(Model(tiny_llama, n_gpu_layers=0, verbose=False)) as model:
        prose = [Text("a", texts[0].read_text(encoding="utf-8"))]
        items = recall_items(prose, model, n_cases=2, n_tokens=600, facts_per_text=3, seed=1)
    part = RecallPart(items)
    with Session(
        tiny_llama, n_ctx=part.n_ctx, kv_budget=80, n_threads=1, policy="fast"
    ) as session:  # A predictor that learns while the facts are read would change the answers.
        for item in items:
            session.reset()
            values = part.measure(session, item, lambda _: None)
            by_hand = []
            for question, n_tokens in zip(item.questions, item.answer_tokens, strict=True):
                session.reset()
                session.decode(item.tokens)
                by_hand.append(session.detokenize(list(session.generate(question, n_tokens))))
            assert values["answers"] == by_hand
    with closing(StockSession(tiny_llama, n_ctx=part.n_ctx, n_threads=1)) as stock:
        theirs = part.reference(stock, items[0], lambda _: None)
    assert len(theirs["answers"]) == len(theirs["right"]) == 3


def test_a_real_model_recalls_facts_with_the_full_cache(smollm2: Path, tmp_path: Path) -> None:
    prose = Path(__file__).resolve().parents[2] / "benchmarks" / "texts" / "heldout_prose_01.txt"
    stock, full, small = Command(smollm2, tmp_path).rows(
        *("--text", prose, "--continuation", 0, "--passkeys", 2, "--passkey-tokens", 300),
        *("--kv-type", "f16", "--kv-budget", "1.0,0.05"),
    )
    assert stock["questions"] == 8
    assert stock["recall"] >= 0.75
    assert full["recall"] >= 0.75
    assert small["recall"] < full["recall"]


def test_a_data_set_is_answered_by_all(command: Command, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    lines = [
        {"context": words(number, 60 * number), "input": "What?", "answers": ["the end", "an"]}
        for number in (1, 2)
    ]
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    rows = command.rows(
        *("--dataset", data, "--max-tokens", 8, "--kv-type", "f16", "--kv-budget", "1.0,0.2"),
        *("--policy", "uniform"),
        *("--prompt-template", "{context}\nQ: {input} A:"),
    )
    assert [row["answers"] for row in rows] == [2, 2, 2]
    assert rows[0]["rouge1"] == rows[1]["rouge1"]
    answers = [item["values"]["answer"] for item in command.result()["items"]]
    assert answers[0:2] == answers[2:4]
    assert rows[1]["kept"] == 1.0
    assert rows[2]["kept"] == pytest.approx(0.2, abs=0.005)
    assert all(0.0 <= row["rouge_l"] <= 1.0 for row in rows)


def test_the_middle_of_a_long_context_is_left_out(smollm2: Path) -> None:
    context = " ".join(f"{number}th" for number in range(900))
    with closing(Model(smollm2, n_gpu_layers=0, verbose=False)) as model:
        long, short = dataset_items(
            [Question("1", context, "Why?", ("a",)), Question("2", "Short.", "Why?", ("a",))],
            model,
            template="Read: {context} {input}",
            max_tokens=20,
            n_ctx=400,
        )
        text = model.detokenize(long.tokens, special=True)
        brief = model.detokenize(short.tokens, special=True)
    assert 360 < len(long.tokens) <= 380
    assert text.startswith("<|im_start|>")
    assert "Read: 0th 1th 2th" in text
    assert "898th 899th Why?" in text
    assert " 450th" not in text
    assert "Read: Short. Why?" in brief
