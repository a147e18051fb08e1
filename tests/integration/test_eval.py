"""`entropykv eval` reports correct figures, and loses none."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Session
from entropykv.cli import main
from entropykv.evaluation.metrics import compare, equal_share
from entropykv.llamacpp.stock import StockSession
from entropykv.model.shipped import DEMOS
from tests.support.eval_command import SHORT, Command, write_texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_texts(tmp_path_factory.mktemp("texts"))


def measured_by_hand(model: Path, text: Path, budget: int, *, inside: bool) -> tuple[Any, float]:
    """Measure by the evaluation's protocol, written again without its code."""
    with closing(StockSession(model, n_ctx=180, n_threads=1, n_ubatch=8)) as stock:
        tokens = stock.tokenize(text.read_text(encoding="utf-8"), add_bos=True)[:140]
        first = stock.decode(tokens[:120])[-1]
        reference = stock.decode(tokens[120:], all_logits=True)
        stock.reset()
        stock.decode(tokens[:120])
        theirs = [int(first.argmax())]
        while len(theirs) < 60:
            theirs.append(int(stock.decode(theirs[-1:])[-1].argmax()))
    options: dict[str, Any] = {"n_ctx": 180, "kv_type": "f16", "n_threads": 1, "n_ubatch": 8}
    options["policy"] = "uniform"
    with Session(model, kv_budget=budget, **options) as session:
        ours = []
        for added in (20, 60):
            session.reset()
            session.cache.resize(budget)
            first = session.decode(tokens[:120])[-1]
            if not inside:
                session.cache.resize(budget + added)
            if added == 20 and inside:
                logits = np.concatenate([session.decode([token]) for token in tokens[120:]])
            elif added == 20:
                logits = session.decode(tokens[120:], all_logits=True)
        ours = [int(first.argmax())]
        while len(ours) < 60:
            ours.append(int(session.decode(ours[-1:])[-1].argmax()))
    return compare(reference, logits, tokens[120:]), equal_share(theirs, ours)


@pytest.mark.parametrize("inside", [False, True])
def test_figures_are_those_of_the_protocol(
    command: Command, tiny_llama: Path, texts: list[Path], inside: bool
) -> None:
    options = ("--prompt", 120, "--continuation", 20, "--greedy", 60, "-ub", 8, "--kv-type", "f16")
    options += ("--policy", "uniform", "--kv-budget", "0.25", *("--inside",) * inside)
    stock, row = command.rows("--text", *texts[:2], *options)
    agreements, shares = zip(
        *(measured_by_hand(tiny_llama, text, 30, inside=inside) for text in texts[:2]), strict=True
    )
    assert row["kl"] == pytest.approx(np.mean([a.kl for a in agreements]), rel=1e-6)
    assert row["kl_worst"] == pytest.approx(max(a.kl for a in agreements), rel=1e-6)
    assert row["top1"] == pytest.approx(np.mean([a.top1 for a in agreements]))
    assert row["perplexity_ratio"] == pytest.approx(
        np.mean([a.perplexity_ratio for a in agreements])
    )
    assert row["greedy_equal"] == pytest.approx(np.mean(shares))
    assert row["kept"] == 0.25
    assert row["policy"] == "uniform"
    assert row["texts"] == stock["texts"] == 2
    assert stock["kv_bytes"] == row["kv_bytes_full"] == 120 * 768
    assert stock["kl"] is None
    assert min(stock["prompt_speed"], stock["decode_speed"], row["decode_speed"]) > 0


