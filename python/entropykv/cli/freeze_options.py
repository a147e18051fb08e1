"""Options of cold storage; entropykv.freeze_options makes settings of them."""

from __future__ import annotations

import argparse

from entropykv.cli.options import integer
from entropykv.freezing import COLD_CHOICES, WHERE, Freezing

_DEFAULTS = Freezing


def add_freeze_options(parser: argparse.ArgumentParser) -> None:
    """Where evicted entries are kept, and the schedule of policy freeze."""
    group = parser.add_argument_group("freezing (headwise store)")
    group.add_argument(
        "--freeze",
        metavar=WHERE,
        help="keep what is evicted, out of attention: in memory, or in a file in a directory "
        "(default: drop it; with policy freeze: ram)",
    )
    group.add_argument(
        "--freeze-limit",
        metavar="SIZE",
        help="bytes of frozen entries, such as 1GiB (default: what the context needs)",
    )
    group.add_argument(
        "--freeze-type",
        choices=COLD_CHOICES,
        help=f"of frozen entries; auto: that of --kv-type (default: {_DEFAULTS.kv_type})",
    )
    group.add_argument(
        "--recall-interval",
        type=integer(0),
        metavar="N",
        help="look for frozen entries that matter again after so many generated tokens (0: never; "
        f"default: {_DEFAULTS.recall_interval})",
    )
    _add_schedule_options(parser.add_argument_group("schedule of policy freeze"))


def _add_schedule_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--freeze-window",
        type=integer(1),
        metavar="K",
        help=f"newest tokens that are not frozen (default: {_DEFAULTS.window})",
    )
    group.add_argument(
        "--freeze-threshold",
        type=float,
        metavar="T",
        help="older ones are detected where |q.k| is less, on average over the query heads "
        f"(default: {_DEFAULTS.threshold})",
    )
    group.add_argument(
        "--freeze-rate",
        type=float,
        metavar="R",
        help=f"frozen for sqrt(detections) / R steps, rounded down (default: {_DEFAULTS.rate})",
    )
    group.add_argument(
        "--freeze-history",
        type=integer(0),
        metavar="W",
        help=f"detections of the last W steps count (0: all; default: {_DEFAULTS.history})",
    )
