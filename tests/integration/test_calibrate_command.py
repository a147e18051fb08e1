"""`entropykv calibrate` writes a profile, and `entropykv profile` prints, compares and converts
profiles; bad options are refused, and no file is replaced without --force.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from entropykv import EntropyProfile
from entropykv.cli import main
from tests.support.calibration_texts import HAS_TRANSFORMERS, WORDS
from tests.support.command import assert_refused, entropykv, started

SCRIPT = Path(__file__).resolve().parents[2] / "calibration" / "calibrate_entropy.py"


def test_calibrate_writes_a_profile(tiny_llama: Path, tmp_path: Path) -> None:
    output, text = tmp_path / "out.json", tmp_path / "text.txt"
    text.write_text(WORDS * 60, encoding="utf-8")
    arguments = ("-m", tiny_llama, "-o", output, "--text", text, "--n-sequences", 3)
    result = entropykv("calibrate", *arguments, "--curve-length", 128, "-t", 2)
    assert result.returncode == 0, result.stderr
    assert "mean entropy" in result.stdout
    assert re.search(r"predictor of scores from \d+ tokens, r = 0\.\d+ in text", result.stdout)
    profile = EntropyProfile.load(output)
    assert profile.measurement is not None
    assert [name for name, _ in profile.measurement.texts] == [
        "text.txt",
        "text.txt from token 128",
        "text.txt from token 256",
    ]
    assert sorted(os.listdir(tmp_path)) == ["out.json", "text.txt"]
    shown = entropykv("profile", output)
    assert shown.returncode == 0, shown.stderr
    assert "policy profile" in shown.stdout
    assert "KV heads that look facts up" in shown.stdout
    compared = entropykv("profile", output, output)
    assert "correlation 1.0000" in compared.stdout


def test_a_model_may_be_named(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    options = ("-o", output, "--n-sequences", 1, "--curve-texts", 0, "-t", 1)
    result = entropykv("calibrate", "-m", "bitnet", *options)
    assert result.returncode == 0, result.stderr
    assert EntropyProfile.load(output).n_layer == 3


def test_an_old_profile_is_converted(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    content = {"n_layer": 1, "n_head": 2, "n_head_kv": 1, "n_ctx": 64}
    content["head_entropies"] = {"L0_H0": 1, "L0_H1": 2.5}  # type: ignore[assignment]
    old.write_text(json.dumps(content), encoding="utf-8")
    result = entropykv("profile", old, "--convert", new)
    assert result.returncode == 0, result.stderr
    assert json.loads(new.read_text(encoding="utf-8"))["format_version"] == 2
    assert EntropyProfile.load(new).to_dict() == EntropyProfile.load(old).to_dict()


def test_bad_arguments_of_calibrate(tiny_llama: Path, tmp_path: Path) -> None:
    model, out = ("-m", tiny_llama), ("-o", tmp_path / "a.json")
    calls: list[tuple[tuple[object, ...], str]] = [
        ((*model, "-o", tmp_path / "none" / "a.json"), "cannot be written"),
        ((*model, "-o", tmp_path), "cannot be written"),
        ((*model, *out, "--text", tmp_path / "none.txt"), "none.txt"),
        (("-m", tmp_path / "none.gguf", *out), "none.gguf"),
        ((*model, *out, "--max-length", 4096), "--max-length"),
        ((*model, *out, "--plot", tmp_path / "a.pdf"), "a.pdf"),
        (("--from-results", tmp_path / "none.json", *out), "none.json"),
        (("--hf", tmp_path / "nowhere", *out), "nowhere" if HAS_TRANSFORMERS else "entropykv[hf]"),
    ]
    for arguments, word in calls:
        assert_refused(entropykv("calibrate", *arguments), word)
    assert os.listdir(tmp_path) == []


@pytest.mark.needs("signal.SIGKILL")
def test_an_interrupt_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    process = started("calibrate", "-m", smollm2, "-t", "1", "-o", tmp_path / "out.json")
    assert process.stderr is not None
    seen = ""
    deadline = time.monotonic() + 60
    while not re.search(r"[1-9]\d*/", seen) and time.monotonic() < deadline:
        seen += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == []


def test_the_documents_command_line(tiny_llama: Path, tmp_path: Path) -> None:
    def script(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    output, results = tmp_path / "a.json", tmp_path / "results.json"
    length = ("--n-sequences", 2, "--max-length", 32, "--quick", "--compared-texts", 1)
    result = script("--model", tiny_llama, "--output", output, *length, "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert EntropyProfile.load(output).n_layer == 3
    results.write_text('{"head_entropies": {"L0_H0": 1.5}}', encoding="utf-8")
    assert_refused(script("--from-results", results, f"--output={output}"), "--force")
    result = script("--from-results", results, f"--output={output}", "--force")
    assert result.returncode == 0, result.stderr
    assert EntropyProfile.load(output).mean == 1.5
    word = "no_model" if HAS_TRANSFORMERS else "entropykv[hf]"
    other = tmp_path / "other.json"
    assert_refused(script("--model", tmp_path / "no_model", "--output", other), word)


SHORT_WORDS = "the and of to in ion an he on at "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "long.txt"
    file.write_text(SHORT_WORDS * 60, encoding="utf-8")
    return file


def calibrated(model: Path, output: Path, *options: object) -> int:
    quick = ("--max-length", 32, "--curve-length", 96, "--curve-texts", 1, "-t", 1)
    arguments = ("calibrate", "-m", model, "-o", output, *quick, *options)
    return main([str(argument) for argument in arguments])


def test_texts_too_short_for_curves_are_refused(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, output = tmp_path / "short.txt", tmp_path / "out.json"
    short.write_text("the and of to", encoding="utf-8")
    assert calibrated(tiny_llama, output, "--text", short) == 2
    err = capsys.readouterr().err
    assert "fewer than 64 tokens together, too few for loss curves" in err
    assert "--curve-texts 0" in err
    assert len(err.strip().splitlines()) == 1
    assert not output.exists()
    assert calibrated(tiny_llama, output, "--text", short, "--curve-texts", 0) == 0
    assert EntropyProfile.load(output).curves is None


def test_shorter_curves_than_wanted_are_told(
    tiny_llama: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.txt"
    few.write_text(SHORT_WORDS * 5, encoding="utf-8")
    assert calibrated(tiny_llama, tmp_path / "a.json", "--text", few) == 0
    curves = EntropyProfile.load(tmp_path / "a.json").curves
    assert curves is not None
    assert 64 <= curves.length < 96
    told = f"loss curves are of 1 x {curves.length} tokens, not of 1 x 96"
    assert told in capsys.readouterr().err
    assert calibrated(tiny_llama, tmp_path / "b.json", "--text", text) == 0
    assert "loss curves are of" not in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "learnt", "calibrated"])
def test_no_file_is_replaced_without_force(
    tiny_llama: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """Without --force, no file is replaced: no calibrated profile, no learnt one, no other file."""
    output = tmp_path / "out.json"
    if content == "{":
        output.write_text(content, encoding="utf-8")
    else:
        assert calibrated(tiny_llama, output, "--text", text) == 0
    if content == "learnt":
        replace(EntropyProfile.load(output), source="entropykv --learn, 1024 tokens").save(output)
    before = output.read_bytes()
    capsys.readouterr()
    assert calibrated(tiny_llama, output, "--text", text, "--seed", 1) == 2
    assert capsys.readouterr().err == (
        f"entropykv: {output}: exists already; use --force to replace it, or -o for another file\n"
    )
    assert output.read_bytes() == before
    assert calibrated(tiny_llama, output, "--text", text, "--seed", 1, "--force") == 0
    assert output.read_bytes() != before


def test_the_refusal_comes_before_the_work(
    tiny_llama: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.json"
    output.write_text("{", encoding="utf-8")
    monkeypatch.setattr("entropykv.cli.calibrate.calibrate", lambda *_: pytest.fail("it began"))
    assert calibrated(tiny_llama, output, "--text", text) == 2


def test_results_do_not_replace_a_file(
    tiny_llama: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, results = tmp_path / "out.json", tmp_path / "results.json"
    assert calibrated(tiny_llama, output, "--text", text) == 0
    heads = ", ".join(f'"L{layer}_H{head}": 1.5' for layer in range(3) for head in range(6))
    shape = '"n_layer": 3, "n_head": 6, "n_head_kv": 2, "n_ctx": 64'
    results.write_text(f'{{{shape}, "head_entropies": {{{heads}}}}}', encoding="utf-8")
    arguments = ["calibrate", "--from-results", str(results), "-o", str(output)]
    assert main(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    assert EntropyProfile.load(output).curves is None
