"""Compare calibration by entropykv with calibration through transformers (eager attention).

`entropykv calibrate` runs with -m (the quantised GGUF file), with and without loss curves, and with
--hf (the same weights, dequantised to float32). Each run is a process of its own and reads the same
texts. Prints the elapsed seconds and the CPU seconds, and how much the entropies of the same tokens
differ. Run it on an otherwise idle machine:

python benchmarks/calibration.py [--model MODEL.gguf] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from entropykv import EntropyProfile
from entropykv.calibration.hf import eager_entropies, load_eager
from entropykv.calibration.measure import CalibrationSettings, excerpts_of, measure
from entropykv.calibration.observe import Observer
from entropykv.evaluation.texts import read_texts
from inputs import find_model


class Cost(NamedTuple):
    """Hold the time of one process in seconds, and its memory in MiB."""

    wall: float
    cpu: float
    rss_mib: float


def calibrate(output: Path, threads: int, *arguments: object) -> Cost:
    """Run `entropykv calibrate` with `threads` threads; returns its cost. Exits if it fails."""
    command = [sys.executable, "-m", "entropykv.cli", "calibrate", "-o", output, *arguments]
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    start = time.perf_counter()
    process = subprocess.Popen(
        list(map(str, command)),
        env=os.environ | limits,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {process.returncode}")
    wall = time.perf_counter() - start
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def dequantise(path: Path, directory: Path) -> None:
    """Save the weights and the tokenizer of a GGUF file in transformers' format."""
    code = (
        "import sys; from entropykv.calibration.hf import load_eager; "
        "model, tokenizer = load_eager(sys.argv[1], 'cpu', gguf_file=sys.argv[2]); "
        "model.save_pretrained(sys.argv[3]); tokenizer.save_pretrained(sys.argv[3])"
    )
    arguments = [sys.executable, "-c", code, str(path.parent), path.name, str(directory)]
    subprocess.run(arguments, check=True, stderr=subprocess.DEVNULL)


def differences(path: Path, checkpoint: Path, threads: int) -> dict[str, float]:
    """Return by how much the entropies of all heads differ for the same tokens, by name of the
    figure.

    transformers' own tokenizer is not used, because its tokens may differ.
    """
    import torch  # noqa: PLC0415

    torch.set_num_threads(threads)
    settings = CalibrationSettings()
    model, _ = load_eager(str(checkpoint), "cpu")
    with Observer(path, n_ctx=settings.max_length, n_threads=threads) as observer:
        excerpts = excerpts_of(read_texts(None), observer.tokenize, settings)
        ours = measure(observer.entropies, excerpts, lambda _: None)
    theirs = measure(lambda tokens: eager_entropies(model, tokens), excerpts, lambda _: None)
    figures = {}
    for name in ("quarters", "all_rows"):
        x, y = (getattr(each, name).mean(axis=0).ravel() for each in (ours, theirs))
        figures[f"{name}_correlation"] = float(np.corrcoef(x, y)[0, 1])
        figures[f"{name}_mean_difference_bits"] = float(np.abs(x - y).mean())
        figures[f"{name}_largest_difference_bits"] = float(np.abs(x - y).max())
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="GGUF file (default: SmolLM2)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="the fastest round counts")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    options = parser.parse_args()
    path = Path(find_model(options.model))
    threads = options.threads
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, ours, theirs = (Path(folder) / n for n in ("hf", "ours.json", "theirs.json"))
        dequantise(path, checkpoint)
        runs: dict[str, tuple[Path, tuple[object, ...]]] = {
            "default": (ours, ("-m", path, "-t", threads)),
            "without_curves": (ours, ("-m", path, "-t", threads, "--curve-texts", 0)),
            "transformers": (theirs, ("--hf", checkpoint)),
        }
        costs: dict[str, list[Cost]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, (output, arguments) in runs.items():
                costs[name].append(calibrate(output, threads, *arguments))
        measured = differences(path, checkpoint, threads)
        profile = EntropyProfile.load(ours)
    figures: dict[str, float | str] = {"model": path.name, "threads": threads}
    figures["load_average"] = os.getloadavg()[0]
    for name, rounds in costs.items():
        figures[f"{name}_seconds"] = min(cost.wall for cost in rounds)
        figures[f"{name}_cpu_seconds"] = min(cost.cpu for cost in rounds)
        figures[f"{name}_peak_rss_mib"] = max(cost.rss_mib for cost in rounds)
    for kind in ("seconds", "cpu_seconds"):
        for name in ("default", "without_curves"):
            theirs_and_ours = (figures[f"{each}_{kind}"] for each in ("transformers", name))
            a, b = map(float, theirs_and_ours)
            figures[f"{name}_{kind}_ratio"] = a / b
    if profile.measurement is not None and profile.measurement.stability is not None:
        figures["stability"] = profile.measurement.stability
    figures |= measured
    for name, value in figures.items():
        print(f"{name:>34}  {value:.4g}" if isinstance(value, float) else f"{name:>34}  {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
