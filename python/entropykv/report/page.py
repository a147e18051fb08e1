"""Make one self-contained HTML page: it loads no scripts, no other files, nothing from the
network.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

import jinja2
from markupsafe import Markup

from entropykv import _version
from entropykv.errors import SettingsError
from entropykv.evaluation import columns
from entropykv.evaluation.bench import BenchRow
from entropykv.evaluation.columns import MIB, number, share
from entropykv.evaluation.rows import EvalRow
from entropykv.files import limited_text
from entropykv.profile.json_fields import HEAD_TYPES
from entropykv.profile.profile import EntropyProfile
from entropykv.report.figures import (
    bench_figure,
    eval_figure,
    profile_figure,
    suite_figure,
    trajectory_figure,
)

Kind = Literal["eval", "ruler", "bench", "profile", "run"]
_WRITERS = (
    "`eval --json`, `bench --json`, `calibrate`, `profile --convert` or `run --stats-json` write"
)


@dataclass(frozen=True)
class ReportSource:
    """Hold the content of one file, and which command wrote it."""

    kind: Kind
    name: str
    """The name of the file in the report, without the path on this machine."""
    n_bytes: int
    data: Any
    """The JSON object; for a profile, an EntropyProfile."""
    rows: Sequence[Any] = ()
    """The rows of eval or bench, as EvalRow or BenchRow."""


def read_sources(paths: Sequence[str | os.PathLike[str]]) -> list[ReportSource]:
    """Read files; raises SettingsError or ProfileError, naming a file that no report can show."""
    files = [Path(path) for path in paths]
    return [_read(path, name) for path, name in zip(files, _names(files), strict=True)]


def _names(files: Sequence[Path]) -> list[str]:
    """Return the names of files, with a number appended if several have the same name."""
    names: list[str] = []
    for file in files:
        stem = file.name.removesuffix(".json").removesuffix(".entropy")
        count = sum(name == stem or name.startswith(f"{stem} (") for name in names)
        names.append(f"{stem} ({count + 1})" if count else stem)
    return names


def _read(path: Path, name: str) -> ReportSource:
    try:
        text = limited_text(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise SettingsError(f"{path}: {why}; give JSON that {_WRITERS}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise SettingsError(f"{path}: is not JSON; give what {_WRITERS}") from None
    kind = _kind_of(data)
    if kind is None:
        raise SettingsError(f"{path}: is of no kind that a report shows; give what {_WRITERS}")
    size = len(text.encode("utf-8"))
    if kind == "profile":
        return ReportSource(kind, name, size, EntropyProfile.from_dict(data, str(path)))
    try:
        return ReportSource(kind, name, size, data, _rows_of(kind, data))
    except (TypeError, KeyError, ValueError, AttributeError):
        raise SettingsError(
            f"{path}: is damaged, or of another version of entropykv; measure it again"
        ) from None


def _kind_of(data: Any) -> Kind | None:
    if not isinstance(data, dict):
        return None
    if "head_entropies" in data:
        return "profile"
    if "entries_kept" in data and "kv_bytes_peak" in data:
        return "run"
    rows = data.get("rows")
    if isinstance(rows, list) and isinstance(data.get("settings"), dict):
        return "ruler" if data["settings"].get("ruler_haystacks") else "eval"
    if isinstance(rows, list) and "read_bandwidth" in data:
        return "bench"
    return None


def _rows_of(kind: Kind, data: dict[str, Any]) -> Sequence[Any]:
    """Return the rows of eval or bench, and none of a single run; raises TypeError or KeyError if a
    field is missing.
    """
    if kind == "run":
        for name in ("positions", "hot", "frozen", "climbs"):
            _ = data.get("trajectory", {name: []})[name]
        return ()
    made = BenchRow if kind == "bench" else EvalRow
    known = {field.name for field in dataclasses.fields(made)}
    return [made(**{key: row[key] for key in row.keys() & known}) for row in data["rows"]]


def of_kind(sources: Sequence[ReportSource], kind: Kind) -> list[ReportSource]:
    """Return the sources of one kind, in their order."""
    return [source for source in sources if source.kind == kind]


@dataclass(frozen=True)
class Table:
    """Hold headings and rows of equal length; the first `n_names` columns are not numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    n_names: int = 1


_QUALITY = tuple(itertools.chain(*columns.OF_PARTS.values()))
_BENCH: tuple[tuple[str, Callable[[BenchRow], str]], ...] = (
    ("tokens", lambda row: f"{row.length:,}"),
    ("prompt tok/s", lambda row: f"{row.prompt_speed:,.0f}"),
    ("ratio to stock", lambda row: f"{row.prompt_ratio:.2f}"),
    ("decode tok/s", lambda row: f"{row.decode_speed:,.1f}"),
    ("ratio to stock", lambda row: f"{row.decode_ratio:.2f}"),
    ("KV MiB", lambda row: number(row.kv_bytes or None, ",.1f", 1 / MIB)),
    ("time evicting", lambda row: number(row.eviction_share if row.kv_bytes else None, ".2%")),
)


