"""run, chat and serve write a profile with --learn, and say so."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from entropykv import EntropyProfile
from entropykv.calibration.basis import Basis, refuse_worse
from entropykv.cli import main
from entropykv.errors import CalibrationError
from entropykv.profile.find import profile_beside
from entropykv.server import ModelOptions
from entropykv.server.loading import load_llama
from tests.support.calibration_texts import WORDS
from tests.support.command import entropykv
from tests.support.running_server import Server
from tests.support.unwritable import make_folders_unwritable

N_CTX = 2048
PROMPT = WORDS * 120


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_llama, tmp_path / "model.gguf"))


def learnt(model: Path) -> EntropyProfile:
    return EntropyProfile.load(profile_beside(model))


def run(model: Path, *options: object, prompt: str = PROMPT) -> subprocess.CompletedProcess[str]:
    usual = ("-n", 2, "--temp", 0, "-t", 1, "-c", N_CTX, "--kv-budget", 0.2, "--no-chat")
    return entropykv("run", "-m", model, *usual, "-f", "-", *options, stdin=prompt)


def test_run_learns(model: Path) -> None:
    """The answer is the same as without --learn; the next run has the profile, and prints
    no note.
    """
    plain = run(model)
    first = run(model, "--learn")
    assert first.returncode == 0, first.stderr
    assert first.stdout == plain.stdout
    assert f"{profile_beside(model)}: learnt" in first.stderr
    again = run(model, "--learn")
    assert again.returncode == 0, again.stderr
    assert "learn" not in again.stderr
    assert "profile:mass+values+predicted" in again.stderr


def test_calibration_replaces_what_was_learnt(model: Path) -> None:
    """It needs no --force, and prints a note; a calibrated profile is not replaced."""
    assert run(model, "--learn").returncode == 0
    text = model.with_suffix(".txt")
    text.write_text(WORDS * 30, encoding="utf-8")
    shown = entropykv("profile", profile_beside(model))
    assert "learnt by sessions" in shown.stdout
    quick = ("--max-length", 32, "--curve-texts", 1, "-t", 1, "--text", text)
    result = entropykv("calibrate", "-m", model, *quick, "--curve-length", 96)
    assert result.returncode == 0, result.stderr
    assert "was learnt, and is replaced" in result.stderr
    assert not learnt(model).is_learnt
    basis = Basis.of(learnt(model))
    with pytest.raises(CalibrationError, match="--force"):
        refuse_worse(profile_beside(model), Basis(basis.geometry, basis.fingerprint, 1))


def test_run_says_why_it_learns_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "-m", str(model), "-n", "2", "-t", "1", "-c", str(N_CTX), "--learn", "-p"]
    assert main([*command, "the and of"]) == 0
    assert "no profile is learnt yet: 0 tokens" in capsys.readouterr().err
    make_folders_unwritable(monkeypatch)
    assert main([*command, "the and of"]) == 0
    assert capsys.readouterr().err.count("folder is not writable") == 1
    assert main([*command, "the", "--entropy-config", "a.json"]) == 2


def test_chat_learns(model: Path) -> None:
    usual = ("-n", 2, "--temp", 0, "-t", 1, "--no-chat", "--kv-budget", 256)
    turns = "\n".join([WORDS * 60] * 3)
    result = entropykv("chat", "-m", model, *usual, "--learn", stdin=turns)
    assert result.returncode == 0, result.stderr
    assert f"{profile_beside(model)}: learnt" in result.stderr
    assert learnt(model).is_learnt


@pytest.mark.parametrize("several", [(), ("--parallel", 2)])
def test_serve_learns(model: Path, several: tuple[object, ...]) -> None:
    options = ("--kv-budget", 256, "--n_ctx", N_CTX, "-t", 1, "--learn", *several)
    server = Server(model=model, usual=options)
    try:
        for _ in range(2):
            body = json.dumps({"prompt": PROMPT, "max_tokens": 2})
            assert server.post("/v1/completions", body).status_code == 200
            assert learnt(model).is_learnt
    finally:
        code, errors = server.end()
    assert code == 0, errors
    assert errors.count(f"entropykv: --learn: {profile_beside(model)}: learnt") == 1


def test_serve_says_at_once_what_is_in_the_way(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ModelOptions(model=str(model), n_ctx=N_CTX, policy="fast", learn=True)
    llama = load_llama(options)
    llama.tell_what_is_learnt()
    llama.close()
    assert capsys.readouterr().err.count("entropykv: --learn: an entropy profile is learnt") == 1
