"""`entropykv eval` reports correct figures of texts, facts, data sets and recovery, and continues
from a log without measuring anything twice.
"""

from __future__ import annotations

import json
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Freezing, Session
from entropykv.cli import main
from entropykv.cli.progress import ProgressBar
from entropykv.errors import EntropyKVError
from entropykv.evaluation.combination import EngineSettings
from entropykv.evaluation.dataset import Question, dataset_items
from entropykv.evaluation.metrics import compare, equal_share
from entropykv.evaluation.passkeys import RecallPart, recall_items
from entropykv.evaluation.reading import read, write
from entropykv.evaluation.stock import StockSession
from entropykv.evaluation.texts import Text
from entropykv.llamacpp.model import Model
from entropykv.model.shipped import DEMOS
from entropykv.session.recovery import Climb
from entropykv.settings.freezing import Recovery, Rung
from tests.support.eval_command import SHORT, Command, words, write_texts
from tests.support.logits import tokens_for
from tests.support.tiny_models import write_llama


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_texts(tmp_path_factory.mktemp("texts"))


def measured_by_hand(model: Path, text: Path, budget: int, *, inside: bool) -> tuple[Any, float]:
    """Return the agreement with stock and the fraction of equal greedy tokens, measured by the
    evaluation's protocol, which is written again here.
    """
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


def test_what_was_measured_is_not_measured_again(
    command: Command, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    options = ("--text", *texts, *SHORT, "--kv-type", "f16", "--resume", log)
    first = command.rows(*options, "--kv-budget", "0.5")
    table = capsys.readouterr().out
    content = log.read_bytes()
    assert len(content.splitlines()) == 1 + 2 * 3
    assert command.rows(*options, "--kv-budget", "0.5") == first
    assert capsys.readouterr().out == table
    assert log.read_bytes() == content
    log.write_bytes(content[:-30])
    again = command.rows(*options, "--kv-budget", "0.5,0.2")
    assert [row["kl"] for row in again[:2]] == [row["kl"] for row in first]
    assert again[0] == first[0]
    assert len(log.read_bytes().splitlines()) == 1 + 3 * 3
    assert log.read_bytes().startswith(content[: content[:-1].rindex(b"\n")])


def test_results_of_another_model_are_not_gone_on_with(
    command: Command, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, other = tmp_path / "log.jsonl", tmp_path / "other.gguf"
    options = ("--text", *texts[:1], *SHORT, "--kv-type", "f16", "--resume", log)
    assert command.code(*options) == 0
    write_llama(other, seed=3)
    assert Command(other, tmp_path).code(*options) == 2
    assert "another model" in capsys.readouterr().err
    assert command.code(*options, "--sinks", 2) == 2
    assert "n_sinks was 4, now it is 2" in capsys.readouterr().err


def test_a_table_begins_with_its_first_row(
    command: Command,
    texts: list[Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise EntropyKVError("nothing can be measured")

    monkeypatch.setattr(EngineSettings, "open_stock", fail)
    assert command.code("--text", *texts, *SHORT, "--kv-budget", "0.5") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing can be measured" in err


def test_an_interrupt_keeps_what_is_known(
    command: Command,
    texts: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "resumed"
    folder.mkdir()
    options = ("--text", *texts, *SHORT, "--kv-type", "f16", "--resume", folder / "log.jsonl")
    n_tokens = 0
    update = ProgressBar.update

    def interrupting(bar: ProgressBar, n: int = 1) -> None:
        nonlocal n_tokens
        n_tokens += n
        if n_tokens > 3 * 150 + 200:  # The interruption comes while the second text is read.
            signal.raise_signal(signal.SIGINT)
        update(bar, n)

    with monkeypatch.context() as patched:
        patched.setattr(ProgressBar, "update", interrupting)
        assert command.code(*options, "--kv-budget", "0.5,0.2") == 130
    out, err = capsys.readouterr()
    assert "interrupted" in err
    assert "Traceback" not in err
    assert len(out.strip().splitlines()) == 2 + 2
    content = command.result()
    assert not content["complete"]
    assert [row["texts"] for row in content["rows"]] == [3, 1, 0]
    # The folder has the log, and the predictions of stock llama.cpp.
    assert len(list(folder.iterdir())) == 2
    with monkeypatch.context() as patched:
        patched.setattr(EngineSettings, "open_stock", lambda *_: pytest.fail("stock reads again"))
        rows = command.rows(*options, "--kv-budget", "0.5,0.2")
    assert [row["texts"] for row in rows] == [3, 3, 3]
    assert [file.name for file in folder.iterdir()] == ["log.jsonl"]
    at_once = command.rows(*options[:-2], "--kv-budget", "0.5,0.2")
    for name in ("kl", "top1", "perplexity_ratio", "greedy_equal"):
        assert [row[name] for row in rows] == [row[name] for row in at_once]


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


LADDER = Recovery(
    highest=Rung.FULL, smooth=1, deviations=0.01, warm_up=2, memory=8, refractory=0, calm=100
)
N_TOKENS = 24


def session_of(model: Path, climbs: list[Climb]) -> Session:
    options: dict[str, Any] = {"policy": "uniform", "freeze": Freezing("ram", recall_interval=0)}
    return Session(
        model,
        n_ctx=256,
        n_threads=1,
        kv_budget=40,
        recovery=LADDER,
        on_climb=climbs.append,
        **options,
    )


def test_a_text_is_the_one_that_a_session_generates(uneven_llama: Path) -> None:
    prompt = tokens_for(120)
    generated: list[Climb] = []
    with session_of(uneven_llama, generated) as session:
        expected = list(session.generate(prompt, N_TOKENS))
    climbs: list[Climb] = []
    with session_of(uneven_llama, climbs) as session:
        logits, _ = read(session, prompt, lambda _: None)
        written = write(session, logits, N_TOKENS, lambda _: None)
    assert written.tokens == expected
    assert climbs == generated
    assert sum(climb.restored for climb in climbs) > 0


def test_the_ladder_reaches_every_session(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Recovery | None] = []
    original = Session.__init__

    def noting(self: Session, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        seen.append(self.recovery)

    monkeypatch.setattr(Session, "__init__", noting)
    text = tmp_path / "text.txt"
    text.write_text("the and of to in on at. " * 20, encoding="utf-8")
    short = ("--text", text, "--prompt", 40, "--continuation", 4, "--greedy", 4)
    command = Command(tiny_llama, tmp_path)
    frozen = ("--kv-budget", "20", "--policy", "uniform", "--freeze", "ram")
    command.rows(*short, *frozen, "--recovery", "window", "--recovery-deviations", 1.5)
    assert set(seen) == {Recovery(highest=Rung.WINDOW, deviations=1.5)}
    assert command.result()["settings"]["recovery"]["deviations"] == 1.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--recovery", "full"), "recovery restores what is frozen"),
        (("--recovery", "rewalk", "--freeze", "ram"), "rewalk"),
        (("--recovery-window", 4, "--freeze", "ram"), "soft, window or full"),
    ],
)
def test_a_ladder_of_no_use_is_refused(
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[object, ...],
    words: str,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the and of to in on at. " * 20, encoding="utf-8")
    short = ("--text", text, "--prompt", 40, "--continuation", 4)
    assert Command(tiny_llama, tmp_path).code(*short, *options) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert errors.count("\n") == 1