def _filled(headings: Sequence[str], rows: list[list[str]], n_names: int) -> Table:
    """Return a table without those columns behind the first `n_names` that are empty."""
    shown = [i for i in range(len(headings)) if i < n_names or any(row[i] for row in rows)]
    return Table([headings[i] for i in shown], [[row[i] for i in shown] for row in rows], n_names)


def eval_table(sources: Sequence[ReportSource]) -> Table:
    """Make a table of quality and speed: one row per combination of every run."""
    shown = [*columns.SETTINGS, *columns.SIZES, *_QUALITY]
    rows = [
        [source.name, *(column.cell(row) for column in shown)]
        for source in sources
        for row in source.rows
    ]
    return _filled(["run", *(column.title for column in shown)], rows, 3)


def suite_table(sources: Sequence[ReportSource]) -> Table:
    """Make a table of a suite's scores in percent: one row per run and settings, grouped by length
    and question, and one column per task.
    """
    tasks = list(
        dict.fromkeys(task for each in sources for row in each.rows for task in row.scores)
    )
    figures = [*columns.SIZES, *columns.OF_SUITES, *map(columns.of_task, tasks)]
    tables = dict.fromkeys((row.length, row.question) for each in sources for row in each.rows)
    rows = [
        [
            source.name,
            *(column.cell(row) for column in columns.SETTINGS),
            f"{row.length:,}",
            str(row.question),
            *(column.cell(row) for column in figures),
        ]
        for table in tables
        for source in sources
        for row in source.rows
        if (row.length, row.question) == table
    ]
    titles = [column.title for column in figures]
    return _filled(["run", "policy", "type", "tokens", "question", *titles], rows, 5)


def bench_table(sources: Sequence[ReportSource]) -> Table:
    """Make a table of speed: one row per cache and length of every run."""
    rows = [
        [source.name, row.name, *(cell(row) for _, cell in _BENCH)]
        for source in sources
        for row in source.rows
    ]
    return _filled(["run", "cache", *(title for title, _ in _BENCH)], rows, 2)


_RUN: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("model", lambda run: PurePath(str(run["model"])).name),
    ("store", lambda run: str(run["store"])),
    ("policy", lambda run: str(run["policy"])),
    ("type", lambda run: str(run["kv_type"])),
    ("budget", lambda run: str(run["kv_budget"])),
    ("frozen to", lambda run: str(run.get("freeze") or "").partition(":")[0]),
    ("tokens of the prompt", lambda run: f"{run['prompt_tokens']:,}"),
    ("tokens generated", lambda run: f"{run['generated_tokens']:,}"),
    ("prompt tok/s", lambda run: _speed(run["prompt_tokens"], run["prompt_seconds"])),
    ("decode tok/s", lambda run: _speed(run["generated_tokens"], run["decode_seconds"])),
    ("KV MiB at most", lambda run: f"{run['kv_bytes_budget'] / MIB:,.2f}"),
    ("KV MiB, peak", lambda run: f"{run['kv_bytes_peak'] / MIB:,.2f}"),
    ("KV MiB of a full f16 cache", lambda run: f"{run['kv_bytes_full'] / MIB:,.2f}"),
    ("entries kept", lambda run: f"{run['entries_kept']:,}"),
    ("of all entries", lambda run: share(run["entries_kept"], run["entries_full"])),
    ("evicted", lambda run: f"{run['evictions']:,}"),
    ("frozen now", lambda run: _count(run.get("frozen_entries"))),
    ("went to cold storage", lambda run: _count(run.get("entries_frozen"))),
    ("came back", lambda run: _count(run.get("entries_restored"))),
    ("because queries needed it", lambda run: _count(run.get("entries_recalled"))),
    ("resident MiB, peak", lambda run: f"{run['peak_rss_bytes'] / MIB:,.0f}"),
)


def _speed(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:,.1f}" if seconds else ""


def _count(value: int | None) -> str:
    return f"{value:,}" if value else ""


def run_table(sources: Sequence[ReportSource]) -> Table:
    """Make a table of single runs, with one column per run."""
    rows = [[title, *(cell(source.data) for source in sources)] for title, cell in _RUN]
    rows = [row for row in rows if any(row[1:])]
    return Table(["", *(source.name for source in sources)], rows)