def test_a_full_budget_costs_nothing_and_a_small_one_much(
    command: Command, texts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, full, small = command.rows(
        *("--text", *texts, *SHORT, "--kv-type", "f16", "--kv-budget", "1.0,0.1")
    )
    assert full["kl"] < 1e-3
    assert full["top1"] >= 0.95
    assert small["kl"] > 20 * full["kl"]
    assert small["kv_bytes"] < full["kv_bytes"]
    table = capsys.readouterr().out.strip().splitlines()
    assert len(table) == 2 + 3
    assert len({line.count("|") for line in table}) == 1
    assert table[3].startswith("| auto (adaptive:mass+values+predicted) | f16 | 1 | 100.0% |")


def test_equal_bytes_hold_more_of_the_smaller_type(command: Command, texts: list[Path]) -> None:
    options = ("--text", *texts[:1], *SHORT, "--kv-budget", "0.5", "--policy", "uniform")
    stock, f16, q8_0 = command.rows(*options, "--equal-bytes")
    for row in (f16, q8_0):
        assert row["kv_bytes"] <= 0.5 * stock["kv_bytes"]
    assert q8_0["kept"] > 1.5 * f16["kept"]
    assert [row["kept"] for row in command.rows(*options)[1:]] == [0.5, 0.5]


def test_absolute_budgets_policies_and_stores_are_passed_on(
    command: Command, texts: list[Path]
) -> None:
    rows = command.rows(
        *("--text", texts[0], *SHORT, "--kv-type", "q8_0", "--kv-budget", "40,120KiB"),
        *("--policy", "streaming,recency", "--store", "flat", "-ub", 32),
    )
    assert [row["policy"] for row in rows[1:]] == ["streaming"] * 2 + ["recency"] * 2
    assert [row["budget"] for row in rows[1:]] == ["40", "120KiB"] * 2
    assert [row["kept"] for row in rows[1:3]] == [pytest.approx(40 / 120), 1.0]
    assert {item["values"].get("store") for item in command.result()["items"]} == {None, "flat"}


def test_the_shipped_model_and_its_profile(texts: list[Path], tmp_path: Path) -> None:
    target, plot = tmp_path / "result.json", tmp_path / "result.svg"
    code = main(
        [
            *("eval", "--demo", "bitnet", "-t", "1", *map(str, SHORT)),
            *("--text", *map(str, texts[:2]), "--json", str(target), "--plot", str(plot)),
            *("--policy", "profile,uniform", "--kv-type", "q8_0", "--kv-budget", "0.5,0.3"),
        ]
    )
    assert code == 0
    content = json.loads(target.read_text(encoding="utf-8"))
    assert content["complete"]
    assert content["settings"]["entropy_config"]
    assert content["model"]["architecture"] == "bitnet"
    assert len(content["items"]) == 2 * 5
    assert "profile, q8_0" in plot.read_text(encoding="utf-8")


def test_impossible_requests_are_refused_before_anything_long(
    command: Command, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n", encoding="utf-8")
    text = ("--text", *texts, *SHORT)
    for options, expected in (
        (("--text", tmp_path / "absent.txt"), "absent.txt"),
        ((*text, "--prompt", 2040), "trained for"),
        ((*text, "--prompt", 1700), ".txt: has"),
        ((*text, "--kv-budget", "0.01"), "smallest budget"),
        ((*text, "--kv-budget", "1KiB"), "smallest budget"),
        ((*text, "--policy", "profile"), "profile"),
        ((*text, "--store", "flat", "--policy", "uniform"), "flat store"),
        ((*text, "--passkeys", 1, "--passkey-tokens", 40_000), "fewer than the 40000"),
        ((*text, "--passkeys", 1, "--facts-per-text", 40), "wordings"),
        (("--dataset", bad), "bad.jsonl: line 1"),
        ((*text, "--plot", tmp_path / "plot.txt"), "plot"),
        ((*text, "--resume", texts[0]), "is not a log"),
        ((*text, "--resume", tmp_path), "cannot be written"),
        ((*text, "--tuning-share", "0.000000001", "--part", "tuning"), "part tuning"),
    ):
        assert command.code(*options) == 2, options
        out, err = capsys.readouterr()
        assert out == "", options
        assert err.startswith("entropykv: "), err
        assert expected in err, err
        assert len(err.strip().splitlines()) == 1, err
    assert main(["eval", "-m", str(texts[0]), "--text", str(texts[1])]) == 2
    assert "GGUF" in capsys.readouterr().err


def test_a_capped_prompt_is_told(
    command: Command, texts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = command.rows("--text", texts[0], "--greedy", 0, "--kv-budget", 64, "--kv-type", "f16")
    prompt = command.result()["settings"]["prompt"]
    assert f"prompts have {prompt} tokens" in capsys.readouterr().err
    assert 500 < prompt < 2048
    assert rows[1]["greedy_equal"] is None
    assert rows[1]["decode_speed"] is None


@pytest.mark.parametrize("name", ["tiny_llama", "demo"])
def test_stock_goes_back_to_a_saved_state(name: str, request: pytest.FixtureRequest) -> None:
    model = DEMOS["bitnet"].path if name == "demo" else request.getfixturevalue(name)
    with closing(StockSession(model, n_ctx=64, n_threads=1)) as stock:
        tokens = list(range(10, 30))
        stock.decode(tokens)
        state = stock.files.save_state()
        once = stock.decode([5, 6, 7], all_logits=True)
        stock.reset()
        stock.decode([40])
        stock.files.load_state(state)
        assert stock.position == 20
        again = stock.decode([5, 6, 7], all_logits=True)
    assert np.array_equal(once, again)
