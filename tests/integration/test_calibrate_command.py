"""`entropykv calibrate` and `entropykv profile` write and refuse what they should."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entropykv import EntropyProfile
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
