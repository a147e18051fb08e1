"""Declare the options of cold storage and of the recovery ladder.

session/asked.py makes settings of them, for the command line and for the server.
"""

from __future__ import annotations

import argparse

from entropykv.cli.options import integer
from entropykv.session.asked import RUNGS, WITHOUT_REWALK
from entropykv.settings.freezing import COLD_CHOICES, WHERE, Freezing
from entropykv.settings.recovery import Recovery

_DEFAULTS = Freezing


def add_freeze_options(parser: argparse.ArgumentParser) -> None:
    """Add options of where evicted entries are kept, and of the schedule of policy
    rolling-freeze.
    """
    group = parser.add_argument_group("freezing (headwise store)")
    group.add_argument(
        "--freeze",
        metavar=WHERE,
        help="keep what is evicted, out of attention: in memory, or in a file in a directory "
        "(default: drop it; with policy rolling-freeze: ram)",
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
        help="look for frozen entries that matter again with every N-th generated token (0: never; "
        f"default: {_DEFAULTS.recall_interval})",
    )
    _add_schedule_options(parser.add_argument_group("schedule of policy rolling-freeze"))


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
        help="older ones are detected where they get less than so many even shares of the "
        "attention, or, with freeze:products, less |q.k| (default: 1; 0.5 for |q.k|)",
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


def add_recovery_options(parser: argparse.ArgumentParser, *, rewalks: bool = True) -> None:
    """Add options of what is done when the output becomes uncertain.

    Without `rewalks`, written tokens are never replaced, so the options of rewalks are left out.
    """
    group = parser.add_argument_group("recovery (where entries are frozen)")
    rewalk = ", rewalk (and write the last tokens again; as many are held back)" * rewalks
    group.add_argument(
        "--recovery",
        choices=tuple(RUNGS) if rewalks else WITHOUT_REWALK,
        help="restore frozen entries where the entropy of the output rises or its top probability "
        "falls, one rung further each time, up to this one: soft (what would stay frozen for more "
        f"than a step), window (what the last steps froze), full (all){rewalk} (default: nothing "
        "is watched)",
    )
    group.add_argument(
        "--recovery-deviations",
        type=float,
        metavar="D",
        help=f"above the running mean: what counts (default: {Recovery.deviations})",
    )
    group.add_argument(
        "--recovery-window",
        type=integer(1),
        metavar="N",
        help=f"newest steps that a window reset restores (default: {Recovery.window})",
    )
    if rewalks:
        group.add_argument(
            "--rewalk",
            type=integer(1),
            metavar="K",
            help=f"tokens that a rewalk writes again (default: {Recovery.rewalk})",
        )
