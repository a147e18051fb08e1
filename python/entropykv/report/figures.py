"""Draw figures of an entropy profile, of the results of bench and eval, and of a freezing run.

The functions return objects of matplotlib's Figure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from entropykv.evaluation.bench import BenchRow
from entropykv.evaluation.combination import STOCK
from entropykv.evaluation.rows import EvalRow
from entropykv.profile.json_fields import HEAD_TYPE_LIMITS, HEAD_TYPES
from entropykv.profile.predictor import LOOKUP_SHARE
from entropykv.profile.profile import EntropyProfile
from entropykv.report.budgets import budget_tables

_LETTERS = "sfmxd"
_MARKERS = "os^Dv*PX<>p"
"""There is one marker more than colours, so that lines of one colour have different markers."""
_LINES = ("-", "--", ":")
_PANELS = 3
"""How many panels of a suite are drawn side by side."""
_QUALITIES = (
    ("kl", "KL divergence in nats", "distance to the full cache"),
    ("recall", "share of planted facts", "facts recalled"),
    ("rouge_l", "ROUGE-L", "answers to the data set"),
)


def profile_figure(profile: EntropyProfile) -> Any:
    """Draw the heads of a profile as a heat map with their types, the distribution of entropies,
    some budgets and, with a predictor, the heads that look facts up.
    """
    figure = _figure(15, max(6.0, 2 + 0.24 * profile.n_layer))
    grid = figure.add_gridspec(2, 5, width_ratios=(1.6, 1.6, 1, 1, 1))
    policy = "entropy" if profile.curves is None else "profile"
    figure.suptitle(f"{profile.model or 'entropy profile'}: attention entropy of the query heads")
    _heatmap(figure.add_subplot(grid[:, :2]), profile, figure)
    lookups = None if profile.predictor is None else profile.predictor.lookups
    _distribution(figure.add_subplot(grid[0, 2:] if lookups is None else grid[0, 2:4]), profile)
    if lookups is not None:
        axes = figure.add_subplot(grid[0, 4])
        image = axes.imshow(lookups, aspect="auto", vmin=0.0, vmax=1.0, interpolation="nearest")
        axes.set_title("heads that look facts up", fontsize=9)
        axes.set_xlabel("KV head")
        _count_in_whole_numbers(axes.xaxis, axes.yaxis)
        label = f"share among the {LOOKUP_SHARE:.0%} of all entries"
        figure.colorbar(image, ax=axes, label=label)
    for column, (budget, table) in enumerate(budget_tables(profile, policy).items()):
        axes = figure.add_subplot(grid[1, 2 + column])
        image = axes.imshow(table, aspect="auto", cmap="viridis", interpolation="nearest")
        axes.set_title(f"budget {budget}, policy {policy}", fontsize=9)
        axes.set_xlabel("KV head")
        _count_in_whole_numbers(axes.xaxis, axes.yaxis)
        axes.set_ylabel("layer" if column == 0 else "")
        figure.colorbar(image, ax=axes, label="entries" if column == 2 else "")
    return figure


def bench_figure(runs: Mapping[str, Sequence[BenchRow]]) -> Any:
    """Draw prompt and decode speed over the length of the prompt."""
    figure = _figure(12, 5)
    for column, field in enumerate(("prompt_speed", "decode_speed")):
        axes = figure.add_subplot(1, 2, column + 1)
        for run, rows in runs.items():
            for number, name in enumerate(dict.fromkeys(row.name for row in rows)):
                points = [(row.length, getattr(row, field)) for row in rows if row.name == name]
                style = "--" if name.startswith("stock") else "-"
                label = _label(runs, run, name)
                marker = _MARKERS[number % len(_MARKERS)]
                axes.plot(*zip(*points, strict=True), style, marker=marker, label=label)
        _count_in_whole_numbers(axes.xaxis)
        axes.set_title(field.replace("_speed", ", tokens per second"))
        axes.set_xlabel("length in tokens")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    return figure


def eval_figure(runs: Mapping[str, Sequence[EvalRow]]) -> Any:
    """Draw measured quality over the bytes of the cache."""
    measured = [each for each in _QUALITIES if any(_measured(runs, each[0]).values())] or [
        _QUALITIES[0]
    ]
    figure = _figure(8 if len(measured) == 1 else 6 * len(measured), 5)
    drawn = [_measured(runs, field) for field, _, _ in measured]
    policies = list(dict.fromkeys(itertools.chain.from_iterable(map(_policies, drawn))))
    for column, (field, unit, title) in enumerate(measured):
        axes = figure.add_subplot(1, len(measured), column + 1)
        _over_bytes(axes, runs, field, policies)
        axes.set_title(title)
        axes.set_ylabel(unit)
    return figure


def suite_figure(runs: Mapping[str, Sequence[EvalRow]]) -> Any:
    """Draw a suite's scores over the bytes of the cache, with a panel for each length and kind of
    question.
    """
    scored = {run: [row for row in rows if row.score is not None] for run, rows in runs.items()}
    tables = list(dict.fromkeys(map(_table_of, itertools.chain(*scored.values()))))
    n_columns = min(len(tables), _PANELS)
    n_lines = -(-len(tables) // _PANELS) or 1
    policies = [each for each in _policies(scored) if each[1] != STOCK]
    figure = _figure(max(8, 5 * n_columns), 5 * n_lines)
    for number, (length, question) in enumerate(tables):
        axes = figure.add_subplot(n_lines, n_columns, number + 1)
        shown = {
            run: [row for row in rows if _table_of(row) == (length, question)]
            for run, rows in scored.items()
        }
        for run, rows in shown.items():
            for full in (row.score for row in rows if row.policy == STOCK):
                label = _label(runs, run, "full cache")
                axes.axhline(full, color="0.5", linestyle="-.", linewidth=0.8, label=label)
        kept = {run: [row for row in rows if row.policy != STOCK] for run, rows in shown.items()}
        _over_bytes(axes, kept, "score", policies)
        axes.set_title(f"{length:,} tokens, question {question}")
        axes.set_ylabel("share of the references that are found")
    return figure


def _table_of(row: EvalRow) -> tuple[int | None, str | None]:
    return row.length, row.question


def _measured(runs: Mapping[str, Sequence[EvalRow]], field: str) -> dict[str, list[EvalRow]]:
    """Return the rows whose `field` was measured and whose bytes are known, by run."""
    return {
        run: [row for row in rows if None not in (getattr(row, field), row.kv_bytes)]
        for run, rows in runs.items()
    }


def _policies(runs: Mapping[str, Sequence[EvalRow]]) -> list[tuple[str, str]]:
    """Return every policy of every run, in the order of their colours in all panels of a figure."""
    return list(dict.fromkeys((run, row.policy) for run, rows in runs.items() for row in rows))


def _over_bytes(
    axes: Any,
    runs: Mapping[str, Sequence[EvalRow]],
    field: str,
    policies: Sequence[tuple[str, str]],
) -> None:
    """Draw one line per policy and KV type: colour and marker show the policy, by its index in
    `policies`, and the dash shows the type.

    Markers are hollow for all types but the first.
    """
    lines: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for run, rows in _measured(runs, field).items():
        for row in rows:
            points = lines.setdefault((run, row.policy, row.kv_type), [])
            points.append(((row.kv_bytes or 0) / 2**20, getattr(row, field)))
    types = list(dict.fromkeys(kv_type for _, _, kv_type in lines))
    for (run, policy, kv_type), points in lines.items():
        number, nth_type = policies.index((run, policy)), types.index(kv_type)
        axes.plot(
            *zip(*sorted(points), strict=True),
            color=f"C{number % 10}",
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle=_LINES[nth_type % len(_LINES)],
            fillstyle="none" if nth_type else "full",
            label=_label(runs, run, f"{policy}, {kv_type}"),
        )
    axes.set_xlabel("KV cache in MiB")
    axes.set_ylim(bottom=0)
    if lines:
        axes.legend(fontsize=8)


def _count_in_whole_numbers(*axes: Any) -> None:
    """Put the axis ticks at whole numbers, for axes that count something."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _label(runs: Mapping[str, Any], run: str, name: str) -> str:
    return name if len(runs) == 1 else f"{run}: {name}"


