"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from entropykv.config import KV_TYPES, Settings
from entropykv.policy import POLICIES

_DEFAULTS = Settings()


def integer(least: int) -> Callable[[str], int]:
    """An argparse type: an integer of `least` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of {least} or more")
        return value

    return parse


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """Model, context and budget."""
    parser.add_argument("-m", "--model", required=True, metavar="FILE", help="GGUF model")
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=integer(0),
        default=_DEFAULTS.n_ctx,
        metavar="N",
        help="longest sequence in tokens (0, the default: what the model was trained for)",
    )
    group = parser.add_argument_group("KV budget")
    group.add_argument(
        "--kv-budget",
        default="1.0",
        metavar="B",
        help="fraction of the context in (0, 1], tokens per KV head, or bytes such as 64MiB "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--policy",
        choices=POLICIES,
        help="; ".join(f"{p.name}: {p.summary}" for p in POLICIES.values())
        + " (default: entropy with --entropy-config, else uniform; recency on the flat store)",
    )
    group.add_argument(
        "--entropy-config", metavar="FILE", help="entropy profile of the model's heads (JSON)"
    )
    group.add_argument(
        "--kv-type",
        choices=KV_TYPES,
        default=_DEFAULTS.kv_type,
        help="how K and V are stored (default: %(default)s)",
    )
    group.add_argument(
        "--sinks",
        type=integer(0),
        default=_DEFAULTS.n_sinks,
        metavar="N",
        help="first tokens that are never evicted (default: %(default)s)",
    )
    group.add_argument(
        "--recent-window",
        type=integer(1),
        metavar="N",
        help="newest tokens that every KV head keeps (default: half of the mean budget)",
    )
