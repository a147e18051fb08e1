"""Write a figure to the file that --plot names."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropykv.errors import SettingsError
from entropykv.evaluation.bench import BenchRow
from entropykv.evaluation.rows import EvalRow
from entropykv.profile.profile import EntropyProfile
from entropykv.report.figures import (
    bench_figure,
    eval_figure,
    profile_figure,
    suite_figure,
    trajectory_figure,
)
from entropykv.session.trajectory import Trajectory

SUFFIXES = (".png", ".svg")


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise SettingsError where no plot can be written to the path."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise SettingsError(f"{path}: a plot is a {' or '.join(SUFFIXES)} file; name it so")
    if not Path(path).resolve().parent.is_dir() or Path(path).is_dir():
        raise SettingsError(f"{path}: cannot be written; give a file in an existing directory")
    check_matplotlib()


def check_matplotlib() -> None:
    """Raise SettingsError where matplotlib is missing, so that nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("plots need matplotlib; install it with: pip install 'entropykv[plot]'")


def draw(profile: EntropyProfile, path: str | os.PathLike[str]) -> None:
    """Write the picture of a profile; raises SettingsError where that cannot be done."""
    check_plot(path)
    _save(profile_figure(profile), path)


def draw_bench(rows: Sequence[BenchRow], path: str | os.PathLike[str]) -> None:
    """Write a picture of prompt and decode speed over the length; raises as draw()."""
    check_plot(path)
    _save(bench_figure({"": rows}), path)


def draw_eval(rows: Sequence[EvalRow], path: str | os.PathLike[str]) -> None:
    """Write a picture of the quality over the bytes of the cache; raises as draw()."""
    check_plot(path)
    _save(eval_figure({"": rows}), path)


def draw_suite(rows: Sequence[EvalRow], path: str | os.PathLike[str]) -> None:
    """Write a picture of a suite's scores over bytes, a panel a table; raises as draw()."""
    check_plot(path)
    _save(suite_figure({"": rows}), path)


def draw_trajectory(trajectory: Trajectory, path: str | os.PathLike[str]) -> None:
    """Write a picture of what a KV head holds as the text grows; raises SettingsError as draw()."""
    check_plot(path)
    _save(trajectory_figure({"": trajectory.to_json()}), path)


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give a file that can be written") from None
