"""Make one self-contained HTML page: it loads no scripts, no other files, nothing from the
network.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import jinja2
from markupsafe import Markup

from entropykv import _version
from entropykv.report.figures import (
    bench_figure,
    eval_figure,
    profile_figure,
    suite_figure,
    trajectory_figure,
)
from entropykv.report.sources import ReportSource, of_kind
from entropykv.report.tables import (
    Table,
    bench_table,
    eval_table,
    profile_table,
    run_table,
    suite_table,
)


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
