"""Every flag of llama.cpp is taken, taken with a note, or refused with a reason.

Command lines of llama.cpp's README and of popular tutorials work unchanged.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from io import BytesIO, TextIOWrapper
from pathlib import Path

import httpx
import pytest

from entropykv.cli import main, parsers_of
from entropykv.cli.llama_flags import CLI, FLAGS, SERVER, LlamaFlag, Use, flags_of
from entropykv.cli.parser import CommandParser
from tests.support.running_server import Server

# For each tool of llama.cpp, the number of spellings that its README lists, and the SHA-256 of the
# sorted lines. They are those of common/arg.cpp in the llama.cpp of llama-cpp-python 0.3.36.
SPELLINGS = {
    CLI: (345, "6dfdcab05b6505c2773f8caba0dfaf5dbf4c3df69bdbdd5c932fb521356d174f"),
    SERVER: (412, "5a8dadeba21433d401804c8c96bf026f8368948144c740d28a98009a797c61c2"),
}
COMMANDS = ("run", "chat", "serve")


@pytest.fixture(scope="module")
def parsers() -> dict[str, CommandParser]:
    return parsers_of(COMMANDS)


@pytest.mark.parametrize("tool", SPELLINGS)
def test_the_table_has_every_flag_of_the_vendored_release(tool: str) -> None:
    names = sorted(name for flag in flags_of(tool) for name in flag.names)
    assert len(names) == len(set(names)) == SPELLINGS[tool][0]
    assert hashlib.sha256("\n".join(names).encode()).hexdigest() == SPELLINGS[tool][1]


def test_a_flag_has_one_row() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert {flag.values for flag in FLAGS} <= {"0", "1", "2", "?"}


def words_of(flag: LlamaFlag, name: str) -> list[str]:
    return [name, *["value"] * (1 if flag.values == "?" else int(flag.values))]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_table_says_is_what_the_command_does(
    parsers: dict[str, CommandParser],
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = parsers[command]
    for flag in FLAGS:
        for name in flag.names:
            treatment = flag.at(command)
            assert (treatment.use is Use.TAKEN) == (name in parser._option_string_actions), name
            if treatment.use is Use.TAKEN:
                continue
            assert treatment.why, name
            notes: dict[str, str] = {}
            words = ["-m", "x.gguf", *words_of(flag, name)]
            if treatment.use is Use.NOTED:
                assert parser._without_noted(words, notes) == words[:2]
                assert notes == {name: treatment.why}
                continue
            monkeypatch.setattr("entropykv.cli.parser._has_device", lambda: True)
            assert main([command, *words]) == 2
            told = capsys.readouterr().err
            assert told == f"entropykv: {name} is not an option of entropykv {command}; " + (
                f"{treatment.why}\n"
            )
            for value in treatment.unless:
                assert parser._without_noted([name, value], notes) == []
            if treatment.places_weights:
                monkeypatch.setattr("entropykv.cli.parser._has_device", lambda: False)
                assert parser._without_noted(words, notes) == words[:2]


def test_one_note_names_all_that_change_nothing(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ["run", "-m", str(tiny_llama), "-p", "the", "-n", "4", "-t", "1", "-c", "64", "-s", "1"]
    assert main(plain) == 0
    expected = capsys.readouterr().out
    assert main([*plain, "--no-warmup", "--color", "-cb", "--prio=2", "--poll", "50"]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected
    (note,) = [line for line in shown.err.splitlines() if line.startswith("entropykv: ")]
    for name in ("--no-warmup", "--color", "-cb", "--prio", "--poll"):
        assert name in note
    assert main([*plain, "--color", "auto"]) == 0
    assert "--color changes nothing here: " in capsys.readouterr().err
    assert main([*plain, "--prio"]) == 2
    assert "--prio needs 1 value" in capsys.readouterr().err


_LINES = Path(__file__).parents[1] / "support" / "pasted_lines.txt"
PASTED = [line for line in _LINES.read_text("utf-8").splitlines() if not line.startswith("#")]


def pasted(line: str, model: Path, folder: Path) -> tuple[str, list[str]]:
    """Return our command for a line of llama.cpp, and its arguments with existing files."""
    tool, *words = shlex.split(line)
    files = {"-m": model, "--model": model, "--grammar-file": folder / "json.gbnf"}
    for flag, path in files.items():
        if flag in words:
            words[words.index(flag) + 1] = str(path)
    if tool.endswith("llama-server"):
        return "serve", words
    return "run" if {"-p", "--prompt"} & set(words) else "chat", words


def test_twenty_lines_are_pasted() -> None:
    assert len(PASTED) >= 20


@pytest.mark.parametrize("line", [line for line in PASTED if "llama-server" not in line])
def test_pasted_lines_of_llama_cli_run(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "json.gbnf").write_text('root ::= "{}"', encoding="utf-8")
    # This model has a chat template, which a system prompt needs.
    model = request.getfixturevalue("smollm2" if "-sys" in line else "tiny_llama")
    command, words = pasted(line, model, tmp_path)
    typed = TextIOWrapper(BytesIO(b"" if command == "run" else b"Hi\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    assert main([command, *words, "-n", "4"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.parametrize("line", [line for line in PASTED if "llama-server" in line])
def test_pasted_lines_of_llama_server_serve(tiny_llama: Path, tmp_path: Path, line: str) -> None:
    command, words = pasted(line, tiny_llama, tmp_path)
    # The host and port of the line may be used by other tests now.
    for flag in ("--host", "--port"):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    assert command == "serve"
    for flag in ("-m", "--model"):  # The class Server adds the model itself.
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    with Server(*words, model=tiny_llama, usual=()) as server:
        for _ in range(600):
            health = httpx.get(server.url + "/health", timeout=60)
            if health.status_code != 503:
                break
            time.sleep(0.1)
        assert health.status_code == 200
