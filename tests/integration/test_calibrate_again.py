"""Calibration notes what texts are too short for, and replaces no file that exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entropykv.cli import main
from entropykv.profile.profile import EntropyProfile

WORDS = "the and of to in ion an he on at "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "long.txt"
    file.write_text(WORDS * 60, encoding="utf-8")
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
    few.write_text(WORDS * 5, encoding="utf-8")
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
    """No file is replaced: neither a calibrated profile, nor one that was learnt, nor any other."""
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
