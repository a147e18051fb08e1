"""The package and its command line start fast, help is short, and misspelt names are named."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import entropykv as package
from entropykv.cli import COMMANDS, parsers_of
from entropykv.model.geometry import read_geometry
from entropykv.session.session_files import document_header
from tests.support.command import assert_refused, entropykv, python

HEAVY = ("llama_cpp", "numpy", "importlib.metadata", "webbrowser", "tqdm", "jinja2", "gguf")
WITHOUT_SERVER = "import sys; sys.modules['fastapi'] = None\n"


def loaded_by(code: str) -> set[str]:
    """Return the modules that a program has loaded at its end, in a new process."""
    ending = "\nimport sys; print('\\n' + ' '.join(sys.modules))"
    return set(python(code + ending).stdout.splitlines()[-1].split())


def main(*arguments: str) -> str:
    """Return code that runs a command line, and continues after it."""
    return (
        "from entropykv_command import main\nimport sys\n"
        f"sys.argv = ['entropykv', *{arguments!r}]\n"
        "try: main()\nexcept SystemExit: pass\n"
    )


@pytest.mark.parametrize(
    "code",
    [
        *("import entropykv", main("--help"), main(), main("rnu"), main("--version")),
        *(main("run", "--help"), main("serve", "-h"), main("run", "-m", "x.gguf", "--usage")),
    ],
)
def test_nothing_heavy_is_loaded_at_the_start(code: str) -> None:
    loaded = loaded_by(code)
    assert not loaded & {*HEAVY, "entropykv._core"}
    assert not [name for name in loaded if name.startswith("entropykv.session")]
    assert len(loaded) < 200  # Python itself loads 60 modules, and argparse 40 more.


def test_only_the_command_that_was_asked_for_is_loaded() -> None:
    modules = {f"entropykv.cli.{module}" for module, _ in COMMANDS.values()}
    assert loaded_by(main("report", "--help")) & modules == {"entropykv.cli.report"}


@pytest.mark.parametrize("name", package.__all__)
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(package, name) is not None
    assert name in dir(package)


def test_what_is_not_public_is_missed() -> None:
    with pytest.raises(AttributeError, match="module 'entropykv' has no attribute 'Sesion'"):
        package.Sesion  # noqa: B018


def test_a_name_is_loaded_when_it_is_asked_for() -> None:
    assert "llama_cpp" in loaded_by("from entropykv import Budget")
    assert "llama_cpp" not in loaded_by("from entropykv import VersionError")


def test_the_command_alone_prints_help() -> None:
    result = entropykv()
    assert result.returncode == 2
    assert result.stderr == ""
    assert result.stdout == entropykv("--help").stdout
    for name, (_, summary) in COMMANDS.items():
        assert name in result.stdout
        assert summary.split(maxsplit=1)[0] in result.stdout


@pytest.mark.parametrize("command", ["run", "chat", "serve", "read", "plan", "eval"])
def test_help_is_one_screen_with_an_example_and_help_all_is_everything(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first, everything = entropykv(command, "--help"), entropykv(command, "--help-all")
    assert first.returncode == everything.returncode == 0
    lines = first.stdout.splitlines()
    assert len(lines) <= 66
    assert lines[-2] == "example:"
    assert lines[-1].startswith(f"  entropykv {command} ")
    options = parsers_of([command])[command]._option_string_actions
    words = everything.stdout.replace(",", " ").split()
    assert {name for name, action in options.items() if action.help != "==SUPPRESS=="} <= {*words}
    shown = re.findall(r"^  (-\S+?),? ", first.stdout, re.MULTILINE)
    assert len(shown) > 10
    assert {*shown} <= {*options}


@pytest.mark.parametrize("command", ["calibrate", "profile", "models", "convert", "report"])
def test_help_all_works_where_help_shows_all(command: str) -> None:
    everything = entropykv(command, "--help-all")
    assert (everything.returncode, everything.stderr) == (0, "")
    assert everything.stdout == entropykv(command, "--help").stdout


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_first_options_of_run_are_those_that_it_has(
    width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    shown = entropykv("run", "--help").stdout
    assert shown == parsers_of(["run"])["run"]._format_first()


def test_serve_shows_its_help_without_its_extra() -> None:
    code = WITHOUT_SERVER + main("serve", "--help")
    shown = python(code)
    assert "--kv-budget" in shown.stdout
    assert shown.stderr == ""
    code = WITHOUT_SERVER + main("serve", "-m", "x.gguf")
    shown = python(code)
    assert 'pip install "entropykv[server]"' in shown.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("rnu",), ("rnu is not a command of entropykv; did you mean run?",)),
        (("xyzzy",), ("xyzzy is not a command", "see entropykv --help")),
        (("-m", "x.gguf"), ("-m comes after a command", "entropykv run -m")),
        (("run", "--kv_budget", "1"), ("--kv_budget is not", "did you mean --kv-budget?")),
        (("run", "--kvbudget=1"), ("did you mean --kv-budget?",)),
        (("plan", "-m", "x", "--polcy", "a"), ("did you mean --policy?",)),
        (("run", "--xyzzy"), ("--xyzzy is not an option", "see entropykv run --help")),
    ],
)
def test_what_was_meant_is_said(given: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_refused(entropykv(*given), *words)


COMPLETED = (
    (("entropykv", "pl"), {"plan"}),
    (("entropykv", "run", "--kv-"), {"--kv-budget", "--kv-type"}),
    (("entropykv", "run", "--store", "fl"), {"flat"}),
)


@pytest.mark.needs("/bin/bash")
@pytest.mark.parametrize(("words", "expected"), COMPLETED)
def test_a_shell_completes_words(
    words: tuple[str, ...], expected: set[str], tmp_path: Path
) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "entropykv.bash"
    script.write_text(entropykv("completion", "bash").stdout, encoding="utf-8")
    asked = (
        f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        "$(complete -p entropykv | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${COMPREPLY[@]}"
    )
    result = subprocess.run(
        ["/bin/bash", "-c", asked], capture_output=True, text=True, check=True, timeout=60
    )
    assert {*result.stdout.split()} == expected


def test_completion_names_its_extra() -> None:
    code = "import sys; sys.modules['shtab'] = None\n" + main("completion", "zsh")
    shown = python(code)
    assert 'pip install "entropykv[completion]"' in shown.stderr


@pytest.mark.parametrize("budget", ["0.25", "25%"])
@pytest.mark.parametrize("context", [(), ("-c", "96")])
def test_a_fraction_means_the_same_at_every_door(
    tiny_llama: Path, tmp_path: Path, budget: str, context: tuple[str, ...]
) -> None:
    """Without -c, every command takes a fraction of the trained context, although a chat or a
    document may be longer.
    """
    n_ctx = int(context[1]) if context else read_geometry(tiny_llama).n_ctx_train
    text, document = tmp_path / "text.txt", tmp_path / "document.ekv"
    text.write_text("the and of to in. ", encoding="utf-8")
    given = ("-m", tiny_llama, "--kv-budget", budget, "-t", "1", *context)
    plan = json.loads(entropykv("plan", *given, "--json").stdout)
    assert plan["mean_entries"] == round(n_ctx * 0.25)
    for command in (
        ("run", *given, "-p", "the", "-n", "1", "--stats-json", tmp_path / "run.json"),
        ("read", text, *given, "-o", document),
    ):
        result = entropykv(*command)
        assert result.returncode == 0, result.stderr
    told = entropykv("chat", *given, "-n", "1", "-s", "1", stdin="the\n/stats\n").stderr
    size = plan["kv_bytes_budget"]
    assert json.loads((tmp_path / "run.json").read_text())["kv_bytes_budget"] == size
    assert f"of a budget of {size / 2**20:.1f} MiB" in told
    assert str(document_header(document).settings.kv_budget) in (budget, "0.25", str(n_ctx // 4))
