"""Pictures: of an entropy profile, of what bench and eval measured, and of a run that freezes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from entropykv.cli.profile_table import budget_tables
from entropykv.errors import SettingsError
from entropykv.evaluation.bench import BenchRow
from entropykv.evaluation.rows import EvalRow
from entropykv.profile.json_fields import HEAD_TYPE_LIMITS, HEAD_TYPES
from entropykv.profile.profile import EntropyProfile
from entropykv.session.trajectory import Trajectory

SUFFIXES = (".png", ".svg")
_LETTERS = "sfmxd"


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise SettingsError where no plot can be written to the path."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise SettingsError(f"{path}: a plot is a {' or '.join(SUFFIXES)} file; name it so")
    if not Path(path).resolve().parent.is_dir() or Path(path).is_dir():
        raise SettingsError(f"{path}: cannot be written; give a file in an existing directory")
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("plots need matplotlib; install it with: pip install 'entropykv[plot]'")


def draw(profile: EntropyProfile, path: str | os.PathLike[str]) -> None:
    """Write the picture of a profile: heatmap with head types, distribution, budgets.

    SettingsError where that cannot be done.
    """
    check_plot(path)
    figure = _figure(15, max(6.0, 2 + 0.24 * profile.n_layer))
    grid = figure.add_gridspec(2, 5, width_ratios=(1.6, 1.6, 1, 1, 1))
    policy = "entropy" if profile.curves is None else "profile"
    figure.suptitle(f"{profile.model or 'entropy profile'}: attention entropy of the query heads")
    _heatmap(figure.add_subplot(grid[:, :2]), profile, figure)
    _distribution(figure.add_subplot(grid[0, 2:]), profile)
    for column, (budget, table) in enumerate(budget_tables(profile, policy).items()):
        axes = figure.add_subplot(grid[1, 2 + column])
        image = axes.imshow(table, aspect="auto", cmap="viridis", interpolation="nearest")
        axes.set_title(f"budget {budget}, policy {policy}", fontsize=9)
        axes.set_xlabel("KV head")
        axes.set_ylabel("layer" if column == 0 else "")
        figure.colorbar(image, ax=axes, label="entries" if column == 2 else "")
    _save(figure, path)


def draw_bench(rows: Sequence[BenchRow], path: str | os.PathLike[str]) -> None:
    """Write a picture of prompt and decode speed over the length; SettingsError as draw()."""
    check_plot(path)
    figure = _figure(12, 5)
    names = list(dict.fromkeys(row.name for row in rows))
    for column, field in enumerate(("prompt_speed", "decode_speed")):
        axes = figure.add_subplot(1, 2, column + 1)
        for name in names:
            points = [(row.length, getattr(row, field)) for row in rows if row.name == name]
            style = "k--" if name.startswith("stock") else "-"
            axes.plot(*zip(*points, strict=True), style, marker="o", label=name)
        axes.set_title(field.replace("_speed", ", tokens per second"))
        axes.set_xlabel("length in tokens")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    _save(figure, path)


def draw_eval(rows: Sequence[EvalRow], path: str | os.PathLike[str]) -> None:
    """Write a picture of KL divergence over the bytes of the cache; SettingsError as draw()."""
    check_plot(path)
    figure = _figure(8, 5)
    axes = figure.add_subplot()
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.kl is not None and row.kv_bytes is not None:
            points = lines.setdefault(f"{row.policy}, {row.kv_type}", [])
            points.append((row.kv_bytes / 2**20, row.kl))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_title("distance to the full cache")
    axes.set_xlabel("KV cache in MiB")
    axes.set_ylabel("KL divergence in nats")
    axes.set_ylim(bottom=0)
    if lines:
        axes.legend(fontsize=8)
    _save(figure, path)


def draw_trajectory(trajectory: Trajectory, path: str | os.PathLike[str]) -> None:
    """Write a picture of what a KV head holds on average as the text grows, as the freeze document.

    Climbs of the recovery ladder are marked. SettingsError as draw().
    """
    check_plot(path)
    figure = _figure(9, 5)
    axes = figure.add_subplot()
    rows = np.array(list(trajectory.means()), np.float64).reshape(-1, 3)
    positions, hot, frozen = rows.T
    axes.plot(positions, positions, "--", color="tab:orange", label="full cache")
    axes.plot(positions, hot, color="tab:blue", label="in attention")
    axes.plot(positions, frozen, color="tab:cyan", linewidth=0.8, label="frozen")
    for i, rung in enumerate(dict.fromkeys(rung for _, rung in trajectory.climbs)):
        at = [position for position, climbed in trajectory.climbs if climbed == rung]
        height = np.interp(at, positions, hot) if len(positions) else np.zeros(len(at))
        axes.plot(at, height, "v^sDxo"[i % 6], color="tab:red", label=f"recovery: {rung}")
    axes.set_title("entries of a KV head on average")
    axes.set_xlabel("tokens read and generated")
    axes.set_ylabel("entries")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give a file that can be written") from None


def _heatmap(axes: Any, profile: EntropyProfile, figure: Any) -> None:
    image = axes.imshow(
        profile.head_entropies, aspect="auto", cmap="magma", interpolation="nearest", vmin=0.0
    )
    middle = profile.head_entropies.max() / 2
    for (layer, head), kind in np.ndenumerate(profile.kinds()):
        color = "white" if profile.head_entropies[layer, head] < middle else "black"
        axes.text(head, layer, _LETTERS[kind], ha="center", va="center", color=color, fontsize=7)
    names = ", ".join(f"{c} {name}" for c, name in zip(_LETTERS, HEAD_TYPES, strict=True))
    axes.set_title(names, fontsize=9)
    axes.set_xlabel("query head")
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="entropy in bits")


def _distribution(axes: Any, profile: EntropyProfile) -> None:
    axes.hist(profile.head_entropies.ravel(), bins=40, color="0.4")
    for limit in HEAD_TYPE_LIMITS.values():
        axes.axvline(limit, color="tab:red", linewidth=0.8)
    counts = ", ".join(f"{count} {kind}" for kind, count in profile.head_types().items())
    axes.set_title(counts, fontsize=9)
    axes.set_xlabel("entropy in bits")
    axes.set_ylabel("query heads")