def profile_table(sources: Sequence[ReportSource]) -> Table:
    """Make a table of profiles: their heads and entropies."""
    rows = []
    for source in sources:
        profile = source.data
        kinds = profile.head_types()
        rows.append(
            [
                source.name,
                f"{profile.n_layer}",
                f"{profile.n_head}",
                f"{profile.n_head_kv}",
                f"{profile.mean:.3f}",
                f"{profile.coefficient_of_variation:.3f}",
                *(f"{kinds[name]}" for name in HEAD_TYPES),
            ]
        )
    headings = ["profile", "layers", "query heads", "KV heads", "mean bits", "variation"]
    return Table([*headings, *HEAD_TYPES], rows)


@dataclass(frozen=True)
class Section:
    """Hold a heading, an introduction, and the tables and figures below it."""

    title: str
    about: str
    table: Table
    figures: Sequence[tuple[str, Any]] = field(default_factory=list)
    """Pairs (caption, figure)."""


def report_page(sources: Sequence[ReportSource]) -> str:
    """Return the HTML page of all sources; several sources of one kind are compared."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.PackageLoader("entropykv.report", "."),
    )
    environment.filters["svg"] = _Inline()
    return environment.get_template("report.html").render(
        sources=sources, sections=list(_sections(sources)), version=_version.VERSION
    )


def _sections(sources: Sequence[ReportSource]) -> Iterator[Section]:
    if runs := of_kind(sources, "eval"):
        figure = eval_figure({run.name: run.rows for run in runs})
        yield Section(
            "Quality over bytes",
            "What budgets cost, compared with the full f16 cache of stock llama.cpp. "
            + " ".join(_about_eval(run) for run in runs),
            eval_table(runs),
            [("quality over the bytes of the cache", figure)],
        )
    if runs := of_kind(sources, "ruler"):
        figure = suite_figure({run.name: run.rows for run in runs})
        yield Section(
            "RULER",
            "Shares of the references that answers contain, in percent, by task, and their mean; "
            "beside those of the full f16 cache of stock llama.cpp. "
            + " ".join(_about_suite(run) for run in runs),
            suite_table(runs),
            [("scores of RULER over the bytes of the cache", figure)],
        )
    if runs := of_kind(sources, "bench"):
        figure = bench_figure({run.name: run.rows for run in runs})
        yield Section(
            "Speed over context",
            "Tokens per second after prompts of several lengths, measured in alternation with "
            "stock llama.cpp. " + " ".join(_about_bench(run) for run in runs),
            bench_table(runs),
            [("speed over the length of the prompt", figure)],
        )
    if runs := of_kind(sources, "run"):
        courses = {run.name: run.data["trajectory"] for run in runs if "trajectory" in run.data}
        figures = [("entries over the text", trajectory_figure(courses))] if courses else []
        yield Section(
            "Runs", "What single runs held, and what they cost.", run_table(runs), figures
        )
    if profiles := of_kind(sources, "profile"):
        yield Section(
            "Heads",
            "The attention entropy of every query head, in bits: what entropy profiles hold.",
            profile_table(profiles),
            [(f"heads of {each.name}", profile_figure(each.data)) for each in profiles],
        )


def _about_eval(run: ReportSource) -> str:
    part = "" if run.data.get("complete", True) else " It was interrupted: rows are missing."
    return f"{run.name}: {run.data['model']['name']}, {len(run.rows)} rows.{part}"


def _about_suite(run: ReportSource) -> str:
    essays = ", ".join(map(str, run.data["settings"]["ruler_haystacks"]))
    return f"{_about_eval(run)} Essays are replaced by {essays}."


def _about_bench(run: ReportSource) -> str:
    threads, bandwidth = run.data["threads"], run.data["read_bandwidth"] / 1e9
    model = PurePath(run.data["model"]).name
    return f"{run.name}: {model}, {threads} threads that read {bandwidth:.1f} GB/s of memory."


class _Inline:
    """Convert figures to SVG, each with unique ids, in the colours of the page."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, figure: Any) -> Markup:
        from matplotlib import rc_context  # noqa: PLC0415

        self._number += 1
        _without_grounds(figure)
        file = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "entropykv"}):
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        svg = file.getvalue()
        svg = svg[svg.index("<svg") :]
        prefix = f"f{self._number}-"
        svg = re.sub(r'\bid="', f'id="{prefix}', svg)
        svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", svg)
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = svg.replace("stroke: #000000", "stroke: currentColor")
        return Markup(re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg))  # noqa: S704


def _without_grounds(figure: Any) -> None:
    """Remove the backgrounds of figure, axes and legends, so that the page's background is
    visible.
    """
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
        if legend := axes.get_legend():
            legend.get_frame().set_alpha(0)
