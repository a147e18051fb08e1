"""Calibration refuses or notes profiles that would be worse than requested, or than the existing
one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from entropykv.calibration.basis import Basis, refuse_worse
from entropykv.calibration.measure import CalibrationSettings, calibrate
from entropykv.calibration.texts import Text
from entropykv.cli import main
from entropykv.errors import CalibrationError
from entropykv.profile.parts import Fingerprint
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


@pytest.mark.parametrize(
    ("worse", "advantage"),
    [
        (("--curve-texts", 0), "has loss curves from 1 texts of 96 tokens, the new one none"),
        (("--curve-length", 64), "1 texts of 96 tokens, the new one from 1 of 64"),
        (("--n-sequences", 2), "has entropies from 3 texts, the new one from 2"),
    ],
)
def test_a_better_profile_is_not_overwritten(
    tiny_llama: Path,
    tmp_path: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    worse: tuple[object, ...],
    advantage: str,
) -> None:
    output = tmp_path / "out.json"
    options = ("--text", text, "--n-sequences", 3)
    assert calibrated(tiny_llama, output, *options) == 0
    before = output.read_bytes()
    assert calibrated(tiny_llama, output, *options, *worse) == 2
    err = capsys.readouterr().err
    assert advantage in err
    assert "--force" in err
    assert output.read_bytes() == before
    assert calibrated(tiny_llama, output, *options, "--seed", 1) == 0  # It is as good as before.
    assert calibrated(tiny_llama, output, *options, *worse, "--force") == 0
    assert output.read_bytes() != before


def test_the_refusal_comes_before_the_work(tiny_llama: Path) -> None:
    def refuse(basis: Basis) -> None:
        assert (basis.texts, basis.curve_texts, basis.curve_length) == (2, 1, 96)
        raise CalibrationError("no")

    def progress(_: int) -> None:
        pytest.fail("something was read")

    settings = CalibrationSettings(2, 32, curve_length=96, curve_texts=1, n_threads=1)
    with pytest.raises(CalibrationError, match="no"):
        calibrate(
            tiny_llama, [Text("a", WORDS * 20)], settings, progress, progress, on_basis=refuse
        )


def test_what_a_profile_is_compared_with(tmp_path: Path) -> None:
    file = Fingerprint("llama", 320, 32, 32, "0" * 64)
    old = Basis((1, 2, 1), file, texts=20, curve_texts=4, curve_length=2048)
    for other in (
        Basis((1, 4, 1), None, texts=1),
        Basis((1, 2, 1), Fingerprint("llama", 320, 32, 32, "1" * 64), texts=1),
    ):
        assert not old.is_of_the_model_of(other)
    worse = Basis((1, 2, 1), None, texts=20, curve_texts=4, curve_length=1024)
    assert old.is_of_the_model_of(worse)
    assert worse.advantage_over(old) is None
    assert old.advantage_over(worse) is not None
    assert Basis((1, 2, 1), file, 1, 8, 2048).advantage_over(old) is not None
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{", encoding="utf-8")
    refuse_worse(damaged, worse)
    refuse_worse(tmp_path / "absent.json", worse)


def test_results_without_curves_do_not_replace_curves(
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
