"""Write figures to the file that --plot names."""

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
    """Raise SettingsError if no plot can be written to the path."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise SettingsError(f"{path}: a plot is a {' or '.join(SUFFIXES)} file; name it so")
    if not Path(path).resolve().parent.is_dir() or Path(path).is_dir():
        raise SettingsError(f"{path}: cannot be written; give a file in an existing directory")
    check_matplotlib()


def check_matplotlib() -> None:
    """Raise SettingsError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("plots need matplotlib; install it with: pip install 'entropykv[plot]'")


def draw(profile: EntropyProfile, path: str | os.PathLike[str]) -> None:
    """Write the figure of a profile; raises SettingsError if the file cannot be written."""
    check_plot(path)
    _save(profile_figure(profile), path)


def draw_bench(rows: Sequence[BenchRow], path: str | os.PathLike[str]) -> None:
    """Write a figure of prompt and decode speed over the length; raises SettingsError as draw()
    does.
    """
    check_plot(path)
    _save(bench_figure({"": rows}), path)


def draw_eval(rows: Sequence[EvalRow], path: str | os.PathLike[str]) -> None:
    """Write a figure of quality over the bytes of the cache; raises SettingsError as
    draw() does.
    """
    check_plot(path)
    _save(eval_figure({"": rows}), path)


def draw_suite(rows: Sequence[EvalRow], path: str | os.PathLike[str]) -> None:
    """Write a figure of a suite's scores over bytes, one panel per table; raises SettingsError as
    draw() does.
    """
    check_plot(path)
    _save(suite_figure({"": rows}), path)


def draw_trajectory(trajectory: Trajectory, path: str | os.PathLike[str]) -> None:
    """Write a figure of the entries that a KV head holds as the text grows; raises SettingsError as
    draw() does.
    """
    check_plot(path)
    _save(trajectory_figure({"": trajectory.to_json()}), path)


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give a file that can be written") from None
