"""The Dockerfile, and the files of examples/ that no other test runs, work."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entropykv.model.shipped import DEMOS
from tests.support.command import Result, entropykv

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PLUGIN = EXAMPLES / "llm-entropykv" / "llm_entropykv.py"


def example(name: str, *arguments: object) -> Result:
    """Run one of the examples in a process of its own."""
    command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=120, check=False
    )


def assert_only_the_model_is_missing(words: list[str], folder: Path) -> None:
    """Run a command line of `serve` in another folder; check that only its model is missing."""
    moved = [re.sub(r"^(/models|/var/lib/entropykv)", str(folder), word) for word in words]
    result = entropykv(*moved)
    assert result.returncode == 2, result.stderr
    assert f"{folder}/model.gguf: no such file" in result.stderr


def test_the_dockerfile_starts_a_server(tmp_path: Path) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", text, flags=re.MULTILINE)
    (given,) = re.findall(r"^#   docker run .* entropykv (-m .+)$", text, flags=re.MULTILINE)
    program, *words = json.loads(entry)
    assert program.endswith("/bin/entropykv")
    assert_only_the_model_is_missing([*words, *shlex.split(given)], tmp_path)


def test_the_service_file_starts_a_server(tmp_path: Path) -> None:
    text = (EXAMPLES / "entropykv.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.+)$", text, flags=re.MULTILINE)
    program, *words = shlex.split(line)
    assert program.endswith("/bin/entropykv")
    assert_only_the_model_is_missing(words, tmp_path)


def test_the_notebook_can_be_run(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notebook runs without an error, here with fewer tokens than it says."""
    matplotlib: Any = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(EXAMPLES)
    notebook = json.loads((EXAMPLES / "heads.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(each["source"]) for each in notebook["cells"] if each["cell_type"] == "code"]
    code = "\n".join(cells).replace("N_READ = 4000", "N_READ = 320")
    code = code.replace("N_MEASURED = 100", "N_MEASURED = 4").replace("n_ctx=6000", "n_ctx=400")
    exec(compile(code, "heads.ipynb", "exec"), {"__name__": "notebook"})  # noqa: S102
    assert smollm2.is_file()
    assert "KL" in capsys.readouterr().out


def test_the_plugin_for_llm_answers_and_continues() -> None:
    pytest.importorskip("llm")
    spec = importlib.util.spec_from_file_location("llm_entropykv", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.EntropyModel()
    options = model.Options(gguf=str(DEMOS["bitnet"].path), max_tokens=4, temperature=0)

    def said(text: str, turns: list[Any]) -> str:
        prompt = SimpleNamespace(prompt=text, system=None, options=options)
        conversation = SimpleNamespace(responses=turns)
        return "".join(model.execute(prompt, True, None, conversation))

    first = said("The old garden", [])
    assert first
    turn = SimpleNamespace(prompt=SimpleNamespace(prompt="The old garden"), text=lambda: first)
    assert said("Where is it?", [turn])
    loaded = model._loaded[1]
    assert loaded.kv_stats().generated_tokens == 8, "each turn had a model of its own"
    loaded.close()


@pytest.mark.parametrize(
    ("name", "package"), [("openai_client", "openai"), ("langchain_llama", "langchain_openai")]
)
def test_the_clients_say_that_no_server_answers(name: str, package: str) -> None:
    pytest.importorskip(package, reason="needs the extra clients")
    with socket.socket() as silent:  # The socket has a port, but does not listen.
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = example(name, url)
    assert result.returncode == 1
    assert result.stderr.startswith(f"no server answers at {url}; start one: entropykv serve")
    assert len(result.stderr.splitlines()) == 1


def test_the_long_document_says_how_it_is_called(tmp_path: Path) -> None:
    shown = example("long_document", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "Ask several questions about a long document" in shown.stdout
    absent = example("long_document", tmp_path / "absent.txt")
    assert absent.returncode == 2
    assert "absent.txt: no such file; give a text in UTF-8" in absent.stderr
    assert "Traceback" not in absent.stderr
