"""`entropykv eval` continues from a log, and handles interruptions."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from entropykv.cli.progress import ProgressBar
from entropykv.errors import EntropyKVError
from entropykv.evaluation.combination import EngineSettings
from tests.support.eval_command import SHORT, Command, write_texts
from tests.support.tiny_models import write_llama


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_texts(tmp_path_factory.mktemp("texts"))


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
