"""Options of freezing work in every command that has them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from entropykv import Freezing, Session
from entropykv.cli import main

NEEDS_SERVER = pytest.mark.skipif(
    importlib.util.find_spec("fastapi") is None, reason="the extra server is not installed"
)


def run(model: Path, *options: object) -> int:
    arguments = ("-m", model, "-p", "the and of", "-c", 64, "-n", 4, "-t", 1, "--temp", 0, *options)
    return main(["run", *map(str, arguments)])


def test_a_run_that_freezes_writes_figures_and_a_picture(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    figures, plot = tmp_path / "stats.json", tmp_path / "plot.svg"
    outputs = ("--stats-json", figures, "--plot", plot)
    assert run(tiny_llama, "--freeze", "ram", "--recall-interval", 2, *outputs) == 0
    stats = json.loads(figures.read_text(encoding="utf-8"))
    assert stats["freeze"] == "ram"
    assert stats["climbs"] == {}
    trajectory = stats["trajectory"]
    n_read = stats["prompt_tokens"] + stats["generated_tokens"] - 1
    assert trajectory["positions"][-1] == n_read
    assert len(trajectory["positions"]) == stats["generated_tokens"]
    assert {len(trajectory[name]) for name in ("hot", "frozen")} == {len(trajectory["positions"])}
    assert trajectory["hot"][-1] == n_read
    assert "full cache" in plot.read_text(encoding="utf-8")
    assert "frozen" in capsys.readouterr().err


def test_a_run_that_does_not_freeze_says_nothing_of_it(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "stats.json"
    assert run(tiny_llama, "--stats-json", figures) == 0
    stats = json.loads(figures.read_text(encoding="utf-8"))
    assert (stats["freeze"], stats["frozen_entries"]) == (None, 0)
    assert "trajectory" not in stats
    assert "frozen" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--freeze", "tape"), "freeze cannot be 'tape'; use ram or disk:DIRECTORY"),
        (("--freeze-limit", "1MiB"), "give --freeze ram"),
        (("--plot", "x.png"), "--plot draws what is frozen; give --freeze ram"),
        (("--freeze", "ram", "--plot", "x.pdf"), ".png or .svg"),
    ],
)
def test_one_sentence_for_what_cannot_be(
    tiny_llama: Path, options: tuple[object, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_llama, *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("entropykv: ")
    assert words in err
    assert len(err.strip().splitlines()) == 1


OPTIONS = ("--freeze-limit", "1MiB", "--recall-interval", "7")
EXPECTED = Freezing(limit="1MiB", recall_interval=7)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that records the freezing settings of each session that is opened."""
    seen: list[Any] = []
    original = Session.__init__

    def noting(self: Session, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        seen.append(self.config.options.freezing)

    monkeypatch.setattr(Session, "__init__", noting)
    return seen


def test_chat_freezes(tiny_llama: Path, given: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "/exit")
    monkeypatch.setattr("sys.stdin.reconfigure", lambda **_: None, raising=False)
    options = (
        "-c",
        "64",
        "-t",
        "1",
        "--kv-budget",
        "1.0",
        "--no-chat",
        "--freeze",
        "ram",
        *OPTIONS,
    )
    assert main(["chat", "-m", str(tiny_llama), *options]) == 0
    assert given == [EXPECTED]


@pytest.mark.parametrize(
    ("options", "policies", "expected"),
    [
        (("--freeze", "ram", *OPTIONS), "uniform", EXPECTED),
        (OPTIONS, "rolling-freeze", EXPECTED),
        ((), "uniform,rolling-freeze", None),
    ],
)
def test_eval_freezes(
    tiny_llama: Path,
    tmp_path: Path,
    given: list[Any],
    options: tuple[str, ...],
    policies: str,
    expected: Freezing | None,
) -> None:
    text, figures = tmp_path / "text.txt", tmp_path / "eval.json"
    text.write_text("the and of to in on at. " * 20, encoding="utf-8")
    short = ("--prompt", "40", "--continuation", "4", "--greedy", "0", "--kv-type", "f16")
    named = ("-t", "1", "--text", str(text), "--policy", policies, "--kv-budget", "1.0")
    arguments = ("-m", str(tiny_llama), *short, *named, "--json", str(figures))
    assert main(["eval", *arguments, *options]) == 0
    assert set(given) == {expected}
    freezing = json.loads(figures.read_text(encoding="utf-8"))["settings"]["freezing"]
    assert freezing == (None if expected is None else vars(expected))


@NEEDS_SERVER
def test_serve_freezes(tiny_llama: Path) -> None:
    from entropykv.cli import parser_with  # noqa: PLC0415
    from entropykv.cli.parser import CommandParser  # noqa: PLC0415
    from entropykv.cli.served_models import models_of, read_options  # noqa: PLC0415
    from entropykv.server import ModelOptions, ServerOptions  # noqa: PLC0415
    from entropykv.server.models.loading import load_model  # noqa: PLC0415

    options = ["-m", str(tiny_llama), "--n_ctx", "64", "--freeze", "ram", *OPTIONS]
    found = parser_with(["serve"])[0].parse_args(["serve", *options])
    models = models_of(found, read_options(ServerOptions, found), CommandParser())
    assert isinstance(models, ModelOptions)
    model = load_model(models)
    assert model.pool.runner.config.options.freezing == EXPECTED
    model.close()


@NEEDS_SERVER
def test_serve_reads_the_environment(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from entropykv.policy.resolved_config import freezing_of  # noqa: PLC0415
    from entropykv.server import ModelOptions  # noqa: PLC0415

    monkeypatch.setenv("ENTROPYKV_FREEZE", "disk:/var/cold")
    monkeypatch.setenv("ENTROPYKV_FREEZE_TYPE", "q4_0")
    freezing = freezing_of(ModelOptions(model=str(tiny_llama)))
    assert freezing == Freezing("disk:/var/cold", kv_type="q4_0")