def trajectory_figure(runs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Draw how many entries a KV head holds on average as the text grows, as Metinov et al. do
    (ASR-KF-EGR).

    `runs`: the results of Trajectory.to_json(), by name. Steps at which the recovery ladder acted
    are marked.
    """
    figure = _figure(9, 5)
    axes = figure.add_subplot()
    longest = max((list(run["positions"]) for run in runs.values()), key=len, default=[])
    axes.plot(longest, longest, "--", color="tab:orange", label="full cache")
    for number, (run, course) in enumerate(runs.items()):
        positions, hot, frozen = (course[name] for name in ("positions", "hot", "frozen"))
        colours = ("tab:blue", "tab:cyan") if number == 0 else (None, None)
        label = _label(runs, run, "in attention")
        axes.plot(positions, hot, color=colours[0], label=label)
        label = _label(runs, run, "frozen")
        axes.plot(positions, frozen, color=colours[1], linewidth=0.8, label=label)
        _mark_climbs(axes, course, _label(runs, run, "recovery"))
    axes.set_title("entries of a KV head on average")
    axes.set_xlabel("tokens read and generated")
    axes.set_ylabel("entries")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


def _mark_climbs(axes: Any, course: Mapping[str, Any], label: str) -> None:
    positions, climbs = course["positions"], course["climbs"]
    for i, rung in enumerate(dict.fromkeys(rung for _, rung in climbs)):
        at = [position for position, climbed in climbs if climbed == rung]
        height = np.interp(at, positions, course["hot"]) if len(positions) else np.zeros(len(at))
        axes.plot(at, height, "v^sDxo"[i % 6], color="tab:red", label=f"{label}: {rung}")


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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
    _count_in_whole_numbers(axes.xaxis, axes.yaxis)
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
    _count_in_whole_numbers(axes.yaxis)
