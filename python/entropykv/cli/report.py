"""`entropykv report`: combine measured results in one self-contained page."""

from __future__ import annotations

import argparse

from entropykv.cli.options import check_output, write_output
from entropykv.cli.parser import CommandParser
from entropykv.cli.plots import check_matplotlib
from entropykv.report.page import read_sources, report_page


def add_report(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv report`."""
    parser = commands.add_parser(
        "report",
        description="Write one self-contained page of HTML from the JSON of eval, bench, "
        "calibrate, profile and run: tables, quality over bytes, speed over context, heads as heat "
        "map. Several files of one kind are compared. Needs entropykv[plot].",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="what `eval --json`, `bench --json`, `calibrate`, `profile --convert` or "
        "`run --stats-json` wrote",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="report.html", help="(default: %(default)s)"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run `entropykv report`; returns the exit code."""
    check_matplotlib()
    check_output(options.output)
    sources = read_sources(options.files)
    text = report_page(sources)
    write_output(options.output, text)
    print(f"{options.output}: {len(text.encode('utf-8')):,} bytes, of {len(sources)} files")
    return 0
